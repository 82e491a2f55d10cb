"""Freed memory stays in the process, so that the next step takes no page faults for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import resource, sys, torch
from resformer.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.set_num_threads(1)
for step in range(30):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = torch.ones(12_000_000)  # 48 MB: above the 32 MB up to which glibc learns by itself
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_fewer_page_faults():
    faults = [
        int(subprocess.run([sys.executable, "-c", COUNT, mode], capture_output=True, text=True, check=True).stdout)
        for mode in ("keep", "plain")
    ]
    assert faults[0] * 5 < faults[1], faults
