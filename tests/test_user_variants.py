"""Variants of users' own: `--import FILE.py`, what a run remembers of it, entry points, and `check-variant`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resformer import cli
from resformer.core import registry
from resformer.errors import UserError
from resformer.experiments import finish
from resformer.experiments import suite as experiments_suite
from resformer.experiments.jobs import Job
from resformer.experiments.launch import Launch
from resformer.experiments.places import Places
from resformer.experiments.spec import RunSpec, Scale, Suite
from resformer.train import imports

MINE = """
from __future__ import annotations

from dataclasses import dataclass

from resformer.core.registry import register_variant
from resformer.core.residual import FixedForm


@register_variant("mine")
@dataclass(frozen=True, kw_only=True)
class Mine(FixedForm):
    equation = "V_n <- 0.3 V_1 + 0.7 V_n"

    first: float = 0.3
    own: float = 0.7
"""


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it, and its files count as not run."""
    registry.names()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(imports, "_imported", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield


def run(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    try:
        code = cli.main(line.split())
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    code, _, err = run(capsys, line)
    assert code == 2, err
    assert err.startswith("resformer: error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    return tmp_path


# ------------------------------------------------------------------------------------------------------- --import


def test_a_file_is_run_before_anything_is_built(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan --import mine.py tiny --variant mine --set model.variant_options.first=0.25")
    assert (code, err) == (0, "")
    assert "variant mine: V_n <- 0.25 V_1 + 0.7 V_n" in out
    assert "mine" in registry.names()


def test_several_files_run_in_order_and_see_modules_beside_them(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("strength_of_mine.py").write_text("FIRST = 0.125\n")
    second = MINE.replace('"mine"', '"second"').replace("first: float = 0.3", "first: float = FIRST")
    Path("second.py").write_text(
        second.replace("\nfrom dataclasses", "\nfrom strength_of_mine import FIRST\nfrom dataclasses")
    )
    code, out, _ = run(capsys, "plan tiny --import mine.py --import=second.py --variant second --json")
    assert code == 0
    assert json.loads(out)["formula"].startswith("V_n <- 0.125 V_1")
    assert {"mine", "second"} <= set(registry.names())


def test_a_file_that_registers_nothing_is_said(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.py").write_text("x = 1\n")
    code, _, err = run(capsys, "plan tiny --import empty.py")
    assert (code, err) == (0, "note: empty.py registers no variant\n")


def test_a_file_runs_once_and_again_when_it_changed(inside: Path) -> None:
    Path("mine.py").write_text(MINE + "\nwith open('ran', 'a') as log:\n    log.write('x')\n")
    first, again = imports.import_files(["mine.py"]), imports.import_files([inside / "mine.py"])
    assert first == again and first[0].variants == ("mine",)
    assert Path("ran").read_text() == "x"
    Path("mine.py").write_text(MINE.replace("0.3", "0.4"))
    (changed,) = imports.import_files(["mine.py"])
    assert changed.sha256 != first[0].sha256
    assert registry.get("mine").options()["first"] == 0.4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\nx = (\n", "bad.py:2: SyntaxError: '(' was never closed"),
        ("x = 1\n\nraise KeyError('a\\nb')\n", "bad.py:3: KeyError: 'a\\nb'"),
        ("import math\n\n\ndef f():\n    return math.sqrt(-1)\n\n\nf()\n", "bad.py:5: ValueError: "),
        ("import not_installed_anywhere\n", "bad.py:1: ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("import sys\nsys.exit(3)\n", "bad.py:2: SystemExit: 3"),
        (MINE.replace('"mine"', '"gated"'), "variant name 'gated' is taken by resformer.core.variants.gated.Gated"),
        (MINE.replace("@dataclass(frozen=True, kw_only=True)\n", ""), "is no dataclass"),
        (
            "from resformer import register_variant\n\n\n@register_variant('odd')\nclass Odd:\n    pass\n",
            "expected a class derived from resformer.core.registry.Variant",
        ),
    ],
    ids=["syntax", "exception", "inside a function", "missing module", "exit", "taken", "no dataclass", "no variant"],
)
def test_mistakes_in_a_file_are_one_line_with_its_place(
    inside: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    Path("bad.py").write_text(text)
    line = refused(capsys, "plan tiny --import bad.py")
    assert "--import bad.py" in line and says in line


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan tiny --import nowhere.py", "--import nowhere.py does not exist; expected a Python file"),
        ("plan tiny --import .", "--import . is a directory"),
        ("plan tiny --import text.txt", "--import text.txt is no .py file"),
        ("plan tiny --import", "--import of `resformer plan` needs at least one value"),
        ("plan tiny --imprt mine.py", "unknown option --imprt of `resformer plan`; did you mean '--import'?"),
        ("plan tiny --import mine.py --variant mien", "unknown variant 'mien'; did you mean 'mine'?"),
    ],
)
def test_wrong_files_are_refused(inside: Path, capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    Path("text.txt").write_text("x")
    assert says in refused(capsys, line)


@pytest.mark.parametrize("name", ["plan", "train", "eval", "generate", "export", "suite run", "check-variant"])
def test_every_command_that_builds_takes_it(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, f"{name} --help")
    assert code == 0 and "--import" in out and "--import-" not in out


# --------------------------------------------------------------------------------------------- what a run remembers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data/, mine.py and a run of it in run/."""
    place = tmp_path_factory.mktemp("own")
    (place / "mine.py").write_text(MINE)
    lines = [json.dumps({"text": f"{'the water flows down to the sea and ' * 12}{n}"}) for n in range(40)]
    (place / "rivers.jsonl").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for line in (
        "data prepare --input rivers.jsonl --out data --vocab-size 300 --validation-share 0.1",
        "train tiny --data data --out run --variant mine --steps 2 --import mine.py",
    ):
        command = [sys.executable, "-m", "resformer", *line.split()]
        subprocess.run(command, check=True, cwd=place, env=environment, capture_output=True)
    return place


@pytest.fixture
def used(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = [
    "train tiny --data data --out run --variant mine --steps 2 --resume",
    "train tiny --data data --out other --config run/config.toml",
    "eval run --data data --json eval.json",
    "generate run --prompt a --max-new-tokens 2",
    "export run --out exported",
    "plan tiny --config run/config.toml",
]


def test_the_run_remembers_file_hash_and_names(trained: Path) -> None:
    (entry,) = json.loads((trained / "run" / "environment.json").read_text())["imports"]
    assert entry["file"] == str((trained / "mine.py").resolve())
    assert len(entry["sha256"]) == 64 and entry["variants"] == ["mine"]
    assert not list((trained / "run").rglob("mine.py")), "a run holds no code"


@pytest.mark.parametrize("line", COMMANDS)
def test_a_run_says_which_import_is_missing(
    used: Path, trained: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    says = refused(capsys, line)
    assert "run uses the variant 'mine', which is not registered here" in says
    assert f"pass --import {(trained / 'mine.py').resolve()}" in says
    assert "mine" not in registry.names(), "no code is run unasked"


@pytest.mark.parametrize("line", COMMANDS)
def test_with_the_import_it_works(used: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    code, _, err = run(capsys, f"{line} --import mine.py")
    assert code == 0, err
    assert "is not the file" not in err


def test_an_export_without_its_run_asks_for_a_file(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (used / "elsewhere").mkdir()
    shutil.move(used / "run" / "model", used / "elsewhere" / "model")
    says = refused(capsys, "generate elsewhere/model --prompt a --max-new-tokens 2")
    assert "elsewhere/model uses the variant 'mine'" in says and "pass --import FILE.py" in says
    assert run(capsys, "generate elsewhere/model --prompt a --max-new-tokens 2 --import mine.py")[0] == 0


def test_a_changed_file_is_noticed(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(MINE + "# changed\n")
    code, _, err = run(capsys, "generate run --prompt a --max-new-tokens 2 --import mine.py")
    assert code == 0
    assert err.startswith("note: ") and "is not the file that run was made with: its text has changed" in err


def test_a_config_with_another_variant_needs_no_import(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "plan tiny --config run/config.toml --variant transformer")[0] == 0


def test_suites_hand_the_files_to_their_processes(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites name built-in variants; one with a user's shows that both processes of a run get the flag."""
    imports.import_files(["mine.py"])
    jobs: list[Job] = []
    monkeypatch.setattr(experiments_suite, "_run", lambda request, todo, *rest: jobs.extend(todo) or 0)
    monkeypatch.setattr(experiments_suite, "show_report", lambda out, console: None)
    texts = [json.dumps({"text": f"{'the water flows down to the sea and ' * 12}{n}"}) for n in range(80)]
    Path("rivers.jsonl").write_text("\n".join(texts) + "\n")
    own = Suite(
        name="own",
        title="",
        scales={"tiny": Scale(recipe="tiny", prepare_options={"vocab_size": 300}, inputs=("rivers.jsonl",))},
        runs=(RunSpec(variant="mine"),),
        baseline="mine",
    )
    launch = Launch(jobs=1, imports=(Path("mine.py"),))
    request = experiments_suite.Request(planned=own.at(), places=Places.of("out"), launch=launch)
    assert experiments_suite.run_suite(request) == 0
    ((training, finishing),) = [job.commands for job in jobs]
    assert training[-2:] == finishing[-2:] == ["--import", "mine.py"]
    assert json.loads(Path("out/suite.json").read_text())["command"].endswith(" --import mine.py")


def test_the_second_process_of_a_suites_run_takes_the_files(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("run", "suite/runs/mine")
    line = "finish suite/runs/mine --data data --prompt a --max-new-tokens 2 --import mine.py"
    monkeypatch.setattr(sys, "argv", line.split())
    finish.main()
    assert json.loads(Path("suite/runs/mine/samples.json").read_text())["prompt"] == "a"


# ---------------------------------------------------------------------------------------------------- entry points


def test_an_installed_package_announces_its_variants(tmp_path: Path) -> None:
    """A package in a directory on the path, with the metadata that an installation leaves: no pip needed."""
    package, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(MINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[resformer.variants]\nmine = my_package.mine\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "resformer", "plan", "tiny", "--variant", "mine", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["formula"].startswith("V_n <- 0.3 V_1 + 0.7 V_n")


# --------------------------------------------------------------------------------------------------- check-variant


def test_check_variant_passes_and_writes_what_it_saw(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "check-variant mine --import mine.py --set first=0.1 layers=last:2 --json checks.json"
    code, out, err = run(capsys, line)
    assert (code, err) == (0, ""), out
    found = json.loads(Path("checks.json").read_text())
    assert found["options"] == {"first": 0.1, "layers": "last:2"}
    assert {one["result"] for one in found["checks"]} <= {"passed", "skipped"} and len(found["checks"]) >= 20
    assert all(one["check"] in out for one in found["checks"])
    assert "checks.json exists; pass --overwrite" in refused(capsys, line)


def test_check_variant_names_what_fails_and_exits_with_1(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = MINE.replace("import FixedForm", "import FixedForm, FixedResidual") + (
        "\n    def policy(self, row, shape):"
        "\n        return Broken(first=self.first, own=self.own) if row.mixes else None"
        "\n\n\nclass Broken(FixedResidual):"
        "\n    def mix(self, own, reads, hidden, coefficients):"
        "\n        return super().mix(own, [reads[0].detach()], hidden, coefficients)\n"
    )
    Path("broken.py").write_text(broken)
    code, out, err = run(capsys, "check-variant mine --import broken.py")
    assert code == 1
    assert err.startswith("check-variant: mine fails ") and "every_read_gets_a_gradient" in err
    assert "every_read_gets_a_gradient: V_1 is not detached" in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("check-variant mien --import mine.py", "unknown variant 'mien'; did you mean 'mine'?"),
        ("check-variant mine --import mine.py --set frist=2", "no option 'frist'; did you mean 'first'?"),
        ("check-variant mine --import mine.py --set first", "--set first: expected option=value"),
        ("check-variant mine --import mine.py --set first=much", "expected a finite number"),
        ("check-variant mine --import mine.py --set layers=9", "layers"),
    ],
)
def test_check_variant_refuses(inside: Path, capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    assert says in refused(capsys, line)


def test_python_callers_get_the_same_errors(inside: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        imports.import_files(["nowhere.py"])
    assert imports.check_available("nowhere") == []
