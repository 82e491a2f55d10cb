"""The text that a tokenizer is trained on: a sample of bounded size of the training documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from resformer.data.archives import COMPRESSED
from resformer.data.documents import clean, draw, text_hash
from resformer.data.reading import Reading, Report, Source

# More text than this for each entry of the vocabulary hardly changes it, and costs time.
_BYTES_PER_ENTRY = 2_000
_LEAST_BYTES = 1 << 16
_SPREAD = 8
_COMPRESSION = 4
_SPAN = 1 << 64


def training_texts(
    sources: Sequence[Source],
    reading: Reading,
    *,
    vocab_size: int,
    most_bytes: int,
    validation_share: float,
    split_seed: int,
) -> list[str]:
    """A sample of the training documents, the same one in every process.

    Each source gives its share by size, drawn by the hash of the texts from its first documents (eight times as many
    bytes as are taken). Documents of the validation split are left out: a vocabulary fitted to them would make their
    loss look better than it is.
    """
    enough = min(vocab_size * _BYTES_PER_ENTRY, most_bytes)
    quotas = [max(enough * share, min(_LEAST_BYTES, enough / len(sources))) for share in shares(sources)]
    scale = enough / (sum(quotas) or 1)
    taken: list[tuple[str, str, int]] = []
    seen: set[bytes] = set()
    for source, quota in zip(sources, quotas, strict=True):
        bound = max(1, int(quota * scale))
        _take(source, reading, quota=bound, seed=split_seed, seen=seen, taken=taken)
    held_out = _held_out(taken, int(validation_share * _SPAN)) if validation_share > 0 else set()
    return [text for text, domain, rank in taken if (domain, rank) not in held_out]


def _held_out(taken: Sequence[tuple[str, str, int]], threshold: int) -> set[tuple[str, int]]:
    """(domain, rank) of the validation documents; where chance gives a domain none, or nothing else, as `merge.Split`
    decides.
    """
    ranks: dict[str, list[int]] = {}
    for _, domain, rank in taken:
        ranks.setdefault(domain, []).append(rank)
    found = set()
    for domain, some in ranks.items():
        below = {rank for rank in some if rank < threshold}
        if len(some) > 1:
            below = (below or {min(some)}) - ({max(some)} if len(below) == len(some) else set())
        found |= {(domain, rank) for rank in below}
    return found


def _take(
    source: Source, reading: Reading, *, quota: int, seed: int, seen: set[bytes], taken: list[tuple[str, str, int]]
) -> None:
    """Add documents of a source to `taken` (text, domain, rank), `quota` bytes at most: the last one is cut. They are
    drawn by their hash from the first ones; where none is drawn, the first one is taken.
    """
    span = min(estimated_bytes(source) or _SPREAD * quota, _SPREAD * quota)
    chance = int(min(1.0, quota / max(span, 1)) * _SPAN)
    read = used = 0
    report = Report(on_bad_line=reading.on_bad_line)
    first: tuple[str, str, int] | None = None
    for document in (d for block in source.blocks() for d in block.documents(report)):
        text = clean(document.text, Counter())
        if document.ids is not None or not text or text.isspace():
            continue
        data = text.encode("utf-8")
        read += len(data)
        identity = text_hash(data)
        room = quota - used
        entry = (text if len(data) <= room else data[:room].decode("utf-8", "ignore"), document.domain)
        if identity not in seen and first is None:
            first = (*entry, draw(identity, seed))
        if identity not in seen and int.from_bytes(identity[16:24], "big") < chance:
            seen.add(identity)
            used += len(data)
            taken.append((*entry, draw(identity, seed)))
        if read >= span or used >= quota:
            break
    if not used and first is not None:
        taken.append(first)


def shares(sources: Sequence[Source]) -> list[float]:
    """The share of each source in the bytes of all; those of unknown size count as the mean of the others."""
    known = [estimated_bytes(source) for source in sources]
    mean = sum(known) / max(1, sum(size > 0 for size in known)) or 1.0
    sizes = [size or mean for size in known]
    total = sum(sizes)
    return [size / total for size in sizes]


def estimated_bytes(source: Source) -> int:
    """Bytes of text that a source may hold, 0 where that is not known."""
    packed = any(source.name.lower().endswith(suffix) for suffix in (*COMPRESSED, ".parquet"))
    return source.size * (_COMPRESSION if packed else 1)
