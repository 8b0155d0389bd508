"""Emulation under DistributedDataParallel and FSDP2, on two processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest


def torchrun(script, *arguments, ranks=2):
    """Run a script of this folder on some ranks; fail with what it said."""
    path = pathlib.Path(__file__).with_name(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher.append(f"--nproc-per-node={ranks}")
    result = subprocess.run(
        [*launcher, path, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_on_two_ranks_has_the_bits_of_one_process(kind):
    torchrun("ranks.py", kind)
