"""Speed as ratios taken in one run: rounding beside the copies it cannot beat, and what one call costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from rich.console import Console
from rich.table import Table

from .autograd import cast
from .formats import ROUNDINGS
from .quantize import quantize
from .random import Key

FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn")
COPIES = ("np.copyto", "torch copy_")
BOTH_WAYS = ("nearest_even", "stochastic")
LIMIT = "x ^= 1"  # reads and writes every element in place, and does next to nothing to it


@njit(nogil=True, cache=True)
def _flip(bits):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        bits[i] = np.uint32(bits[i] ^ np.uint32(1))


def run(size_log2: int = 24, repeats: int = 9) -> None:
    """Print how fast rounding runs on one thread, as a share of the fastest copy and of a loop in place.

    Args:
        size_log2: Elements of the arrays, as a power of two.
        repeats: Rounds; each runs every case once, and the medians are compared.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = measure(size_log2, repeats)
        call = call_overhead()
    finally:
        torch.set_num_threads(threads)
    console = Console()
    console.print(table(times, 2**size_log2))
    console.print(
        f"cast of a torch tensor of 1024 elements that requires grad, forward: {call * 1e6:.1f} µs a call",
        soft_wrap=True,
    )


def measure(size_log2: int, repeats: int) -> dict[str, float]:
    """Median seconds of each case, the cases interleaved.

    Args:
        size_log2: Elements of the arrays, as a power of two.
        repeats: Rounds.

    Returns:
        Seconds by case: the copies, the loop in place, and ``"format rounding out="`` or ``"... in place"``.
    """
    return medians(_cases(2**size_log2), repeats, wall_seconds)


def medians(
    cases: Mapping[str, Callable[[], object]], repeats: int, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Median seconds of each case over rounds that run every case once, after one run that is not counted.

    Args:
        cases: Calls by name.
        repeats: Rounds.
        seconds: How a call is timed: ``wall_seconds`` or ``cuda_seconds``.
    """
    for case in cases.values():  # compile, or load from the disk
        case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            times[name].append(seconds(case))
    return {name: statistics.median(values) for name, values in times.items()}


def wall_seconds(case: Callable[[], object]) -> float:
    """Seconds until a call returns."""
    start = perf_counter()
    case()
    return perf_counter() - start


def cuda_seconds(case: Callable[[], object]) -> float:
    """Seconds until the current CUDA stream has done what a call puts on it."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    case()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def require_cuda() -> None:
    """Check that there is a device to measure.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench --device cuda needs a CUDA device, and torch sees none")


def run_cuda(size_log2: int = 28, repeats: int = 9) -> None:
    """Print how fast rounding runs on the current CUDA device, as a share of torch's copy, and a call's cost.

    Args:
        size_log2: Elements of the arrays, as a power of two.
        repeats: Rounds; each runs every case once, and the medians are compared.

    Raises:
        ValueError: there is no CUDA device.
    """
    require_cuda()
    n = 2**size_log2
    x = torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    cases: dict[str, Callable[[], object]] = {"torch copy_": partial(out.copy_, x)}
    for rounding in ROUNDINGS:
        drawn = Key(0) if rounding == "stochastic" else None
        for fmt in FORMATS:
            cases[f"{fmt} {rounding} out="] = partial(quantize, x, fmt, rounding, key=drawn, out=out)
    times = medians(cases, repeats, cuda_seconds)
    result = Table(title=f"{n} float32 on {torch.cuda.get_device_name()}, medians", box=None)
    for heading in ("case", "ms", "GB/s", "of copy"):
        result.add_column(heading, justify="left" if heading == "case" else "right")
    for name, seconds in times.items():
        share = f"{times['torch copy_'] / seconds:.2f}"
        result.add_row(name, f"{seconds * 1e3:.3f}", f"{8 * n / seconds / 1e9:.0f}", share)
    console = Console()
    console.print(result)
    small, into = x[:1024], out[:1024]
    cost = _call_cost(partial(quantize, small, "fp16", out=into)) * 1e6
    torch.cuda.synchronize()
    console.print(f"quantize of 1024 elements, until the call returns: {cost:.1f} µs", soft_wrap=True)


def call_overhead(elements: int = 1024, calls: int = 2000) -> float:
    """Median seconds of the forward of one ``cast`` of a torch tensor that requires grad."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return _call_cost(partial(cast, x, forward="fp16", backward="fp16"), calls)


def _call_cost(call: Callable[[], object], calls: int = 2000) -> float:
    """Median seconds until a call returns."""
    return statistics.median(wall_seconds(call) for _ in range(calls))


def _cases(n: int) -> dict[str, Callable[[], object]]:
    x, out, inplace, flipped = (_buffer(n) for _ in range(4))
    x[:] = np.random.default_rng(0).standard_normal(n, np.float32)
    inplace[:] = x
    flipped[:] = x
    source, target, bits, key = torch.from_numpy(x), torch.from_numpy(out), flipped.view(np.uint32), Key(0)
    cases: dict[str, Callable[[], object]] = {
        COPIES[0]: lambda: np.copyto(out, x),
        COPIES[1]: lambda: target.copy_(source),
        LIMIT: lambda: _flip(bits),
    }
    for rounding in ROUNDINGS:
        drawn = key if rounding == "stochastic" else None
        for fmt in FORMATS:
            ways = (("out=", x, out), ("in place", inplace, inplace))
            for name, array, into in ways if rounding in BOTH_WAYS else ways[:1]:
                call = partial(quantize, array, fmt, rounding, key=drawn, out=into)
                cases[f"{fmt} {rounding} {name}"] = call
    return cases


def _buffer(n: int) -> npt.NDArray[np.float32]:
    """float32 zeros on a 64-byte boundary, their pages already mapped."""
    raw = np.empty(n + 16, np.float32)
    raw[:] = 0
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + n]


def table(times: dict[str, float], n: int) -> Table:
    """What ``measure`` returned, with the two ratios.

    Args:
        times: Seconds by case.
        n: Elements of the arrays.

    Returns:
        A rich table: ``out=`` is compared with the fastest copy, in place with the loop in place.
    """
    copy = min(times[name] for name in COPIES)
    result = Table(title=f"{n} float32, one thread, medians", box=None)
    for heading in ("case", "ms", "10^9/s", "of best copy", "of x ^= 1"):
        result.add_column(heading, justify="left" if heading == "case" else "right")
    for name, seconds in times.items():
        inplace = name.endswith("in place") or name == LIMIT
        ratios = ("", f"{times[LIMIT] / seconds:.2f}") if inplace else (f"{copy / seconds:.2f}", "")
        result.add_row(name, f"{seconds * 1e3:.2f}", f"{n / seconds / 1e9:.2f}", *ratios)
    return result
