"""`resformer watch`: a run seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resformer.cli import main
from resformer.errors import UserError
from resformer.train.watch import lambda_lines, line, look


def test_a_finished_run(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = look(whole_run)
    assert (view.state, view.steps, view.checkpoint, view.train["step"]) == ("finished", 20, 20, 20)
    assert main(["watch", str(whole_run)]) == 0  # ends by itself
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    for part in ("finished  step 20/20", f"loss {view.train['loss']:.4f}", "tokens/s", "GiB", "checkpoint 20"):
        assert part in said
    assert "ETA" not in said
    assert main(["watch", str(whole_run), "--once"]) == 0
    said = capsys.readouterr().out
    assert f"{view.lambdas['first'][0]:.2f}" in said


def test_every_state_on_the_way(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(whole_run / "config.toml", out)
    assert look(out).state == "starting"
    assert line(look(out)).endswith("step 0/20  no checkpoint yet")
    whole = (whole_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join(whole[:7]) + whole[7][:20])  # the eighth is half written
    view = look(out)
    assert (view.state, view.train["step"], view.validation) == ("running", 7, {})
    assert "ETA 0:0" in line(view)
    assert lambda_lines(view) == []
    (out / "metrics.jsonl").write_bytes(b"\xff no row\n" + b"".join(whole[:3]))  # shorter: a resume cuts it back
    assert look(out).train["step"] == 3
    old = time.time() - 7300
    os.utime(out / "metrics.jsonl", (old, old))
    assert "no new row for 2:01:" in line(look(out))


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no run in .* \(config.toml is missing\)"):
        look(tmp_path)
    assert main(["watch", str(tmp_path / "nowhere"), "--once"]) == 2
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2
    (tmp_path / "config.toml").write_text("[")
    assert main(["watch", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_it_needs_no_torch(whole_run: Path) -> None:
    code = (
        "import sys; from resformer.cli import main; "
        f"main(['watch', {str(whole_run)!r}, '--once']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
