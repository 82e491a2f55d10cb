"""prepare(): inputs -> documents -> tokenizer -> shards, written beside `out` and moved into place as a whole."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data import embedded, placement, shards, tokenizer
from resformer.data.console import say, stage
from resformer.data.guard import disk_errors, ends_on_sigterm
from resformer.data.losses import losses
from resformer.data.readers import Report, list_files, read
from resformer.data.request import Request, check
from resformer.data.sampler import check_weights
from resformer.data.spool import Entry, Split, Spool, split_documents
from resformer.errors import UserError

# More text than this for each entry of the vocabulary hardly changes it, and costs time.
_TRAINING_BYTES_PER_ENTRY = 2_000
_ENCODE_BYTES = 2_000_000


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

    Nothing appears at `out` before everything is there: it is made in a directory `.NAME.partial-*` beside it, which is
    removed at the end, after Ctrl-C and after SIGTERM (exit code 143); what a kill -9 leaves is removed by the next
    call for the same `out`. UserError: see each check; nothing is written then. RunError: the disk is
    full.
    """
    plan = check(inputs, tokenizer, vocab_size, validation_share, split_seed, on_bad_line, weights, max_bytes, progress)
    if not str(out):
        raise UserError("--out: got an empty path, expected the directory to write")
    target = Path(out)
    place = target.resolve()  # a link to a directory stays a link
    placement.remove_leftovers(place)
    settings = plan.settings()
    if placement.already_there(place, settings, overwrite):
        say(f"{target}: already prepared")
        return target
    plan.check_tokenizer()
    started = time.perf_counter()
    with disk_errors(target), ends_on_sigterm(f"{target} was not prepared"), placement.workplace(place) as work:
        index = _build(plan, settings, work)
        if not placement.publish(work, place, settings, overwrite):
            say(f"{target}: already prepared")
            return target
    for line in losses(index):
        say(line)
    tokens = sum(d["splits"][s]["tokens"] for d in index["domains"].values() for s in shards.SPLITS)
    documents = sum(d["splits"][s]["documents"] for d in index["domains"].values() for s in shards.SPLITS)
    say(
        f"{target}: {documents:,} documents, {tokens:,} tokens, {len(index['domains'])} domains in "
        f"{time.perf_counter() - started:.0f} s"
    )
    return target


def _build(plan: Request, settings: dict[str, Any], work: Path) -> dict[str, Any]:
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
            check_weights(plan.weights, domains, name="--weights")
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
            "readers": report.asdict(domains),
            "files": {p.relative_to(work).as_posix(): shards.file_entry(p) for p in files},
        }
    )
    placement.write_json(work / shards.INDEX, index)
    return index


def _read(plan: Request, spool: Spool, report: Report) -> dict[str, Any]:
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


def _make_tokenizer(plan: Request, spool: Spool, splits: dict[str, Split], work: Path) -> None:
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
    plan: Request, spool: Spool, splits: dict[str, Split], vocabulary: tokenizer.Vocabulary, work: Path
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


def _weights(plan: Request, entries: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The mixture for the index, summing to 1, every domain named."""
    if plan.weights is not None:
        given = plan.weights
    elif set(entries) <= set(embedded.WEIGHTS) and set(plan.inputs) == {embedded.NAME}:
        given = embedded.WEIGHTS
    else:
        given = {name: float(e["train"]["tokens"]) for name, e in entries.items()}
    total = math.fsum(given.get(name, 0.0) for name in entries)
    return {name: given.get(name, 0.0) / total for name in entries}
