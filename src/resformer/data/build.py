"""prepare(): inputs -> documents -> tokenizer -> shards, written beside `out` and moved into place as a whole."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data import embedded, placement, shards, tokenizer
from resformer.data.console import say, stage
from resformer.data.readers import Report, list_files, read
from resformer.data.sampler import check_weights
from resformer.data.spool import Entry, Split, Spool, split_documents
from resformer.errors import UserError, did_you_mean

# More text than this for each entry of the vocabulary hardly changes it, and costs time.
_TRAINING_BYTES_PER_ENTRY = 2_000
_ENCODE_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The arguments of `prepare`, checked."""

    inputs: tuple[str, ...]
    tokenizer: Path | None
    vocab_size: int
    validation_share: float
    split_seed: int
    on_bad_line: str
    weights: dict[str, float] | None
    max_bytes: int | None
    progress: bool

    def settings(self) -> dict[str, Any]:
        """What decides the content of the result; equal settings mean "already prepared"."""
        return {
            "inputs": _inputs_digest(self.inputs),
            "tokenizer": None if self.tokenizer is None else tokenizer.fingerprint(tokenizer.locate(self.tokenizer)),
            "vocab_size": self.vocab_size if self.tokenizer is None else None,
            "validation_share": self.validation_share,
            "split_seed": self.split_seed,
            "on_bad_line": self.on_bad_line,
            "weights": self.weights,
            "max_bytes": self.max_bytes,
        }


def prepare(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    validation_share: float = 0.02,
    split_seed: int = 0,
    on_bad_line: str = "error",
    weights: dict[str, float] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    max_bytes: int | None = None,
) -> Path:
    """Prepare a corpus in the directory `out` and return it.

    inputs: "embedded" (see `embedded`), files or directories (see `readers`). tokenizer: a tokenizer.json or its
    directory; None trains byte-level BPE of `vocab_size` on the training documents. validation_share: share (0 to 1)
    of the documents of each domain, by document hash and `split_seed`. on_bad_line: "error" or "skip". weights:
    mixture of the domains; default: the embedded corpus's own, else by training tokens. max_bytes: bound on the text
    in all. A second call with the same settings returns at once.

    Nothing appears at `out` before everything is there. UserError: see each check; nothing is written then.
    """
    plan = _check(
        inputs, tokenizer, vocab_size, validation_share, split_seed, on_bad_line, weights, max_bytes, progress
    )
    target = Path(out)
    place = target.resolve()  # a link to a directory stays a link
    settings = plan.settings()
    if placement.already_there(place, settings, overwrite):
        say(f"{target}: already prepared")
        return target
    started = time.perf_counter()
    with placement.workplace(place) as work:
        index = _build(plan, settings, work)
        if not placement.publish(work, place, settings, overwrite):
            say(f"{target}: already prepared")
            return target
    tokens = sum(d["splits"][s]["tokens"] for d in index["domains"].values() for s in shards.SPLITS)
    documents = sum(d["splits"][s]["documents"] for d in index["domains"].values() for s in shards.SPLITS)
    say(
        f"{target}: {documents:,} documents, {tokens:,} tokens, {len(index['domains'])} domains in "
        f"{time.perf_counter() - started:.0f} s"
    )
    return target


def _build(plan: _Plan, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    report = Report(on_bad_line=plan.on_bad_line)
    spool = Spool(work / "spool", plan.split_seed)
    try:
        manifest = _read(plan, spool, report)
        if not spool.entries:
            raise UserError(
                f"{', '.join(plan.inputs)}: no document with text in it; expected jsonl with a 'text' field, .txt, "
                ".md or source code"
            )
        if plan.max_bytes is not None:
            spool.bound(plan.max_bytes, report)
        domains = sorted(spool.entries)
        if plan.weights is not None:
            check_weights(plan.weights, domains)
        splits = {name: split_documents(spool.entries[name], plan.validation_share, name) for name in domains}
        _make_tokenizer(plan, spool, splits, work)
        vocabulary = tokenizer.open_vocabulary(work)
        entries = _write_shards(plan, spool, splits, vocabulary, work)
    finally:
        spool.close()
    train = np.concatenate([shards.read_table(work, e["train"])[:, 2] for e in entries.values()])
    validation = np.concatenate([shards.read_table(work, e["validation"])[:, 2] for e in entries.values()])
    shards.check_overlap(work, train, validation)
    placement.write_json(work / "manifest.json", manifest)
    files = sorted(p for p in work.rglob("*") if p.is_file() and p.name != placement.LOCK)
    index = shards.seal(
        {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "dtype": shards.dtype_for(vocabulary.vocab_size).str,
            "vocab_size": vocabulary.vocab_size,
            "tokenizer": {
                "sha256": tokenizer.fingerprint(work / "tokenizer.json"),
                "eos_token": vocabulary.eos_token,
                "eos_token_id": vocabulary.eos_token_id,
                "bos_token": vocabulary.bos_token,
                "bos_token_id": vocabulary.bos_token_id,
            },
            "special_tokens": shards.SPECIAL_TOKENS,
            "inputs": list(plan.inputs),
            "settings": settings,
            "weights": _weights(plan, entries),
            "domains": {
                name: {"splits": entries[name], "counts": dict(sorted(report.domain(name).items()))} for name in domains
            },
            "readers": report.asdict(),
            "files": {p.relative_to(work).as_posix(): shards.file_entry(p) for p in files},
        }
    )
    placement.write_json(work / shards.INDEX, index)
    return index


def _read(plan: _Plan, spool: Spool, report: Report) -> dict[str, Any]:
    """Fill the spool from all inputs; returns the manifest."""
    manifest: dict[str, Any] = {"inputs": []}
    for name in plan.inputs:
        with stage(f"reading {name}", None, plan.progress) as advance:
            if name == embedded.NAME:
                documents, origin = embedded.collect(report, max_bytes=plan.max_bytes, advance=advance)
                for _ in spool.fill(documents, report):
                    pass
                manifest["inputs"].append(origin)
            else:
                files = list_files(Path(name))
                for size in spool.fill(read(Path(name), report), report):
                    advance(size)
                manifest["inputs"].append({"path": name, "files": len(files)})
    return manifest


def _make_tokenizer(plan: _Plan, spool: Spool, splits: dict[str, Split], work: Path) -> None:
    if plan.tokenizer is not None:
        tokenizer.copy_existing(plan.tokenizer, work)
        return
    # Training documents only: a vocabulary fitted to validation text would make its loss look better than it is.
    entries = sorted((entry for split in splits.values() for entry in split.train), key=lambda e: e.order)
    enough = plan.vocab_size * _TRAINING_BYTES_PER_ENTRY
    total = min(sum(entry.size for entry in entries), enough)
    with stage(f"training a tokenizer of {plan.vocab_size}", total, plan.progress) as advance:

        def texts() -> Iterator[str]:
            used = 0
            for entry in entries:
                if used >= enough:
                    return
                used += entry.size
                advance(entry.size)
                yield spool.text(entry)

        text = tokenizer.train(texts(), plan.vocab_size)
    tokenizer.write_trained(text, work)
    got = tokenizer.open_vocabulary(work).vocab_size
    if got < plan.vocab_size:
        say(f"note: the text gives a vocabulary of {got}, asked were {plan.vocab_size}; going on with {got}")


def _write_shards(
    plan: _Plan, spool: Spool, splits: dict[str, Split], vocabulary: tokenizer.Vocabulary, work: Path
) -> dict[str, dict[str, dict[str, Any]]]:
    total = sum(entry.size for split in splits.values() for entry in (*split.train, *split.validation))
    result: dict[str, dict[str, dict[str, Any]]] = {}
    with stage("writing shards", total, plan.progress) as advance:
        for domain, split in splits.items():
            result[domain] = {}
            for name in shards.SPLITS:
                writer = shards.ShardWriter(
                    work, domain, name, vocab_size=vocabulary.vocab_size, eos_token_id=vocabulary.eos_token_id
                )
                for group in _groups(getattr(split, name)):
                    encoded = vocabulary.encode([spool.text(entry) for entry in group])
                    for entry, ids in zip(group, encoded, strict=True):
                        writer.add(ids, entry.size, entry.identity)
                        advance(entry.size)
                result[domain][name] = writer.close()
    return result


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Consecutive documents of about 2 MB in all: enough to keep all cores busy, little enough to hold."""
    group: list[Entry] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += entry.size
        if size >= _ENCODE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _weights(plan: _Plan, entries: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The mixture for the index, summing to 1, every domain named."""
    if plan.weights is not None:
        given = plan.weights
    elif set(entries) <= set(embedded.WEIGHTS) and set(plan.inputs) == {embedded.NAME}:
        given = embedded.WEIGHTS
    else:
        given = {name: float(e["train"]["tokens"]) for name, e in entries.items()}
    total = math.fsum(given.get(name, 0.0) for name in entries)
    return {name: given.get(name, 0.0) / total for name in entries}


def _check(
    inputs: Any,
    source: Any,
    vocab_size: Any,
    share: Any,
    seed: Any,
    on_bad_line: Any,
    weights: Any,
    max_bytes: Any,
    progress: bool,
) -> _Plan:
    names = tuple(str(item) for item in ([inputs] if isinstance(inputs, str | Path) else inputs))
    if not names:
        raise UserError("inputs: got none, expected 'embedded' or the paths of files or directories")
    for name in names:
        if name != embedded.NAME and not Path(name).exists():
            raise UserError(
                f"inputs: no file or directory '{name}'{did_you_mean(name, [embedded.NAME])}; expected a path or "
                "'embedded'"
            )
    if len(set(names)) < len(names):
        raise UserError(
            f"inputs: named twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}; name each once"
        )
    if source is None:
        tokenizer.check_vocab_size(vocab_size)
    else:
        source = Path(source)
        tokenizer.locate(source)
    if not 0 <= share < 1:
        raise UserError(
            f"validation_share: got {share}, expected a share of at least 0 and below 1, such as 0.02 for 2 %"
        )
    if on_bad_line not in ("error", "skip"):
        raise UserError(
            f"on_bad_line: got '{on_bad_line}', expected 'error' or "
            f"'skip'{did_you_mean(str(on_bad_line), ['error', 'skip'])}"
        )
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"max_bytes: got {max_bytes}, expected at least 1")
    if weights is not None:
        check_weights(weights, list(weights))
    return _Plan(
        inputs=names,
        tokenizer=source,
        vocab_size=vocab_size,
        validation_share=float(share),
        split_seed=int(seed),
        on_bad_line=on_bad_line,
        weights=None if weights is None else {name: float(value) for name, value in sorted(weights.items())},
        max_bytes=max_bytes,
        progress=progress,
    )


def _inputs_digest(inputs: Sequence[str]) -> str:
    """Identity of the inputs by names, sizes and times of their files; reading terabytes would not be "at once"."""
    digest = hashlib.sha256()
    for name in inputs:
        if name == embedded.NAME:
            digest.update(f"{embedded.NAME} {embedded.REVISION}\n".encode())
            continue
        top = Path(name)
        for file in list_files(top):
            stat = file.stat()
            relative = file.relative_to(top).as_posix() if file != top else file.name
            digest.update(json.dumps([relative, stat.st_size, stat.st_mtime_ns]).encode())
    return digest.hexdigest()
