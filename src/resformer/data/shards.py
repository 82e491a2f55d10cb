"""The prepared corpus on disk, and its checks.

    index.json                  what is here: dtype, vocabulary, tokenizer, special-token policy, counts, checksums
    tokenizer.json, tokenizer_config.json
    manifest.json               where the text comes from
    shards/D.S.00000.bin ...    token ids of domain D, split S ("train", "validation"), little-endian uint16 or uint32,
                                no header; documents in the order of the input, each ended by the end-of-text id
    shards/D.S.docs.npy         uint64 [documents, 3]: token end, byte end (both cumulative), identity of the text

Nothing is pickled. Every file's size and sha256 is in the index, and the index carries a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data.files import Files
from resformer.data.tokenizer import fingerprint
from resformer.errors import UserError, did_you_mean

INDEX = "index.json"
FORMAT = "resformer-shards"
VERSION = 2
SHARD_BYTES = 1 << 29
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
    """Writes one split of a domain, in files of at most `SHARD_BYTES` (a document is never cut), and its document
    table, whose length is known before.
    """

    def __init__(
        self, root: Path, domain: str, split: str, *, documents: int, dtype: np.dtype, files: Files | None = None
    ) -> None:
        self._root, self._name, self._dtype = root, f"shards/{domain}.{split}", dtype
        self._files: list[dict[str, Any]] = []
        self._open_files = Files() if files is None else files
        self._documents = self._tokens = self._bytes = 0
        self._lengths = np.zeros(64, np.int64)
        (root / "shards").mkdir(exist_ok=True)
        self._table = root / f"{self._name}.docs.npy"
        header = {"descr": "<u8", "fortran_order": False, "shape": (documents, 3)}
        with open(self._table, "wb") as handle:
            np.lib.format.write_array_header_1_0(handle, header)
        self._expected = documents

    def add(self, ids: np.ndarray, tokens: np.ndarray, sizes: np.ndarray, identities: np.ndarray) -> None:
        """Append consecutive documents: their ids `[sum of tokens]`, end-of-text included, and per document `[n]` its
        tokens, its raw UTF-8 bytes and the first 64 bits of its text's hash.
        """
        ends = np.cumsum(tokens.astype(np.uint64))
        rows = np.empty((len(tokens), 3), dtype="<u8")
        rows[:, 0], rows[:, 1], rows[:, 2] = ends + self._tokens, np.cumsum(sizes) + self._bytes, identities
        self._open_files.write(self._table, rows.tobytes())
        start = 0
        for stop in self._cuts(ends):
            data = np.ascontiguousarray(ids[start:stop], dtype=self._dtype).data
            self._open_files.write(self._root / self._files[-1]["file"], data)
            self._files[-1]["tokens"] += stop - start
            start = stop
        self._documents += len(tokens)
        self._tokens += int(ends[-1]) if len(ends) else 0
        self._bytes += int(sizes.sum())
        self._lengths += np.bincount(np.log2(np.maximum(tokens, 1)).astype(np.int64), minlength=64)

    def _cuts(self, ends: np.ndarray) -> Iterator[int]:
        """Ends of what goes into one file each, which is open then."""
        most, done = SHARD_BYTES // self._dtype.itemsize, 0
        while done < (int(ends[-1]) if len(ends) else 0):
            room = most - self._files[-1]["tokens"] if self._files else 0
            fits = int(np.searchsorted(ends, done + room, side="right"))
            stop = int(ends[fits - 1]) if fits else 0
            if stop <= done:  # not even one: a new file, which takes one document of any length
                self._open()
                fits = int(np.searchsorted(ends, done + most, side="right"))
                stop = int(ends[fits - 1]) if fits else 0
                if stop <= done:
                    stop = int(ends[np.searchsorted(ends, done, side="right")])
            yield stop
            done = stop

    def _open(self) -> None:
        if self._files:
            self._open_files.finish(self._root / self._files[-1]["file"])
        self._files.append({"file": f"{self._name}.{len(self._files):05d}.bin", "tokens": 0})

    def close(self) -> dict[str, Any]:
        """Flush to the disk; the entry for index.json."""
        assert self._documents == self._expected, f"{self._name}: {self._documents} documents, not {self._expected}"
        for file in (self._table, *(self._root / one["file"] for one in self._files[-1:])):
            self._open_files.finish(file)
        last = int(np.flatnonzero(self._lengths)[-1]) + 1 if self._lengths.any() else 0
        return {
            "documents": self._documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "length_histogram": self._lengths[:last].tolist(),
            "shards": self._files,
            "document_table": f"{self._name}.docs.npy",
        }


class Stream:
    """The token ids of a split, files after one another: `len()`, and slices that are arrays of the shards' dtype.

    Files are memory-mapped when they are first touched, so that opening a large corpus, or one that lies elsewhere,
    costs nothing.
    """

    def __init__(self, entry: dict[str, Any], dtype: np.dtype, place: Callable[[str], Path]) -> None:
        self.dtype, self._place = dtype, place
        self._names = [shard["file"] for shard in entry["shards"]]
        self._sizes = [int(shard["tokens"]) for shard in entry["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)
        self._maps: list[np.ndarray | None] = [None] * len(self._names)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, which: slice) -> np.ndarray:
        start, stop, step = which.indices(len(self))
        assert step == 1, "a stream has slices without steps"
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self._starts[first + 1]))
            parts.append(self._map(first)[start - self._starts[first] : end - self._starts[first]])
            start, first = end, first + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def _map(self, number: int) -> np.ndarray:
        found = self._maps[number]
        if found is None:
            file = self._place(self._names[number])
            found = np.memmap(file, dtype=self.dtype, mode="r", shape=(self._sizes[number],))
            self._maps[number] = found
        return found


def read_table(file: Path, entry: dict[str, Any]) -> np.ndarray:
    """The document table of a split, uint64 `[documents, 3]`."""
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
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise UserError(f"{root / INDEX}: names the file {name!r}, which lies outside of the corpus")
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
            if how != "none":
                check_ids(root, index, entry, whole=how == "full")
            if how == "full":
                table = read_table(root / entry["document_table"], entry)
                seen[split] = np.concatenate([seen.get(split, np.zeros(0, "<u8")), table[:, 2]])
    if how == "full" and all(split in seen for split in SPLITS):
        check_overlap(root, seen["train"], seen["validation"])


def fits(file: Path, entry: dict[str, Any], how: str) -> bool:
    """Whether a file is what the index says, as closely as `verify` looks."""
    if file.stat().st_size != entry["bytes"]:
        return False
    if how == "full":
        return _digest(file) == entry["sha256"]
    return how != "sample" or bool(_sample_digest(file) == entry["sample_sha256"])


def check_ids(root: Path, index: dict[str, Any], entry: dict[str, Any], *, whole: bool) -> None:
    """UserError when a shard holds an id that the vocabulary does not."""
    dtype = np.dtype(index["dtype"])
    block = _BLOCK_BYTES // dtype.itemsize
    for shard in entry["shards"]:
        ids = np.memmap(root / shard["file"], dtype=dtype, mode="r", shape=(shard["tokens"],))
        for start in range(0, len(ids), block) if whole else _block_starts(len(ids), block):
            largest = int(ids[start : start + block].max())
            if largest >= index["vocab_size"]:
                raise UserError(
                    f"{root / shard['file']}: holds token id {largest}, the vocabulary has {index['vocab_size']} (ids "
                    f"0 to {index['vocab_size'] - 1}); prepare the corpus again with the tokenizer that is to be used"
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
