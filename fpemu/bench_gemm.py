"""How fast matrix products are rounded as they accumulate, beside torch's product without rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from .bench import medians, wall_seconds
from .matmul import Accumulator
from .quantize import quantize
from .random import Key

PLAIN = "torch.mm"
WAYS = {
    "fp16, products too": Accumulator("fp16", product="fp16"),
    "fp16": Accumulator("fp16"),
    "fp16, chunks of 64": Accumulator("fp16", chunk=64),
    "fp16, chunks of 16": Accumulator("fp16", chunk=16),
    "bf16": Accumulator("bf16"),
    "e5m2, products too": Accumulator("e5m2", product="e5m2"),
    "fp32": Accumulator("fp32"),
    "fp16 toward_zero": Accumulator("fp16", rounding="toward_zero"),
    "bf16 stochastic": Accumulator("bf16", rounding="stochastic"),
}


def run(size_log2: int = 20, repeats: int = 3) -> None:
    """Print products of terms a second for several ways to accumulate, beside ``torch.mm``.

    Args:
        size_log2: Elements of each of the two square matrices, as an even power of two.
        repeats: Rounds; each runs every case once, and the medians are compared.
    """
    n = 2 ** (size_log2 // 2)
    console = Console()
    console.print(table(measure(n, repeats), n))


def measure(n: int, repeats: int) -> dict[str, float]:
    """Median seconds of each case, the cases interleaved.

    Args:
        n: Rows and columns of both matrices, which hold fp16 numbers.
        repeats: Rounds.
    """
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(quantize(rng.standard_normal((n, n), np.float32), "fp16")) for _ in range(2))
    cases: dict[str, Callable[[], object]] = {PLAIN: partial(torch.mm, a, b)}
    for name, how in WAYS.items():
        cases[name] = partial(how, a, b, key=Key(0) if how.rounding == "stochastic" else None)
    return medians(cases, repeats, wall_seconds)


def table(times: dict[str, float], n: int) -> Table:
    """What ``measure`` returned, as a table, with the share of torch's speed."""
    threads = torch.get_num_threads()
    result = Table(title=f"{n} x {n} float32, {threads} threads", box=None)
    for heading in ("sums", "ms", "GMAC/s", "of torch.mm"):
        result.add_column(heading, justify="left" if heading == "sums" else "right")
    for name, seconds in times.items():
        share = f"{times[PLAIN] / seconds:.3f}"
        result.add_row(name, f"{seconds * 1e3:.1f}", f"{n**3 / seconds / 1e9:.2f}", share)
    return result
