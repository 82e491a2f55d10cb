"""Reads a page back: elements, attributes and words, after checking that it is well formed."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from resformer.experiments.report import write_report

VOID = {"meta", "br", "col", "link", "img", "input", "hr", "wbr"}


class Page(HTMLParser):
    """Checks nesting, and collects elements, attributes and text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(out: Path) -> tuple[Page, dict]:
    path = write_report(out)
    assert path == out / "report.html"
    return Page(path.read_text(encoding="utf-8")), json.loads((out / "results.json").read_text())
