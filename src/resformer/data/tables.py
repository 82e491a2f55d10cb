"""Tables as sources: parquet files, and what the datasets package reads (hub, local directories, `save_to_disk`)."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from resformer.data.archives import opened
from resformer.data.columns import Columns, cut
from resformer.data.documents import domain_name
from resformer.data.readers import file_identity
from resformer.data.reading import BLOCK_BYTES, BadBlock, Block, Reading
from resformer.errors import RunError, UserError, did_you_mean

DATASET = "dataset:"
_MAX_BATCH_ROWS = 2048  # a text that every row repeats is small on the disk and large in memory
_DATASET_ROWS = 128
_READ_BUFFER_BYTES = 1 << 20
_CONNECT_S = 5.0
_TRUE = ("1", "ON", "YES", "TRUE")


class ParquetSource:
    """A parquet file. `top` is the input it was found under; `domain` that of rows which name none.

    UserError where pyarrow is missing, and in `blocks` where the file lacks a column that `reading` asks for.
    """

    def __init__(self, path: Path, top: Path, domain: str, reading: Reading) -> None:
        _need("pyarrow", str(path))
        self.path, self.top, self.domain, self.reading = path, top, domain, reading
        self.name, self.size = str(path), path.stat().st_size

    def identity(self) -> list[Any]:
        return file_identity(self.path)

    def blocks(self) -> Iterator[Block]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        opened(self.path).close()  # what is no damage: a file that may not be read
        number, opens = 1, True
        try:
            # A buffered stream reads pages as they are needed, where the default reads a whole column of a row group.
            options = {"buffer_size": _READ_BUFFER_BYTES, "pre_buffer": False, "page_checksum_verification": True}
            with pq.ParquetFile(self.path, **options) as file:
                columns = Columns.of(file.schema_arrow, self.reading, self.name)
                rows = file.metadata.num_rows
                for block in cut(_batches(file, columns), self.name, self.domain, self.reading, self.size, rows):
                    yield block
                    number, opens = block.first + sum(len(text) for text, _ in block.pieces), False
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            where = f"cannot be read on after row {number - 1}" if number > 1 else "is no whole parquet file"
            yield BadBlock(
                file=self.path, line=None, reason=f"{where} ({_short(error)})", kind="bad_files", opens=opens
            )
            return
        if opens:
            yield BadBlock(file=self.path, line=None, reason=None, size=self.size, opens=True)


def _batches(file: Any, columns: Columns) -> Iterator[tuple[Columns, Any]]:
    """Record batches of at most about a block of text each."""
    for i in range(file.num_row_groups):
        group = file.metadata.row_group(i)
        # Of all columns: asked for one column of a damaged file, pyarrow ends the process.
        mean = group.total_byte_size // max(1, group.num_rows)
        count = _MAX_BATCH_ROWS if columns.encoded else min(max(BLOCK_BYTES // max(mean, 1), 1), _MAX_BATCH_ROWS)
        for batch in file.iter_batches(count, row_groups=[i], columns=columns.paths(), use_threads=False):
            yield columns, batch


class DatasetSource:
    """`dataset:NAME[:CONFIG][:SPLIT]`: a dataset of the hub, streamed; a directory that the datasets package reads; or
    one that `save_to_disk` wrote. The split is "train" where none is given, and NAME::SPLIT names a split alone; in
    NAME:X, X is a configuration if there is one of that name, else a split.

    Code of a dataset is never run. UserError for a name that cannot be read and for what is missing; RunError where the
    hub fails in the middle.
    """

    def __init__(self, spec: str, reading: Reading) -> None:
        _need("datasets", spec)
        self.name, self.reading = spec, reading
        self.path, self.parts = _split_spec(spec)
        self.local = Path(self.path).is_dir()
        self.domain = domain_name(Path(self.path).resolve().name if self.local else self.path.rpartition("/")[2])
        self.size = sum(size for _, size, _ in self._files())

    def identity(self) -> list[Any]:
        called = Path(self.path).resolve().name if self.local else self.path
        return [DATASET, called, *self.parts, self._files()]

    def _files(self) -> list[list[Any]]:
        """[relative name, bytes, mtime in ns] of what a local directory holds."""
        if not self.local:
            return []
        top = Path(self.path)
        files = sorted(file for file in top.rglob("*") if file.is_file() and not file.name.startswith("."))
        return [[file.relative_to(top).as_posix(), *file_identity(file)[1:]] for file in files]

    def blocks(self) -> Iterator[Block]:
        table, rows = self._load()
        opens = True
        for block in cut(self._tables(table), self.name, self.domain, self.reading, self.size, rows):
            opens = False
            yield block
        if opens:
            yield BadBlock(file=self.name, line=None, reason=None, size=self.size, opens=True)

    def _tables(self, table: Any) -> Iterator[tuple[Columns, Any]]:
        """Record batches of the columns that are needed."""
        schema, columns = None, None
        if table.features is not None:  # then the rest need not be read at all
            columns = Columns.of(table.features.arrow_schema, self.reading, self.name)
            table = table.select_columns(columns.tops())
        found = iter(table.with_format("arrow").iter(_DATASET_ROWS))
        while True:
            try:
                rows = next(found, None)
            except Exception as error:  # whatever a builder or the network raises
                raise self._broken(error) from error
            if rows is None:
                return
            if rows.schema != schema:
                schema, columns = rows.schema, Columns.of(rows.schema, self.reading, self.name)
            assert columns is not None
            for batch in rows.to_batches():
                yield columns, batch

    def _broken(self, error: Exception) -> Exception:
        if self.local:
            return UserError(
                f"{self.name}: cannot be read on ({_short(error)}); mend it, or name its files with --input"
            )
        return RunError(f"{self.name}: the hub failed ({_short(error)}); type the same command to go on from there")

    def _load(self) -> tuple[Any, int | None]:
        """(the dataset, its rows if they are known)."""
        import datasets

        top = Path(self.path)
        saved = (top / "state.json").is_file() and (top / "dataset_info.json").is_file()
        if self.local and (saved or (top / "dataset_dict.json").is_file()):
            return self._from_disk(datasets)
        if not self.local:
            _check_hub(self.name)
        try:
            config, split = self._choice(datasets)
            splits = datasets.load_dataset(str(top.resolve()) if self.local else self.path, config, streaming=True)
        except Exception as error:
            # The package and the hub's client raise whatever they like; what they say is the most that is known.
            way = "see what the directory holds" if self.local else "look up the name, or log in where it is private"
            raise UserError(f"{self.name}: cannot be loaded ({_short(error)}); {way}") from error
        if split not in splits:
            raise self._no_split(split, list(splits), "" if len(self.parts) != 1 else "configuration or ")
        return splits[split], None

    def _choice(self, datasets: Any) -> tuple[str | None, str]:
        """(configuration, split)."""
        if len(self.parts) == 2:
            return self.parts[0] or None, self.parts[1] or "train"
        if not self.parts:
            return None, "train"
        known = datasets.get_dataset_config_names(str(Path(self.path).resolve()) if self.local else self.path)
        return (self.parts[0], "train") if self.parts[0] in known else (None, self.parts[0])

    def _from_disk(self, datasets: Any) -> tuple[Any, int]:
        wanted = [part for part in self.parts if part]
        if len(wanted) > 1:
            raise UserError(f"{self.name}: a saved dataset has no configuration; expected {DATASET}{self.path}[:SPLIT]")
        try:
            found = datasets.load_from_disk(self.path)
        except Exception as error:
            raise UserError(f"{self.name}: cannot be loaded ({_short(error)}); save it anew") from error
        if isinstance(found, datasets.DatasetDict):
            split = wanted[0] if wanted else "train"
            if split not in found:
                raise self._no_split(split, list(found), "")
            found = found[split]
        elif wanted and str(found.split) != wanted[0]:
            raise self._no_split(wanted[0], [str(found.split)] if found.split else [], "")
        return found, len(found)

    def _no_split(self, split: str, known: list[str], kind: str) -> UserError:
        has = f"the splits {', '.join(known)}" if known else "no named splits"
        return UserError(
            f"{self.name}: no {kind}split '{split}'{did_you_mean(split, known)}; it has {has}; name one at the end, as "
            f"in {DATASET}{self.path}{':' + self.parts[0] if len(self.parts) > 1 else ''}:SPLIT"
        )


def _split_spec(spec: str) -> tuple[str, tuple[str, ...]]:
    """`dataset:NAME[:CONFIG][:SPLIT]` -> (hub name or directory, the parts after it)."""
    fields = spec.removeprefix(DATASET).split(":")
    expected = f"expected {DATASET}NAME[:CONFIG][:SPLIT] with a name of the hub or a directory"
    if not fields[0]:
        raise UserError(f"--input: got '{spec}', {expected}")
    name, parts = fields[0], fields[1:]
    for n in range(len(fields), 0, -1):  # a directory may have colons in its name
        place = os.path.expanduser(":".join(fields[:n]))
        if os.path.isdir(place):
            name, parts = place, fields[n:]
            break
    else:
        if name[0] in "/.~":
            raise UserError(f"--input: no directory '{name}'; {expected} (files are named without '{DATASET}')")
    while parts and not parts[-1]:
        parts = parts[:-1]
    if len(parts) > 2:
        raise UserError(f"--input: got '{spec}', {expected}")
    return name, tuple(parts)


def _need(package: str, called: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{called}: needs the package {package}; type: pip install 'resformer[data]'")


def _check_hub(called: str) -> None:
    """UserError at once where the hub cannot be reached; its client would try for half a minute, and say so at length.

    Behind a proxy, or told to be offline (a cached dataset is used then), it is left to the client.
    """
    if any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")):
        return
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = url.hostname or ""
    proxies = getproxies()
    if (url.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return
    try:
        socket.create_connection((host, url.port or (80 if url.scheme == "http" else 443)), _CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"{called}: {host} cannot be reached ({error.strerror or error}); where it can, save the dataset with "
            f"save_to_disk('DIR') and pass {DATASET}DIR; HF_HUB_OFFLINE=1 uses a copy in the cache"
        ) from error


def _short(error: BaseException) -> str:
    """What an exception says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
