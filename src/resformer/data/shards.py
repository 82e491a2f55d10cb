"""The prepared corpus on disk, and its checks.

    index.json                  what is here: dtype, vocabulary, tokenizer, special-token policy, counts, checksums
    tokenizer.json, tokenizer_config.json manifest.json               where the text comes from shards/D.S.bin
    token ids of domain D, split S ("train", "validation"), little-endian uint16 or uint32, no header;
                                each document ends with the end-of-text id
    shards/D.S.docs.npy         uint64 [documents, 3]: token end, byte end (both cumulative), identity of the text

Nothing is pickled. Every file's size and sha256 is in the index, and the index carries a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data.tokenizer import fingerprint
from resformer.errors import UserError, did_you_mean

INDEX = "index.json"
FORMAT = "resformer-shards"
VERSION = 1
SPLITS = ("train", "validation")
VERIFY = ("full", "sample", "none")
SPECIAL_TOKENS = (
    "text is encoded with special tokens not parsed; each document ends with the end-of-text id; "
    "no other special id is written"
)
_SAMPLE_BLOCKS, _BLOCK_BYTES = 16, 1 << 16


def dtype_for(vocab_size: int) -> np.dtype:
    """uint16 when every id fits, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one domain's split: `add` documents, then `close` for its index entry."""

    def __init__(self, root: Path, domain: str, split: str, *, vocab_size: int, eos_token_id: int) -> None:
        self.shard, self.documents = f"shards/{domain}.{split}.bin", f"shards/{domain}.{split}.docs.npy"
        self._root, self._vocab_size, self._dtype = root, vocab_size, dtype_for(vocab_size)
        self._end = np.array([eos_token_id], dtype=self._dtype)
        self._rows: list[tuple[int, int, int]] = []
        self._tokens = self._bytes = 0
        (root / "shards").mkdir(exist_ok=True)
        self._handle = open(root / self.shard, "wb")  # noqa: SIM115 - closed by close()

    def add(self, ids: np.ndarray, byte_count: int, identity: int) -> None:
        """Append one document (ids `[n]` int64 without end-of-text, its raw UTF-8 bytes, the first 64 bits of its
        text hash).
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise ValueError(
                f"{self.shard}: token id {int(ids.max())} does not fit the vocabulary of {self._vocab_size}"
            )
        self._handle.write(ids.astype(self._dtype).tobytes())
        self._handle.write(self._end.tobytes())
        self._tokens += len(ids) + 1
        self._bytes += byte_count
        self._rows.append((self._tokens, self._bytes, identity))

    def close(self) -> dict[str, Any]:
        """Flush to the disk; the entry for index.json."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        table = np.array(self._rows, dtype="<u8").reshape(-1, 3)
        with open(self._root / self.documents, "wb") as handle:
            np.lib.format.write_array(handle, table, allow_pickle=False)
            handle.flush()
            os.fsync(handle.fileno())
        return {
            "documents": len(self._rows),
            "tokens": self._tokens,
            "bytes": self._bytes,
            "shard": self.shard,
            "document_table": self.documents,
        }


def read_table(root: Path, entry: dict[str, Any]) -> np.ndarray:
    """The document table of a split, int64-safe uint64 `[documents, 3]`."""
    file = root / entry["document_table"]
    try:
        with open(file, "rb") as handle:
            table = np.lib.format.read_array(handle, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{file}: not a document table ({error}); prepare the corpus again") from error
    if table.shape != (entry["documents"], 3) or table.dtype != np.dtype("<u8"):
        raise UserError(
            f"{file}: holds {table.dtype} {list(table.shape)}, the index says uint64 [{entry['documents']}, 3]; "
            "prepare the corpus again"
        )
    ends = (int(table[-1, 0]), int(table[-1, 1])) if len(table) else (0, 0)
    if ends != (entry["tokens"], entry["bytes"]):
        raise UserError(
            f"{file}: ends at {ends[0]} tokens and {ends[1]} bytes, the index says {entry['tokens']} and "
            f"{entry['bytes']}; prepare the corpus again"
        )
    return table


def read_ids(root: Path, index: dict[str, Any], entry: dict[str, Any]) -> np.ndarray:
    """The token ids of a split, memory-mapped `[tokens]`."""
    dtype = np.dtype(index["dtype"])
    if entry["tokens"] == 0:
        return np.zeros(0, dtype)
    return np.memmap(root / entry["shard"], dtype=dtype, mode="r", shape=(entry["tokens"],))


def file_entry(file: Path) -> dict[str, Any]:
    """Size and checksums of one file, for the index."""
    return {"bytes": file.stat().st_size, "sha256": _digest(file), "sample_sha256": _sample_digest(file)}


def seal(index: dict[str, Any]) -> dict[str, Any]:
    """The index with its own checksum."""
    return {**index, "index_sha256": _own_digest(index)}


def load_index(root: Path) -> dict[str, Any]:
    """Read and check index.json itself; UserError names the file and what is wrong."""
    file = root / INDEX
    if not root.is_dir():
        raise UserError(
            f"{root}: no such directory; expected a prepared corpus (resformer data prepare --input embedded --out "
            f"{root})"
        )
    if not file.is_file():
        raise UserError(
            f"{file}: missing; expected a prepared corpus (resformer data prepare --input embedded --out {root})"
        )
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: not valid JSON ({error}); remove it and prepare the corpus again, or into another directory"
        ) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(
            f'{file}: not an index of prepared shards (no "format": "{FORMAT}"); prepare the corpus into another '
            "directory"
        )
    if index.get("version") != VERSION:
        raise UserError(
            f"{file}: has version {index.get('version')}, this release reads version {VERSION}; prepare the corpus "
            "again"
        )
    if index.get("index_sha256") != _own_digest(index):
        raise UserError(
            f"{file}: was changed after it was written (its checksum does not fit); prepare the corpus again"
        )
    return index


def verify(root: Path, index: dict[str, Any], how: str) -> None:
    """Check the files of a corpus against its index; UserError names the first file that does not fit.

    "none": presence and size of each file, the tokenizer's fingerprint. "sample": also 16 blocks of each file, and
    their ids. "full": also every byte, every id, each document table, and that no text is in both splits.
    """
    if how not in VERIFY:
        raise UserError(f"verify: got '{how}', expected one of {', '.join(VERIFY)}{did_you_mean(how, VERIFY)}")
    # The tokenizer first: it is the file that people exchange, and its message should say so.
    _check_tokenizer(root, index)
    for name, entry in index["files"].items():
        file = root / name
        if not file.is_file():
            raise UserError(f"{file}: missing, the index lists it; restore it or prepare the corpus again")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise UserError(
                f"{file}: has {size} bytes, the index says {entry['bytes']} (cut short or changed); prepare the "
                "corpus again"
            )
        if how == "full" and _digest(file) != entry["sha256"]:
            raise UserError(f"{file}: its sha256 does not fit the index (a byte was changed); prepare the corpus again")
        if how == "sample" and _sample_digest(file) != entry["sample_sha256"]:
            raise UserError(
                f"{file}: sampled blocks do not fit the index (a byte was changed); prepare the corpus again"
            )
    seen: dict[str, np.ndarray] = {}
    for domain in index["domains"].values():
        for split, entry in domain["splits"].items():
            check_ids(root, index, entry, whole=how == "full", skip=how == "none")
            if how == "full":
                seen[split] = np.concatenate([seen.get(split, np.zeros(0, "<u8")), read_table(root, entry)[:, 2]])
    if how == "full" and all(split in seen for split in SPLITS):
        check_overlap(root, seen["train"], seen["validation"])


def check_ids(root: Path, index: dict[str, Any], entry: dict[str, Any], *, whole: bool, skip: bool = False) -> None:
    """UserError when a shard holds an id that the vocabulary does not."""
    if skip or not entry["tokens"]:
        return
    ids = read_ids(root, index, entry)
    block = _BLOCK_BYTES // ids.dtype.itemsize
    starts = range(0, len(ids), block) if whole else _block_starts(len(ids), block)
    for start in starts:
        largest = int(ids[start : start + block].max())
        if largest >= index["vocab_size"]:
            raise UserError(
                f"{root / entry['shard']}: holds token id {largest}, the vocabulary has {index['vocab_size']} (ids 0 "
                f"to {index['vocab_size'] - 1}); "
                "prepare the corpus again with the tokenizer that is to be used"
            )


def check_overlap(root: Path, train: np.ndarray, validation: np.ndarray) -> None:
    """UserError when a text is in both splits."""
    both = np.intersect1d(train, validation)
    if both.size:
        raise UserError(
            f"{root}: {both.size} documents are in both the train and the validation split; prepare the corpus again"
        )


def _check_tokenizer(root: Path, index: dict[str, Any]) -> None:
    file, recorded = root / "tokenizer.json", index["tokenizer"]["sha256"]
    if not file.is_file():
        raise UserError(
            f"{file}: missing; the shards were written with the tokenizer {recorded[:12]}, put it back or prepare again"
        )
    found = fingerprint(file)
    if found != recorded:
        raise UserError(
            f"{file}: does not fit the shards: its sha256 is {found[:12]}, the shards were written with "
            f"{recorded[:12]} "
            f"(vocabulary {index['vocab_size']}); put that tokenizer.json back or prepare the corpus again"
        )


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sample_digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        for start in _block_starts(file.stat().st_size, _BLOCK_BYTES):
            handle.seek(start)
            digest.update(handle.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _block_starts(length: int, block: int) -> list[int]:
    """Starts of the sampled blocks: everything when it is small, else evenly spread, first and last included."""
    if length <= _SAMPLE_BLOCKS * block:
        return list(range(0, length, block))
    return [i * (length - block) // (_SAMPLE_BLOCKS - 1) for i in range(_SAMPLE_BLOCKS)]


def _own_digest(index: dict[str, Any]) -> str:
    rest = {key: value for key, value in index.items() if key != "index_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
