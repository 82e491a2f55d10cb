"""What a document is, what is done to its text, and which split it goes to.

The text is kept as it is: CRLF, NUL and U+2028 stay and are only counted. Two things are removed because they are not
text: a byte order mark at the start, and lone surrogates, which UTF-8 cannot hold (each becomes U+FFFD). So `bytes`
everywhere means the UTF-8 bytes of what the author wrote, and bits per byte can be compared between tokenizers.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_MAX_NAME_BYTES = 80
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = chr(0xFEFF)
_LINE_SEPARATOR = chr(0x2028)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: `text`, the `domain` it belongs to, and `name` (file, file:line, title) for messages.

    `ids` (int64 `[n]`, without end-of-text) are given where it comes tokenised; its text is "" then.
    """

    text: str
    domain: str
    name: str
    ids: np.ndarray | None = None


def clean(text: str, counts: Counter[str]) -> str:
    """Return `text` without a byte order mark and lone surrogates; count in `counts` what was met."""
    if text.startswith(_BOM):
        counts["byte_order_mark"] += 1
        text = text[1:]
    if not text.isascii() and _LONE_SURROGATE.search(text):
        counts["lone_surrogate"] += 1
        # A pair that was written as two \u escapes is one character after this round trip; only real loners are
        # replaced.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if "\r\n" in text:
        counts["crlf"] += 1
    if "\0" in text:
        counts["nul"] += 1
    if _LINE_SEPARATOR in text:
        counts["line_separator"] += 1
    return text


def text_hash(data: bytes) -> bytes:
    """The identity of a document: sha256 of its UTF-8 bytes (32 bytes)."""
    return hashlib.sha256(data).digest()


def draw(identity: bytes, split_seed: int) -> int:
    """The rank of a document, uniform in [0, 2^64): a function of its text and the split seed alone.

    A document with `rank < validation_share * 2^64` is a validation document. Equal texts have equal ranks, so exact
    duplicates cannot straddle the split whatever the order of the input.
    """
    return int.from_bytes(hashlib.sha256(b"split %d " % split_seed + identity).digest()[:8], "big")


def domain_name(raw: str) -> str:
    """A domain name that is safe as a file name: lower case, letters (of any script), digits, `_` and `-`, 80 bytes or
    so; RedPajama's prefix taken off. C++ and C# are cpp and csharp.
    """
    name = raw.strip()
    if name.lower().startswith("redpajama") and len(name) > len("redpajama"):
        name = name[len("redpajama") :]
    name = (
        unicodedata.normalize("NFC", name.lower()).replace("c++", "cpp").replace("c#", "csharp").replace("f#", "fsharp")
    )
    name = re.sub(r"[^\w-]+", "_", name).strip("_-") or "text"
    if len(name.encode()) <= _MAX_NAME_BYTES:
        return name
    return f"{name.encode()[:_MAX_NAME_BYTES].decode(errors='ignore')}-{text_hash(name.encode()).hex()[:8]}"
