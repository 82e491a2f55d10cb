"""Memory and MFU in the rows of metrics.jsonl, and on the progress line."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from resformer.train.progress import Reporter
from resformer.train.usage import Usage, known_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),  # the same letters, a quarter slower
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a slice of one
        ("NVIDIA A100X", None),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 3080", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name: str, flops: float | None) -> None:
    assert known_peak(name) == flops


def test_mfu_is_three_forward_passes_over_what_all_devices_can_do() -> None:
    fields = Usage(CPU, 1_000_000, 4, 2e12).fields(200_000.0)
    assert fields["mfu"] == pytest.approx(3 * 1e6 * 2e5 / (4 * 2e12))
    assert "mfu" not in Usage(CPU, 1_000_000, 1, None).fields(200_000.0)


def test_the_peak_of_memory_never_falls() -> None:
    watched = Usage(CPU, 1, 1, None)
    before = watched.fields(1.0)["memory_bytes"]
    assert 2**26 < before < 2**40  # bytes, not KiB or pages: torch alone takes more than 64 MiB
    block = torch.ones(2**26)
    during = watched.fields(1.0)["memory_bytes"]
    del block
    assert watched.fields(1.0)["memory_bytes"] >= during >= before


def test_a_gpu_is_asked_for_its_name_once_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def answer(name: str, value: object) -> object:
        return lambda *_: (calls.append(name), value)[1]

    values = {"get_device_name": "NVIDIA H100 PCIe", "reset_peak_memory_stats": None, "max_memory_allocated": 7}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, answer(name, value))
    monkeypatch.setattr(torch.cuda, "synchronize", answer("synchronize", None))
    gpu = Usage(torch.device("cuda", 0), 1_000_000_000, 1, None)
    assert gpu.fields(63_000.0) == {"memory_bytes": 7, "mfu": pytest.approx(0.25)}
    gpu.fields(1.0)
    assert calls == [*list(values)[:2], "max_memory_allocated", "max_memory_allocated"]
    assert Usage(torch.device("cuda", 0), 10**9, 1, 1e15).fields(1e5)["mfu"] == pytest.approx(0.3)  # the key wins


def test_the_progress_line_shows_the_mfu_where_it_is_known() -> None:
    out = io.StringIO()
    with Reporter(steps=2, done=0, every_seconds=0.0, console=Console(file=out)) as reporter:
        reporter.step(1, loss=2.5, tokens_per_second=1234.0, mfu=0.4167)
        reporter.step(2, loss=2.5, tokens_per_second=1234.0)
    first, second = out.getvalue().splitlines()
    assert "1,234 tokens/s  MFU 41.7%  ETA" in first
    assert "1,234 tokens/s  ETA" in second
