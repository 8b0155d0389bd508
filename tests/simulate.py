"""Run the CUDA kernels in numba's simulator; prints, as JSON, how many bits differ from the CPU's by case.

A program of its own: the simulator is chosen by NUMBA_ENABLE_CUDASIM=1 before numba is imported.
"""

from __future__ import annotations

import json
import math

import numpy as np

from fpemu import Key, Tally, as_format, encode, quantize, tally
from fpemu.formats import BINARY32, BINARY64, ROUNDINGS
from fpemu.kernels import cuda, device
from fpemu.kernels.layout import COUNTS, SUMS
from fpemu.kernels.rules import carried, plan, tally_words

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e8m0", "e2m1", "dlfloat16", "binary8p1ue")


def hard_inputs(fmt, dtype, count, seed=0):
    """Values, ties, one ulp beside, any size, any bits, specials; ``count`` of them."""
    rng, f = np.random.default_rng(seed), as_format(fmt)
    values = np.array([f.magnitude(int(c)) for c in np.unique(rng.integers(0, f.max_code + 1, 60))])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [f.max * (1 + f.eps / 4), f.max * 2]])
    with np.errstate(over="ignore"):
        points = points.astype(dtype)
        points = np.concatenate([points, np.nextafter(points, dtype(0)), np.nextafter(points, dtype(np.inf))])
        low, high = math.log2(f.smallest_subnormal) - 35, math.log2(f.max) + 2
        sizes = (2.0 ** rng.uniform(max(low, -1000), min(high, 1000), count)).astype(dtype)
    width = np.dtype(dtype).itemsize
    bits = rng.integers(0, 2 ** (8 * width), count, np.uint64).astype(f"u{width}").view(dtype)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    everything = np.concatenate([points, -points, sizes, -sizes, bits, specials])
    return rng.permutation(everything)[:count]


def aligned(x, shift):
    """A copy that starts ``shift`` elements after a 16-byte boundary."""
    room = np.empty(x.size + 8, x.dtype)
    start = (-room.ctypes.data % 16) // x.itemsize + shift
    room[start : start + x.size] = x
    return room[start : start + x.size]


def difference(a, b):
    bits = f"u{a.dtype.itemsize}"
    return int(((a.view(bits) != b.view(bits)) & ~((a != a) & (b != b))).sum())


def rounded(x, fmt, rounding, overflow, key, options, shift):
    carrier = BINARY64 if x.dtype == np.float64 else BINARY32
    steps = plan(as_format(fmt), rounding, overflow, carrier, **options)
    bits = f"u{x.dtype.itemsize}"
    source, out = aligned(x, shift), aligned(np.zeros_like(x), shift)
    addresses = source.ctypes.data, out.ctypes.data
    words = steps.words.copy()
    device.round_bits(source.view(bits), out.view(bits), addresses, np.uint64, steps, words, key)
    return out


def rounding_cases():
    for dtype in (np.float32, np.float64):
        for fmt in FORMATS:
            try:
                carried(as_format(fmt), BINARY64 if dtype == np.float64 else BINARY32)
            except ValueError:
                continue
            for number, rounding in enumerate(ROUNDINGS):
                overflow = ("ieee", "saturate", "propagate")[number % 3]
                x = hard_inputs(fmt, dtype, 1500 if dtype == np.float32 else 700)
                yield f"{fmt} {rounding} {overflow} {np.dtype(dtype).name}", x, fmt, rounding, overflow


def main():
    results = {}
    for name, x, fmt, rounding, overflow in rounding_cases():
        stochastic = rounding == "stochastic"
        for offset, shift in ((0, 0), (1023, 1)) if stochastic else ((0, 0), (0, 1)):
            key = Key(5, 6, step=2**33 + 1, offset=2**32 + offset) if stochastic else None
            got = rounded(x, fmt, rounding, overflow, key, {}, shift)
            wanted = quantize(x, fmt, rounding, overflow=overflow, key=key)
            results[f"{name} {offset} {shift}"] = difference(got, wanted)
    x = hard_inputs("fp16", np.float32, 1500)
    for variant in "ABC":
        key = Key(1)
        got = rounded(x, "fp16", "stochastic", "ieee", key, {"random_bits": 5, "variant": variant}, 0)
        wanted = quantize(x, "fp16", "stochastic", key=key, random_bits=5, variant=variant)
        results[f"five bits {variant}"] = difference(got, wanted)
    got = rounded(x, "fp16", "toward_positive", "ieee", None, {"flush": True}, 0)
    results["flush"] = difference(got, quantize(x, "fp16", "toward_positive", flush_subnormals=True))
    for dtype, carrier, kernel in ((np.float32, BINARY32, cuda.TALLY), (np.float64, BINARY64, cuda.TALLY64)):
        x = hard_inputs("fp16", dtype, 2500)
        q = quantize(x, "fp16")
        counts, parts = np.zeros(COUNTS, np.int64), np.zeros((2, 3))
        bits = f"u{x.dtype.itemsize}"
        words = tally_words(as_format("fp16"), carrier).copy()
        kernel[2, cuda.THREADS](x.view(bits), q.view(bits), words, counts, parts)
        counts[0] += x.size
        wanted = tally(x, "fp16")
        assert len(wanted.sums) == SUMS
        results[f"tally {x.dtype}"] = int(Tally(counts, wanted.sums, wanted.fmt) != wanted)
        results[f"largest {x.dtype}"] = int(parts[:, 2].max() != wanted.amax)
        results[f"squares {x.dtype}"] = int(
            not math.isclose(parts[:, 0].sum(), wanted.sums[1], rel_tol=1e-12)
        )
        values = q[np.isfinite(q)]
        codes = np.zeros(values.size, np.uint16)
        steps = plan(as_format("fp16"), "nearest_even", "ieee", carrier)
        encoder = cuda.KERNELS["encode" if carrier == BINARY32 else "encode64"].guarded
        encoder[-(-values.size // 1024), cuda.THREADS](values.view(bits), codes, steps.words.copy())
        results[f"encode {x.dtype}"] = int((codes != encode(values, "fp16")).sum())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
