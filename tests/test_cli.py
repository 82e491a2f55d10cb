"""The command line: help, exit codes, one-line errors, and the whole way from text to a generated sample."""

from __future__ import annotations

import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest

from resformer import __version__, cli, shell
from resformer.errors import UserError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command line in this process; SystemExit counts as its code, as it does in the shell."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line that must end with code 2 and one line that says why (after progress, if any); return it."""
    code, _, err = run(capsys, *arguments)
    assert code == 2, err
    *progress, line = err.splitlines()
    assert line.startswith("resformer: error: ") and "error" not in "".join(progress), err
    return line


# ------------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for name, function in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert (function.__doc__ or "").split("\n\n")[0].split("\n")[0] in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"resformer {__version__}\n", "")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_explains_every_option(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, *name.split(), "--help")
    assert code == 0
    assert out.startswith(f"usage: resformer {name} ")
    for parameter in inspect.signature(cli.COMMANDS[name]).parameters:
        assert f"\n        {parameter}: " in (cli.COMMANDS[name].__doc__ or ""), f"{name} does not explain {parameter}"


def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "suite", "--help")
    assert code == 0
    assert "suite status" in out and "data prepare" not in out


# ---------------------------------------------------------------------------------------------------- usage mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian quick", "unknown command 'trian'; did you mean 'train'?"),
        ("data prepair", "unknown command 'data prepair'; did you mean 'data prepare'?"),
        ("xyzzy", "unknown command 'xyzzy'; `resformer --help` lists"),
        ("data", "`resformer data` needs one more word: prepare, inspect"),
        ("", "a command is missing"),
        ("train quick --out r --sed 1", "unknown option --sed of `resformer train`; did you mean '--seed'?"),
        ("train quick", "Missing from resformer train: --out PATH"),
        ("train quick --out r --steps many", "--steps: expected a whole number, got 'many'"),
        ("train quick --out r --steps 1.5", "--steps: expected a whole number, got '1.5'"),
        ("train quick --out", "--out"),
        ("train quick --out r --set", "--set of `resformer train` needs at least one value"),
        ("train quick spare --out r", "spare"),
        ("data prepare --input x --out y --on-bad-line ignore", "'ignore'"),
        ("generate m --prompt x --temperature warm", "--temperature: expected a number, got 'warm'"),
    ],
)
def test_usage_mistakes_are_one_line_and_exit_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *line.split())
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- shell


def collect(*, kind: Literal["a", "b"] = "a", items: tuple[str, ...] = (), count: int | None = None) -> None:
    """Do nothing.

    Args:
        kind: One or the other.
        items: Some texts.
        count: A number.
    """


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"kind": "a", "items": (), "count": None}),
        ("--items x y --count 3", {"kind": "a", "items": ("x", "y"), "count": 3}),
        ("--items x --kind b --items y z", {"kind": "b", "items": ("x", "y", "z"), "count": None}),
        ("--items=x --items=y", {"kind": "a", "items": ("x", "y"), "count": None}),
    ],
)
def test_parsing(line: str, expected: dict[str, Any]) -> None:
    assert shell.parse(collect, line.split(), program="p") == ((), expected)


def failing(error: BaseException) -> dict[str, shell.Command]:
    def fail() -> None:
        """Fail."""
        raise error

    return {"fail": fail}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("heads do not divide"), 2, "p: error: heads do not divide\n"),
        (FileNotFoundError(2, "No such file", "corpus.txt"), 2, "p: error: No such file: corpus.txt\n"),
        (KeyboardInterrupt(), 130, "p: error: interrupted\n"),
        (
            RuntimeError("loss is nan\nat step 3"),
            1,
            "p: error: RuntimeError: loss is nan at step 3 (set RESFORMER_TRACEBACK=1 for the traceback)\n",
        ),
    ],
)
def test_errors_become_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    monkeypatch.delenv(shell.TRACEBACK_VARIABLE, raising=False)
    assert shell.run(failing(error), ["fail"], program="p", about="", version="1") == code
    assert capsys.readouterr().err == message
    monkeypatch.setenv(shell.TRACEBACK_VARIABLE, "1")
    assert shell.run(failing(error), ["fail"], program="p", about="", version="1") == code
    assert "Traceback" in capsys.readouterr().err


def test_a_system_exit_passes() -> None:
    with pytest.raises(SystemExit) as stop:
        shell.run(failing(SystemExit(143)), ["fail"], program="p", about="", version="1")
    assert stop.value.code == 143


def test_a_reader_that_goes_away_is_no_failure_to_report() -> None:
    command = f"{sys.executable} -m resformer --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------- from text to a sample


TRAIN = "train tiny --data data --out run --variant svformer --steps 4 --seed 3"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prepared corpus in data/ and a trained run in run/."""
    place = tmp_path_factory.mktemp("cli")
    (place / "texts").mkdir()
    for domain, words in (
        ("rivers", "the water flows down to the sea and "),
        ("stars", "a light is seen far above us, "),
    ):
        lines = [json.dumps({"text": f"{words * 12}{number}"}) for number in range(40)]
        (place / "texts" / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        prepare = "data prepare --input texts --out data --vocab-size 300 --validation-share 0.1"
        assert cli.main(prepare.split()) == 0
        assert cli.main(TRAIN.split()) == 0
    return place


@pytest.fixture
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_flags_reach_the_run(inside: Path) -> None:
    config = tomllib.loads((inside / "run" / "config.toml").read_text())
    assert (config["model"]["variant"], config["train"]["steps"], config["train"]["seed"]) == ("svformer", 4, 3)
    assert config["data"]["dir"] == "data"


def test_inspect(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "inspect", "data", "--json")
    assert code == 0
    found = json.loads(out)
    assert set(found["domains"]) == {"rivers", "stars"} and found["vocab_size"] <= 300
    code, out, _ = run(capsys, "data", "inspect", "data")
    assert code == 0
    assert found["fingerprint"] in out and "the water flows" in out


def test_eval_writes_and_does_not_overwrite(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "eval", "run", "--data", "data")
    assert code == 0
    result = json.loads((inside / "run" / "eval.json").read_text())
    assert set(result["domains"]) == {"rivers", "stars"}
    assert f"{result['loss']:.4f}" in out
    before = files(inside)
    assert "eval.json exists; pass --overwrite" in refused(capsys, "eval", "run", "--data", "data")
    assert files(inside) == before
    assert run(capsys, "eval", "run", "--data", "data", "--overwrite")[0] == 0
    assert run(capsys, "eval", "run", "--data", "data", "--json", "other.json")[0] == 0
    assert json.loads((inside / "other.json").read_text())["loss"] == result["loss"]


def test_generate(inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--max-new-tokens", "8", "--temperature", "1")
    code, first, _ = run(capsys, "generate", "run", "--prompt", "the water", *options)
    assert code == 0 and first.startswith("the water")
    assert run(capsys, "generate", "run", "--prompt", "the water", *options, "--seed", "0")[1] == first
    assert run(capsys, "generate", "run", "--prompt", "the water", *options, "--seed", "1")[1] != first
    monkeypatch.setattr(sys, "stdin", io.StringIO("the water\n"))
    assert run(capsys, "generate", "run", "--prompt", "-", *options)[1] == first
    line = ("generate", "run", "--prompt", "a", *options)
    code, out, err = run(capsys, *line, "--stats", "--check-cache", "--strict")
    assert code == 0 and out == run(capsys, *line)[1]  # standard output has the text alone
    tokens = int(err.split(" bytes for ")[1].split()[0])
    # Two layers of 32 channels in fp32: two planes of keys and one of values.
    assert f"cache {3 * tokens * 32 * 4:,} bytes" in err
    assert "largest difference between logits with and without cache: " in err


def test_export_of_a_step(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "export", "run", "--out", "exported")
    assert code == 0 and "exported" in out
    assert (inside / "exported" / "config.json").is_file()
    assert "pass --overwrite" in refused(capsys, "export", "run", "--out", "exported")
    assert run(capsys, "export", "run", "--out", "exported", "--overwrite")[0] == 0
    assert "no checkpoint of step 3" in refused(capsys, "export", "run", "--step", "3", "--out", "e3")
    assert run(capsys, "generate", "exported", "--prompt", "a", "--max-new-tokens", "2")[0] == 0


def test_resume_and_refusal_to_start_twice(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = TRAIN.split()
    before = files(inside / "run")
    assert "--resume" in refused(capsys, *line)
    assert files(inside / "run") == before
    assert run(capsys, *line, "--resume")[0] == 0


def test_dry_run_writes_nothing(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "train tiny --data data --out dry --set optim.lr=0.5 --dry-run"
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    assert "lr = 0.5" in out and "parameters" in out and "FLOPs" in out
    assert not (inside / "dry").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train tny --out new --data data", "unknown recipe 'tny'; did you mean 'tiny'?"),
        ("train tiny --out new", "--data"),
        ("train tiny --out new --data nowhere", "nowhere"),
        ("train tiny --out new --data data --variant lernable", "did you mean 'learnable'?"),
        ("train tiny --out new --data data --set model.variant_options.frist=2", "no option 'frist'"),
        ("train tiny --out new --data data --set optim.learning_rate=1", "did you mean optim.lr?"),
        ("train tiny --out new --data data --set optim.lr=fast", "expected a number"),
        ("train tiny --out new --data data --set model.num_attention_heads=5", "num_attention_heads 5"),
        ("train tiny --out new --data data --set model.max_position_embeddings=16", "sequence_length 32 is over"),
        ("train tiny --out new --data data --set train.batch_size=4096", "batch"),
        ("train tiny --out new --data data --config no.toml", "no.toml"),
        ("train tiny --out new --data data --resume", "--resume"),
        ("eval new --data data", "no model at new"),
        ("eval data --data data", "holds no model"),
        ("eval run --data nowhere --json new.json", "nowhere"),
        ("eval run --data data --json new.json --max-tokens 0", "max"),
        ("generate new --prompt x", "no model at new"),
        ("generate run --prompt x --max-new-tokens 99 --strict", "built for 32 positions"),
        ("generate run --prompt x --temperature -1", "temperature is -1"),
        ("generate run --prompt x --device cuda:77", "not available"),
        ("export new", "no run in new"),
        ("plan quikc", "did you mean 'quick'?"),
        ("plan 83m", "unknown recipe '83m'"),
        ("data inspect texts", "texts"),
        ("data prepare --input nothing --out new", "nothing"),
        ("data prepare --input texts --out new --weights rivers=much", "expected domain=number, got 'rivers=much'"),
        ("data prepare --input texts --out new --weights river=1", "rivers"),
        ("suite run quikc --out new", "unknown suite 'quikc'; did you mean 'quick'?"),
        ("suite status quick --out new", "no suite in new"),
        ("suite report quick --out new", "no suite in new"),
        ("suite run quick --out new --set optim.warmup=1", "did you mean optim.warmup_steps?"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    inside: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    before = files(inside)
    assert message in refused(capsys, *line.split())
    assert files(inside) == before


def test_a_flipped_byte_is_found(inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "data"
    shutil.copytree(inside / "data", copy)
    shard = next(copy.rglob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert shard.name in refused(capsys, "data", "inspect", str(copy))
    assert shard.name in refused(
        capsys, "train", "tiny", "--data", str(copy), "--out", str(tmp_path / "new"), "--set", "data.verify=full"
    )
    assert not (tmp_path / "new").exists()


def test_eval_refuses_a_corpus_of_another_tokenizer(
    inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other")
    prepared = run(capsys, *f"data prepare --input texts/rivers.jsonl --out {other} --vocab-size 290".split())
    assert prepared[0] == 0, prepared[2]
    assert "is not the one" in refused(capsys, "eval", "run", "--data", other, "--json", str(tmp_path / "e.json"))


def test_plan_counts_the_papers_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    for name, variant, parameters in (
        ("82m", "transformer", 81_901_056),
        ("180m", "transformer", 179_874_048),
        ("468m", "transformer", 467_921_920),
        ("82m", "svformer", 80_066_048),
    ):
        code, out, _ = run(capsys, "plan", name, "--variant", variant, "--json")
        assert code == 0
        assert json.loads(out)["parameters"] == parameters
    code, out, _ = run(capsys, "plan", "quick", "--variant", "svformer", "--set", "model.num_hidden_layers=4")
    assert code == 0
    assert "0.6250 of the Transformer's" in out and "stored value of layer 1" in out


def test_suite_list_names_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "suite", "list")
    assert code == 0
    assert all(name in out for name in ("quick", "variants", "logit_init", "mini, small, paper"))
