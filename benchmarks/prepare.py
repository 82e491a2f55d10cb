"""Speed and memory of turning text into tokens, side by side: ours, the raw `tokenizers` encoder, datasets' `map`,
datatrove, litdata.

    python benchmarks/prepare.py --megabytes 100

Everybody gets the same jsonl file, the same tokenizer.json and the same number of workers, and each run is a process of
its own; in every round all of them run once, in random order. What counts is the time from the first line read to the
last byte written, without imports; the raw encoder has all texts in memory before the clock starts and writes nothing.
What is not installed is left out with a line.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import turns
import tyro

RIVALS = ("raw", "ours", "datasets", "datatrove", "litdata")
BOUNDS = {"raw": 0.9, "datasets": 1.0, "datatrove": 1.0, "litdata": 1.0}


def lines_of(file: str) -> list[str]:
    with open(file, encoding="utf-8") as handle:
        return [json.loads(line)["text"] for line in handle]


def load(tokenizer: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{tokenizer}/tokenizer.json")


def raw(file: str, tokenizer: str, out: str, workers: int) -> Callable[[], int]:
    texts, encoder = lines_of(file), load(tokenizer)

    def work() -> int:
        # In batches, as anybody would whose corpus is larger than memory.
        found = 0
        for start in range(0, len(texts), 1000):
            encoded = encoder.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
            found += sum(len(one) + 1 for one in encoded)
        return found

    return work


def ours(file: str, tokenizer: str, out: str, workers: int) -> Callable[[], int]:
    from resformer.data import open_dataset, prepare

    def work() -> int:
        prepare([file], out, tokenizer=tokenizer, workers=workers, progress=False)
        dataset = open_dataset(out, verify="none")
        return sum(dataset.tokens(split, name) for name in dataset.domains for split in ("train", "validation"))

    return work


def datasets(file: str, tokenizer: str, out: str, workers: int) -> Callable[[], int]:
    import datasets as library

    library.disable_progress_bars()
    encoder = load(tokenizer)
    end = encoder.token_to_id("<|endoftext|>")

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = encoder.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [[*one.ids, end] for one in encoded]}

    def work() -> int:
        rows = library.load_dataset("json", data_files=file, split="train", cache_dir=f"{out}/cache")
        found = rows.map(encode, batched=True, num_proc=workers, remove_columns=rows.column_names)
        found.save_to_disk(f"{out}/saved", num_proc=workers)
        return sum(map(len, found["ids"]))

    return work


def datatrove(file: str, tokenizer: str, out: str, workers: int) -> Callable[[], int]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    # It shares out files, so that the file is cut beforehand.
    texts = lines_of(file)
    parts = Path(out, "parts")
    parts.mkdir(parents=True)
    for i in range(workers):
        with open(parts / f"{i}.jsonl", "w", encoding="utf-8") as handle:
            handle.writelines(json.dumps({"text": text}) + "\n" for text in texts[i::workers])

    def work() -> int:
        tokenise = DocumentTokenizer(
            output_folder=f"{out}/tokens",
            tokenizer_name_or_path=f"{tokenizer}/tokenizer.json",
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        )
        LocalPipelineExecutor(
            [JsonlReader(str(parts)), tokenise], tasks=workers, workers=workers, logging_dir=f"{out}/logs"
        ).run()
        return sum(p.stat().st_size for p in Path(out, "tokens").rglob("*.ds")) // 2

    return work


class Groups:
    """Encodes groups of texts, in whatever process it is sent to."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer, self.encoder = tokenizer, None

    def __call__(self, group: list[str]) -> Any:
        import numpy as np
        import torch

        if self.encoder is None:
            self.encoder = load(self.tokenizer)
        end = self.encoder.token_to_id("<|endoftext|>")
        for one in self.encoder.encode_batch_fast(group, add_special_tokens=False):
            yield torch.from_numpy(np.array([*one.ids, end], dtype=np.int32))


def litdata(file: str, tokenizer: str, out: str, workers: int) -> Callable[[], int]:
    from litdata import TokensLoader, optimize

    texts = lines_of(file)
    groups = [texts[i : i + 256] for i in range(0, len(texts), 256)]

    def work() -> int:
        optimize(
            Groups(tokenizer),
            groups,
            f"{out}/chunks",
            chunk_bytes="64MB",
            num_workers=workers,
            item_loader=TokensLoader(),
            verbose=False,
        )
        return 0

    return work


def one(name: str, file: str, tokenizer: str, out: str, workers: int) -> None:
    """Run one of them and print what it took."""
    work = globals()[name](file, tokenizer, out, workers)
    started = time.perf_counter()
    tokens = work()
    print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)


def measure(name: str, file: Path, tokenizer: Path, workers: int) -> dict[str, Any] | None:
    """Seconds, CPU seconds and peak memory (bytes, of the whole tree of processes) of one run; None: it failed."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--run", name, str(file), str(tokenizer), f"{out}/out", str(workers)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        peak, ended = [0], threading.Event()

        def watch() -> None:
            process = psutil.Process(child.pid)
            while not ended.wait(0.05):
                try:
                    tree = [process, *process.children(recursive=True)]
                    peak[0] = max(peak[0], sum(p.memory_info().rss for p in tree))
                except psutil.Error:
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        said, errors = child.communicate()
        ended.set()
        watcher.join()
        if child.returncode:
            print(f"{name}: left out ({(errors.strip().splitlines() or ['failed'])[-1][:200]})", flush=True)
            return None
        return {**json.loads(said.strip().splitlines()[-1]), "peak_bytes": peak[0]}


def texts_of(text: str) -> list[str]:
    """The texts of an input, without the very long ones."""
    from resformer.data.reading import Reading, Report
    from resformer.data.sources import list_sources

    report = Report()
    sources = list_sources([text], Reading(), kind=None, token_dtype=None, max_bytes=None)
    return [d.text for s in sources for block in s.blocks() for d in block.documents(report) if len(d.text) < 50_000]


def write_text(texts: list[str], file: Path, size: int) -> None:
    """A jsonl file of `size` bytes: documents of `texts`, each begun at another word."""
    draws, written = random.Random(0), 0
    with open(file, "w", encoding="utf-8") as handle:
        while written < size:
            words = draws.choice(texts).split(" ")
            at = draws.randrange(len(words))
            written += handle.write(json.dumps({"text": " ".join(words[at:] + words[:at])}) + "\n")


def main(
    *,
    text: str = "embedded",
    megabytes: int = 100,
    vocab_size: int = 16_384,
    workers: int = 2,
    rounds: int = 3,
    rivals: tuple[str, ...] = RIVALS,
    seed: int = 0,
    json_file: Path | None = None,
) -> None:
    """Compare the preparation of a corpus with other libraries'.

    Args:
        text: Input whose documents are used.
        megabytes: Size of the jsonl file that is made of them.
        vocab_size: Entries of the tokenizer that is trained for all.
        workers: Threads or processes of each.
        rounds: Rounds, a run of each in each.
        rivals: Which of them, of raw, ours, datasets, datatrove, litdata.
        seed: Seed of the order.
        json_file: Write everything measured to this file.
    """
    from resformer.data import prepare

    with tempfile.TemporaryDirectory() as place:
        file, tokenizer = Path(place, "text.jsonl"), Path(place, "tokenizer")
        prepare([text], tokenizer, vocab_size=vocab_size, progress=False)
        write_text(texts_of(text), file, megabytes * 1_000_000)
        found: dict[str, list[dict[str, Any]]] = {}
        left = [name for name in RIVALS if name in rivals]
        order = random.Random(seed)
        for _ in range(rounds):
            for name in order.sample(left, len(left)):
                result = measure(name, file, tokenizer, workers)
                if result is None:
                    left.remove(name)
                else:
                    found.setdefault(name, []).append(result)
        show(found, megabytes)
        if json_file is not None:
            settings = {"megabytes": megabytes, "vocab_size": vocab_size, "workers": workers, "rounds": rounds}
            turns.write(json_file, {"about": turns.about(), "settings": settings, "results": found})


def show(found: dict[str, list[dict[str, Any]]], megabytes: int) -> None:
    """Medians, and the paired ratio of speeds, ours over the other's."""
    print(f"{'':10} {'MB/s':>6} {'peak MB':>8}   ours is faster by")
    mine = [run["seconds"] for run in found.get("ours", [])]
    for name, runs in sorted(found.items(), key=lambda item: statistics.median(r["seconds"] for r in item[1])):
        seconds = [run["seconds"] for run in runs]
        ratios = [theirs / own for theirs, own in zip(seconds, mine, strict=False)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})" if ratios else ""
        bound = f", must be {BOUNDS[name]}" if name in BOUNDS else ""
        peak = max(run["peak_bytes"] for run in runs) / 1e6
        print(f"{name:10} {megabytes / statistics.median(seconds):6.2f} {peak:8,.0f}   {ratio}{bound}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        one(*sys.argv[2:6], int(sys.argv[6]))
    else:
        sys.exit(tyro.cli(main))
