"""FSDP2 on two processes (gloo, CPU): values travel through sharded blocks as tensors, so a sharded step is the plain
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from resformer.core.registry import names

WORKER = Path(__file__).with_name("worker.py")


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_a_sharded_step_is_the_unsharded_one(tmp_path):
    """Every variant in one launch: starting processes takes longer than the steps."""
    store, environment = tmp_path / "store", {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), "2", store],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, err[-3000:]
        assert int(out.split()[-1]) > len(names())
