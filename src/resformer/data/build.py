"""prepare(): inputs -> documents -> token ids, in parts -> shards, moved into place as a whole."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resformer.data import embedded, parts, placement, presets, sample, shards, sources, tokenizer
from resformer.data.console import Progress, say
from resformer.data.encode import Encoder
from resformer.data.guard import disk_errors, ends_on_sigterm
from resformer.data.losses import losses
from resformer.data.merge import merge
from resformer.data.parts import Part, Parts, PartWriter
from resformer.data.reading import Reading, Report, Source
from resformer.data.request import Request, check
from resformer.data.sampler import check_weights
from resformer.errors import UserError


def prepare(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    tokenizer_bytes: int = 16_000_000,
    validation_share: float = 0.02,
    split_seed: int = 0,
    on_bad_line: str = "error",
    text_column: str = "text",
    domain_from: str = "auto",
    token_dtype: str | None = None,
    weights: dict[str, float] | str | None = None,
    max_bytes: int | None = None,
    workers: int | None = None,
    task: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Prepare a corpus in the directory `out` and return it.

    Nothing appears at `out` before everything is there. It is made in a directory `.NAME.partial` beside it; a build
    that was stopped or killed leaves there what it has, and the same call goes on with that. The result is the same to
    the byte for any number of workers and tasks, interrupted or not. A second call with the same settings returns at
    once.

    Args:
        inputs: "embedded" (see `embedded`), files, directories or patterns (see `sources`), "dataset:NAME", or "-" for
            standard input.
        out: the directory to write.
        tokenizer: a tokenizer.json, its directory or a name on the hub; None trains byte-level BPE of `vocab_size` on
            a sample of the training documents.
        vocab_size: entries of the vocabulary that is trained.
        tokenizer_bytes: text that it is trained on, at most; takes about 25 times as much memory.
        validation_share: share (0 to 1) of the documents of each domain, by document hash and `split_seed`.
        split_seed: seed of the split.
        on_bad_line: "error" or "skip".
        text_column: name of the column with the text, `a.b` for a field of an object.
        domain_from: "auto" (`meta.redpajama_set_name`, else the file), "file", or a column.
        token_dtype: "uint16" or "uint32", of token files that have no header.
        weights: mixture of the domains, or the name of a preset; default: the embedded corpus's own, else by training
            tokens.
        max_bytes: bound on the text in all; each input gives the documents at its beginning.
        workers: threads that encode; default: one a core.
        task: "i/n": only encode the i-th of n shares of the inputs; when all are done, the call without it goes on.
        overwrite: replace a corpus that was prepared with other settings, or drop the beginning of one.
        progress: show it on stderr.

    Raises:
        UserError: see each check; nothing appears at `out` then.
        RunError: the disk is full.
    """
    reading = Reading(on_bad_line=on_bad_line, text_column=text_column, domain_from=domain_from)
    plan = check(
        inputs=inputs,
        tokenizer_source=tokenizer,
        vocab_size=vocab_size,
        tokenizer_bytes=tokenizer_bytes,
        validation_share=validation_share,
        split_seed=split_seed,
        reading=reading,
        token_dtype=token_dtype,
        weights=weights,
        max_bytes=max_bytes,
        workers=workers,
        task=task,
        progress=progress,
    )
    if not str(out):
        raise UserError("--out: got an empty path, expected the directory to write")
    target = Path(out)
    place = target.resolve()  # a link to a directory stays a link
    piped = sources.STDIN in plan.inputs
    if not piped and placement.already_there(place, plan.settings(None), overwrite):
        say(f"{target}: already prepared")
        if plan.task is None:
            parts.tidy(place, plan.encoding_settings(None))
        return target
    plan.check_tokenizer()
    started = time.perf_counter()
    home = parts.home_of(place)
    try:
        with (
            disk_errors(target),
            ends_on_sigterm(f"{target} was not prepared"),
            parts.held(place, shared=plan.task is not None),
        ):
            index = _build(plan, target, place, home, overwrite)
    finally:
        sources.collected.cache_clear()
        if home.exists() and plan.task is None:
            say(f"{home}: keeps what is done so far; the same command goes on with it")
    if index is not None:
        _summary(index, target, time.perf_counter() - started)
    return target


def _build(plan: Request, target: Path, place: Path, home: Path, overwrite: bool) -> dict[str, Any] | None:
    """All of a build, in `home`, which is locked. The index; None where there was nothing to write."""
    stdin = _keep_stdin(home) if sources.STDIN in plan.inputs else None
    settings = plan.settings(stdin)
    if placement.already_there(place, settings, overwrite):
        say(f"{target}: already prepared")
        return None
    parts.agree(home, plan.encoding_settings(stdin), target, overwrite=overwrite, shared=plan.task is not None)
    kept, report = Parts(home), Report()
    kept.directory.mkdir(exist_ok=True)
    found = _make_tokenizer(plan, home, stdin, report)
    vocabulary = tokenizer.open_vocabulary(home)
    number, of = plan.task or (1, 1)
    mine = found[number - 1 :: of]
    _encode(plan, kept, mine, found, vocabulary)
    if plan.task is not None:
        left = sum(not kept.finished(source) for source in found)
        say(
            f"{target}: task {number} of {of} is done ({len(mine)} of {len(found)} inputs); "
            + (f"{left} are left to others" if left else "all are done: the same command without --task goes on")
        )
        return None
    work = home / "corpus"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in tokenizer.FILES:
        shutil.copy(home / name, work / name)
    index: dict[str, Any] | None = _write(plan, settings, kept, found, vocabulary, work, report)
    if not placement.publish(work, place, settings, overwrite):
        say(f"{target}: already prepared")
        index = None
    shutil.rmtree(home, ignore_errors=True)
    return index


def _keep_stdin(home: Path) -> Path:
    """Standard input in a file: it is read more than once. Equal contents look like the same file."""
    if sys.stdin is None:
        raise UserError("--input -: standard input is closed; pipe text into the command")
    file = home / "stdin"
    with parts.whole(file) as handle:
        shutil.copyfileobj(sys.stdin.buffer, handle)
    os.utime(file, (0, 0))
    return file


def _sources(
    plan: Request, vocabulary: tokenizer.Vocabulary | None, stdin: Path | None, report: Report
) -> list[Source]:
    kind = None
    if vocabulary is not None:
        kind = sources.TokenKind(
            vocab_size=vocabulary.vocab_size, eos_token_id=vocabulary.eos_token_id, token_dtype=plan.token_dtype
        )
    return sources.list_sources(
        plan.inputs,
        plan.reading,
        kind=kind,
        token_dtype=plan.token_dtype,
        max_bytes=_embedded_bound(plan),
        stdin=stdin,
        report=report,
    )


def _embedded_bound(plan: Request) -> int | None:
    """The embedded corpus alone divides the bytes by its weights; beside others it has its share by size."""
    return plan.max_bytes if plan.inputs == (embedded.NAME,) else None


def _make_tokenizer(plan: Request, home: Path, stdin: Path | None, report: Report) -> list[Source]:
    """Put the tokenizer into `home`, unless it is there; return the sources."""
    if plan.tokenizer is not None:
        if not (home / tokenizer.FILES[0]).exists():
            tokenizer.copy_existing(plan.tokenizer, home)
        return _sources(plan, tokenizer.open_vocabulary(home), stdin, report)
    found = _sources(plan, None, stdin, report)
    if (home / tokenizer.FILES[0]).exists():
        return found
    if plan.progress:
        say(f"training a tokenizer of {plan.vocab_size:,} entries")
    texts = sample.training_texts(
        found,
        plan.reading,
        vocab_size=plan.vocab_size,
        most_bytes=plan.tokenizer_bytes,
        validation_share=plan.validation_share,
        split_seed=plan.split_seed,
    )
    if not texts:
        raise _nothing(plan)
    tokenizer.write_trained(tokenizer.train(texts, plan.vocab_size), home)
    got = tokenizer.open_vocabulary(home).vocab_size
    if got < plan.vocab_size:
        say(f"note: the text gives a vocabulary of {got}, asked were {plan.vocab_size}; going on with {got}")
    return found


def _nothing(plan: Request) -> UserError:
    return UserError(
        f"{', '.join(plan.inputs)}: no document with text in it; expected jsonl with a {plan.reading.text_column!r} "
        "field, parquet, .txt, .md or source code"
    )


def _encode(
    plan: Request, kept: Parts, mine: Sequence[Source], everything: Sequence[Source], vocabulary: tokenizer.Vocabulary
) -> None:
    """Encode the sources `mine`, as far as they are not yet, into parts."""
    shares = dict(zip(map(parts.key, everything), sample.shares(everything), strict=True))
    bound = plan.max_bytes if _embedded_bound(plan) is None else None
    encoder = Encoder(
        vocabulary,
        on_bad_line=plan.reading.on_bad_line,
        split_seed=plan.split_seed,
        workers=plan.workers,
        count_bytes=plan.tokenizer is not None,
    )
    writers = [
        PartWriter(kept, source, None if bound is None else max(1, int(bound * shares[parts.key(source)])))
        for source in mine
        if not kept.finished(source)
    ]
    total = sum(source.size for source in mine)
    before = total - sum(writer.source.size for writer in writers) + sum(writer.on_disk for writer in writers)
    with Progress("encoding", total, plan.progress, done=before) as bar:
        last: PartWriter | None = None
        try:
            for writer, piece in encoder.run((w, block) for w in writers for block in w.blocks()):
                if last is not None and writer is not last:
                    last.close()
                last = writer
                writer.add(piece)
                bar.advance(piece.size, tokens=len(piece.ids))
        except BaseException:
            if last is not None:
                with contextlib.suppress(OSError):
                    last.flush()
            raise
        else:
            for writer in writers:
                writer.close()
        finally:
            for writer in writers:
                writer.lock.close()


def _write(
    plan: Request,
    settings: dict[str, Any],
    kept: Parts,
    found: Sequence[Source],
    vocabulary: tokenizer.Vocabulary,
    work: Path,
    report: Report,
) -> dict[str, Any]:
    """Shards and index from all parts."""
    everything: list[Part] = [part for source in found for part in kept.of(source)]
    if not any(part.tokens for part in everything):
        raise _nothing(plan)
    domains = sorted({name for part in everything for name in part.domains})
    weights = presets.preset(plan.weights, domains) if isinstance(plan.weights, str) else plan.weights
    if weights is not None:
        check_weights(weights, domains, name="--weights")
        _say_if_not_one(weights)
    dtype = shards.dtype_for(vocabulary.vocab_size)
    with Progress("writing shards", sum(part.tokens for part in everything), plan.progress) as bar:
        entries, met = merge(everything, work, validation_share=plan.validation_share, dtype=dtype, advance=bar.advance)
    report.add(met)
    placement.write_json(work / "manifest.json", sources.manifest(plan.inputs, plan.token_dtype, _embedded_bound(plan)))
    files = sorted(p for p in work.rglob("*") if p.is_file())
    index = shards.seal(
        {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "dtype": dtype.str,
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
            "weights": _weights(plan, weights, entries),
            "domains": {
                name: {"splits": entries[name], "counts": dict(sorted(report.domain(name).items()))}
                for name in sorted(entries)
            },
            "readers": report.asdict(entries),
            "files": {p.relative_to(work).as_posix(): shards.file_entry(p) for p in files},
        }
    )
    placement.write_json(work / shards.INDEX, index)
    return index


def _say_if_not_one(weights: dict[str, float]) -> None:
    total = math.fsum(weights.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        say(f"note: --weights sum to {total:g}; they are divided by it")


def _weights(
    plan: Request, weights: dict[str, float] | None, entries: dict[str, dict[str, dict[str, Any]]]
) -> dict[str, float]:
    """The mixture for the index, summing to 1, every domain named."""
    if weights is not None:
        given = weights
    elif set(entries) <= set(embedded.WEIGHTS) and set(plan.inputs) == {embedded.NAME}:
        given = embedded.WEIGHTS
    else:
        given = {name: float(e["train"]["tokens"]) for name, e in entries.items()}
    total = math.fsum(given.get(name, 0.0) for name in entries)
    if total <= 0:
        raise UserError("--weights: every domain that has a document has weight 0; give one of them a positive weight")
    return {name: given.get(name, 0.0) / total for name in entries}


def _summary(index: dict[str, Any], target: Path, seconds: float) -> None:
    for line in losses(index):
        say(line)
    tokens = sum(d["splits"][s]["tokens"] for d in index["domains"].values() for s in shards.SPLITS)
    documents = sum(d["splits"][s]["documents"] for d in index["domains"].values() for s in shards.SPLITS)
    say(f"{target}: {documents:,} documents, {tokens:,} tokens, {len(index['domains'])} domains in {seconds:.0f} s")
