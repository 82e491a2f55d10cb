"""Where the files of suites lie, who works on them, and the records that stay when models are gone.

A *pool* holds one corpus and the runs of one or more suites: `data/`, `runs/<id>/`, `locks/<id>`. A run is found by its
id, so that suites which share a run train it once. A suite's own directory holds what it says (`suite.json`,
`configs/`) and its report; it may be the pool itself.

A *record* of a run is what its numbers can be read from, without weights: small files, under `runs/<id>/` of a
directory of records, which is laid out as a pool. Kept in a repository, they let a later day go on where this one
stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.experiments.runs import (
    DOCUMENTS_FILE,
    EVAL_FILE,
    MEASURES_FILE,
    RECORD_FILE,
    SAMPLES_FILE,
    SUITE_FILE,
    Run,
    read_json,
    read_record,
)
from resformer.train.files import write_json

LOCK_FILE, LOCKS = ".lock", "locks"
RECORDED = (
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    EVAL_FILE,
    DOCUMENTS_FILE,
    MEASURES_FILE,
    SAMPLES_FILE,
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """The directories of one suite. `data` is the corpus, `records` None where none are kept."""

    out: Path
    pool: Path
    data: Path
    records: Path | None = None

    @classmethod
    def of(
        cls, out: Path | str, pool: Path | str | None = None, data: Path | None = None, records: Path | None = None
    ) -> Places:
        """The places of a suite in `out`; the pool is `out` itself and the corpus the pool's when not given."""
        out, pool = Path(out), Path(out if pool is None else pool)
        return cls(out=out, pool=pool, data=pool / "data" if data is None else data, records=records)

    def run(self, run_id: str) -> Path:
        return self.pool / "runs" / run_id

    def relative(self, path: Path) -> str:
        """`path` as suite.json says it: from `out`, so that the whole can be moved."""
        return os.path.relpath(path, self.out)

    def check(self) -> None:
        """UserError where something else is than a suite."""
        for flag, path in (("--out", self.out), ("--pool", self.pool), ("--records", self.records)):
            if path is not None and path.exists() and not path.is_dir():
                raise UserError(f"{flag} {path}: is a file, expected a directory to write into; choose another")
        file = self.out / SUITE_FILE
        if file.exists() and not isinstance(read_json(file).get("runs"), list):
            raise UserError(
                f"{file}: not written by `resformer suite run`, so it is not replaced; choose another --out or "
                "remove the file"
            )


@contextlib.contextmanager
def locked(out: Path, *, shared: bool = False) -> Iterator[int]:
    """Hold a suite's directory; yields the descriptor, which children inherit.

    So the lock lives as long as any of them does, and a suite whose parent was killed cannot be started a second time
    beside its own children. `shared`: beside others who share it, as the jobs of an array do.
    """
    with (out / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process is training in {out}; wait for it (`resformer suite status`) or take another --out"
            ) from None
        yield file.fileno()


def is_locked(file: Path) -> bool:
    """Whether some process holds a lock file right now, or that of a directory."""
    try:
        with (file / LOCK_FILE if file.is_dir() else file).open("r") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def lock_of(pool: Path, run_id: str) -> Path:
    return pool / LOCKS / run_id


def lock_run(pool: Path, run_id: str) -> int | None:
    """A descriptor that holds a run, to be closed by the caller and its children; None while somebody else does."""
    file = lock_of(pool, run_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def waiting_for(file: Path) -> Iterator[None]:
    """Hold a lock file, waiting for it if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def deposit(run: Run, records: Path) -> bool:
    """Keep the record of a run that is complete; False if a whole one was there already. It appears as a whole."""
    target = records / "runs" / run.id
    if (found := read_record(records, run.id, {})) is not None and found.complete and found.step == run.step:
        return False
    waiting = target.with_name(f".{run.id}.{os.getpid()}")
    shutil.rmtree(waiting, ignore_errors=True)
    waiting.mkdir(parents=True)
    try:
        for name in RECORDED:
            if (run.path / name).is_file():
                shutil.copyfile(run.path / name, waiting / name)
        sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(waiting.iterdir())}
        write_json(waiting / RECORD_FILE, {"schema": 1, "id": run.id, "step": run.step, "sha256": sums})
        if target.exists():  # a record that was not whole
            shutil.rmtree(target)
        waiting.replace(target)
    finally:
        shutil.rmtree(waiting, ignore_errors=True)
    return True


def record_fault(run: Run) -> str:
    """Why a record cannot stand for its run, or "": a file is not as it was, or the configuration is another run's."""
    from resformer.experiments.settings import digest
    from resformer.train.configure import from_toml

    said = read_json(run.path / RECORD_FILE)
    sums = said.get("sha256")
    for name in RECORDED:
        data = (run.path / name).read_bytes() if (run.path / name).is_file() else b""
        if not isinstance(sums, dict) or sums.get(name) != hashlib.sha256(data).hexdigest():
            return f"{run.path / name} is missing or not as it was recorded"
    try:
        config = from_toml(run.path / "config.toml")
    except UserError as error:
        return str(error)
    found = run.environment.get("data")
    fingerprint = str(found.get("fingerprint")) if isinstance(found, dict) else ""
    wanted = f"{config.model.variant}-{digest(config, fingerprint)}"
    return "" if wanted == run.id else f"{run.path}: its configuration is that of {wanted}"


def deposit_suite(data: Path, records: Path, described: dict[str, Any]) -> Path | None:
    """Keep what a suite says beside its records, so that its report can be written from them alone; returns its
    directory there. None, and nothing is written, where the same suite stands there with another scale or settings, or
    with seeds that this one lacks.
    """
    target = records / str(described["name"])
    there = read_json(target / SUITE_FILE)
    if there:
        alike = all(there.get(key) == described[key] for key in ("scale", "config_overrides", "data_fingerprint"))
        if not alike or not set(there.get("seeds") or ()) <= set(described["seeds"]):
            return None
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / SUITE_FILE, described | {"pool": "..", "records": ".."})
    manifest = data / "manifest.json"
    if manifest.is_file() and not (records / "data" / "manifest.json").exists():
        (records / "data").mkdir(exist_ok=True)
        shutil.copyfile(manifest, records / "data" / "manifest.json")
    return target
