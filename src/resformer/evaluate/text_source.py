"""Raw text to be scored: everything that `resformer data prepare` reads, as documents."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from resformer.data import sources
from resformer.data.documents import Document, clean
from resformer.data.reading import Reading, Report, Source
from resformer.errors import UserError


class TextSource:
    """Documents of the inputs in their order.

    The text is cleaned as it is for training (`data.documents.clean`): a byte order mark at the start is no text, a
    lone surrogate becomes U+FFFD, CRLF and all else stay. Documents of white space alone are passed over.

    Attributes:
        size: bytes on the disk, for progress.
        report: what was met while reading.
    """

    def __init__(self, inputs: Sequence[str | Path], reading: Reading | None = None) -> None:
        """Args: the inputs, and how the user wants them read (None: nobody asked).

        Raises:
            UserError: an input that is not there, or holds token ids.
        """
        self.reading = Reading() if reading is None else reading
        self.report = Report(on_bad_line=self.reading.on_bad_line, can_skip=reading is not None)
        self._names = [str(name) for name in inputs]
        self._temporary: Any = None
        with _named():
            self._sources = self._open()
        self.size = sum(source.size for source in self._sources)

    def _open(self) -> list[Source]:
        sources.check_inputs(self._names)
        for name in self._names:
            if not sources.is_path(name):
                continue
            for file, _ in sources.input_files(name, None):
                if sources.is_token_file(file):
                    raise UserError(
                        f"{file} holds token ids, no text; prepare it with `resformer data prepare` and score it with "
                        "--data"
                    )
        return sources.list_sources(
            self._names,
            self.reading,
            kind=None,
            token_dtype=None,
            max_bytes=None,
            stdin=self._keep_stdin() if sources.STDIN in self._names else None,
            report=self.report,
        )

    def _keep_stdin(self) -> Path:
        if sys.stdin is None:
            raise UserError("--text -: standard input is closed")
        self._temporary = tempfile.TemporaryDirectory(prefix="resformer-")
        file = Path(self._temporary.name) / "stdin"
        with open(file, "wb") as handle:
            shutil.copyfileobj(sys.stdin.buffer, handle)
        return file

    def documents(self) -> Iterator[tuple[Document, float]]:
        """Each document with its share of `size`. UserError names file and line of what cannot be read."""
        for one in self.each():
            yield from one

    def each(self) -> list[Iterator[tuple[Document, float]]]:
        """`documents`, each source by itself."""
        return [self._of(source) for source in self._sources]

    def _of(self, source: Source) -> Iterator[tuple[Document, float]]:
        with _named():
            blocks = iter(source.blocks())
        while True:
            with _named():
                block = next(blocks, None)
                if block is None:
                    break
                found = [self._cleaned(document) for document in block.documents(self.report)]
            kept = [document for document in found if document is not None]
            characters = sum(len(document.text) for document in kept)
            for document in kept:
                yield document, block.size * len(document.text) / characters

    def _cleaned(self, document: Document) -> Document | None:
        counts = self.report.domain(document.domain)
        counts["documents_read"] += 1
        text = clean(document.text, counts)
        if not text or text.isspace():
            counts["empty"] += 1
            return None
        return replace(document, text=text)

    def record(self) -> dict[str, Any]:
        """JSON-able: what was read and what was met."""
        total: Counter[str] = Counter()
        for counts in self.report.by_domain.values():
            total.update(counts)
        return {"inputs": self._names, **dict(sorted((self.report.totals + total).items()))}


@contextmanager
def _named() -> Iterator[None]:
    """Let messages name the flag that was used here."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--input", "--text")) from error
