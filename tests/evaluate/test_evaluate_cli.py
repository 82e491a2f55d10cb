"""`resformer eval` and `resformer generate`: mistakes that are found before any model or text is read."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from resformer.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command line that must end with code 2 and one line; return it."""
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("flag", ["--batch-size", "--sequence-length", "--max-tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_out_of_range_is_named_also_where_a_result_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: int
) -> None:
    (tmp_path / "eval.json").write_text("{}")
    said = refused(capsys, "eval", tmp_path, "--data", tmp_path, flag, value)
    assert f"{flag} is {value}; expected 1 to " in said


def test_the_place_of_the_result_is_looked_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ("eval", tmp_path / "none", "--data", tmp_path / "none", "--json")
    missing = tmp_path / "missing" / "a.json"
    assert f"--json {missing}: there is no directory {missing.parent}" in refused(capsys, *call, missing)
    assert f"--json {tmp_path} is a directory" in refused(capsys, *call, tmp_path)
    (tmp_path / "a.json").write_text("{}")
    assert "a.json exists; pass --overwrite" in refused(capsys, *call, tmp_path / "a.json")
    assert f"--json {missing}: there is no directory" in refused(capsys, "check-variant", "sparse", "--json", missing)


def test_a_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = ("generate", tmp_path, "--prompt", "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert "--prompt -: standard input is no UTF-8 (byte 4 is 0xe9)" in refused(capsys, *call)
    monkeypatch.setattr(sys, "stdin", None)
    assert "--prompt -: standard input is closed" in refused(capsys, *call)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("caf\u00e9".encode())))
    assert "holds no model" in refused(capsys, *call)
