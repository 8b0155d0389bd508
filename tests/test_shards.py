"""LowPrecision under DistributedDataParallel and FSDP2, on two processes."""

from __future__ import annotations

import pytest
from test_ranks import torchrun


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_steps_on_two_ranks_resumed_have_the_bits_of_one_process(kind):
    torchrun("shards.py", kind)
