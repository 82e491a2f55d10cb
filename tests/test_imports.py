"""The layers hold: a module imports only from names to its left; and what must be fast stays fast."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "resformer"
RANKS = [
    {"errors"},
    {"core"},
    {"measures"},
    {"data"},
    {"models"},
    {"parallel"},
    {"convert", "serving"},
    {"evaluate"},
    {"train"},
    {"analyze"},
    {"experiments"},
    {"recipes", "suites"},
    {"cli", "commands", "lookup", "shell", "tables", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
NEVER = {("data", "core"), ("data", "models"), ("analyze", "train"), ("recipes", "suites"), ("suites", "recipes")}
TORCH_ONLY = {"core", "measures"}


def imports(path: Path, root: Path = SOURCE) -> Iterator[str]:
    """Full names of what a file imports, also inside functions; relative ones resolved."""
    package = ("resformer", *path.relative_to(root).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root).with_suffix("").parts[0]
        for name in imports(path, root):
            top, _, rest = name.partition(".")
            there = rest.split(".")[0]
            if top == "resformer" and here != "__init__":
                if there not in RANK and there != "__version__":
                    found.append(f"{here}/{path.name}: imports the package itself ({name}); name the module")
                elif there in RANK and (RANK[there] > RANK[here] or (here, there) in NEVER):
                    found.append(f"{here}/{path.name}: imports {name}, which is to the right of {here}")
            elif here in TORCH_ONLY and top not in {"torch", "resformer", *sys.stdlib_module_names}:
                found.append(f"{here}/{path.name}: imports {name}; {here} sees torch and the standard library only")
    return found


def test_every_module_has_a_rank() -> None:
    tops = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in SOURCE.rglob("*.py")}
    assert tops - {"__init__"} <= set(RANK), "give the new module its place in RANKS"


def test_imports_go_left_only() -> None:
    assert breaches(SOURCE) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("core/a.py", "from resformer.models import cache"),
        ("core/variants/a.py", "from ...models.cache import build_cache"),
        ("core/a.py", "import numpy"),
        ("data/a.py", "def f():\n    from resformer.core.plan import Row"),
        ("models/a.py", "import resformer.train.loop"),
        ("train/a.py", "from .. import ResFormerConfig"),
        ("experiments/a.py", "from resformer.suites import quick"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, place: str, line: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(breaches(tmp_path)) == 1


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("core/variants/a.py", "from ..plan import Row\nfrom ...errors import UserError\nimport torch, math"),
        ("train/a.py", "from resformer.models.groups import optimizer_groups"),
        ("recipes/a.py", "from resformer.train.config import Config"),
    ],
)
def test_imports_to_the_left_are_fine(tmp_path: Path, place: str, line: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert breaches(tmp_path) == []


def test_only_declared_packages_are_imported_at_the_top() -> None:
    """Every module can be imported with the base dependencies: extras are imported inside functions."""
    base = {re.split(r"[^\w-]", line)[0] for line in requires("resformer") or [] if "extra ==" not in line}
    known = {name.replace("-", "_").lower() for name in base} | {"huggingface_hub", "resformer"}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or top in known, f"{path.name} imports {name} at its top"


def best_seconds(*arguments: str) -> float:
    """The best of three runs of the interpreter in CPU seconds, since tests share the machine with each other."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split("MODULES")[-1].split())


def test_import_is_fast() -> None:
    assert best_seconds("-c", "import resformer") < 0.3


def test_help_is_fast() -> None:
    assert best_seconds("-m", "resformer", "--help") < 1.0
    assert best_seconds("-m", "resformer", "train", "--help") < 1.0


@pytest.mark.parametrize(
    "statement",
    [
        "import resformer",
        "from resformer.cli import main; assert main(['--help']) == 0",
        "from resformer.cli import main; assert main(['suite', '--help']) == 0",
        "import resformer.data",
        "import resformer.core.plan",
        "import resformer, resformer.errors; assert 'ResFormerConfig' in dir(resformer)",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    assert not loaded_after(statement) & {"torch", "transformers", "scipy", "matplotlib"}
