from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fpemu import Tally, as_format, quantize, reference, tally
from fpemu.kernels import launch

FORMATS = ["fp16", "bf16", "e5m2", "e4m3fn", "e4m3", "e3m2", "e2m1", "e4m3fnuz", "dlfloat16", "tf32"]
DTYPES = ["float32", "float64", "float16"]


def mixed(dtype="float32", seed=0, count=3000):
    """Numbers of all sizes, powers of two among them, subnormals, zeros and specials."""
    rng = np.random.default_rng(seed)
    lowest, highest = {"float16": (-26, 17), "float32": (-151, 129), "float64": (-1076, 1025)}[dtype]
    with np.errstate(over="ignore"):
        spread = np.ldexp(rng.standard_normal(count), rng.integers(lowest, highest, count)).astype(dtype)
        powers = np.ldexp(1.0, rng.integers(lowest, highest, count // 4)).astype(dtype)
    usual = (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 4, count)).astype(dtype)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, -np.inf, np.nan, -np.nan], dtype)
    return rng.permutation(np.concatenate([spread, powers, -powers, usual, specials]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_those_of_a_plain_loop(dtype):
    x = mixed(dtype)
    got = tally(x)
    values = [float(v) for v in x]
    finite = [v for v in values if math.isfinite(v)]
    nonzero = [v for v in finite if v]
    assert got.count == len(values)
    assert got.zero == len(finite) - len(nonzero)
    assert got.negative == sum(v < 0 for v in nonzero)
    assert (got.positive_infinity, got.negative_infinity, got.nan) == (
        values.count(math.inf),
        values.count(-math.inf),
        sum(v != v for v in values),
    )
    assert got.amax == max(map(abs, finite))
    histogram = np.zeros(got.histogram.size, np.int64)
    powers = histogram.copy()
    for v in nonzero:
        mantissa, exponent = math.frexp(abs(v))
        histogram[exponent - 1 - got.exponents[0]] += 1
        powers[exponent - 1 - got.exponents[0]] += mantissa == 0.5
    assert (got.histogram == histogram).all()
    assert (got.powers == powers).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_are_those_of_the_reference(fmt, overflow, dtype):
    x, f = mixed(dtype, count=400), as_format(fmt)
    got = tally(x, fmt, overflow=overflow)
    under = subnormal = over = 0
    for v in map(float, x):
        if not math.isfinite(v):
            continue
        rounded = reference.round_value(v, f, overflow=overflow)
        under += v != 0 and rounded == 0
        subnormal += 0 < abs(rounded) < f.smallest_normal
        over += abs(reference.round_value(v, f, overflow="saturate")) == f.max and abs(v) >= threshold(f)
    assert (got.underflow, got.subnormal, got.overflow) == (under, subnormal, over)


def threshold(f):
    """The least magnitude that rounds, with no bound on the exponent, past the largest value."""
    half = f.max + math.ldexp(1.0, f.emax - f.precision)
    return half if f.max_code % 2 else math.nextafter(half, math.inf)


def test_numbers_are_rounded_as_asked():
    x = np.float32([2.0**-25, 1.5 * 2.0**-25, 3.0])
    assert tally(x, "fp16").underflow == 1
    assert tally(x, "fp16", "toward_zero").underflow == 2
    assert tally(x, "fp16", "toward_positive").underflow == 0


@pytest.mark.parametrize("fmt", [None, "fp16", "e4m3fn"])
def test_tallies_add_up(fmt):
    a, b = mixed(seed=1), mixed(seed=2)[:100]
    whole = tally(np.concatenate([a, b]), fmt)
    both = tally(a, fmt) + tally(b, fmt)
    assert both == whole
    assert both.amax == whole.amax
    assert sum((tally(part, fmt) for part in (a, b)), Tally()) == whole
    assert tally(a, fmt) + Tally() == tally(a, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_lost_at_a_scale_is_what_rounding_loses(fmt):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(2000) * 2.0 ** rng.integers(-40, 3, 2000)).astype(np.float32)
    x = np.concatenate(
        [x, np.float32(2.0) ** np.arange(-40, 3), -(np.float32(2.0) ** np.arange(-40, 3)), [0]]
    )
    counted = tally(x.astype(np.float32), "fp32")
    for exponent in range(-20, 21):
        scaled = (x * 2.0**exponent).astype(np.float64)
        lost = (quantize(scaled, fmt) == 0) & (scaled != 0)
        assert counted.lost(fmt, 2.0**exponent) == lost.sum() / (x != 0).sum()


def test_the_tie_at_half_the_smallest_value_is_lost():
    x = np.float32([2.0**-25, -(2.0**-25), 2.0**-25 * 1.0000001])
    assert tally(x).lost("fp16") == 2 / 3
    assert tally(x).lost("fp16", scale=2) == 0


def test_sqnr_is_that_of_float64():
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    exact = x.astype(np.float64)
    error = exact - quantize(x, "e4m3fn")
    assert abs(tally(x, "e4m3fn").sqnr() - 10 * np.log10((exact**2).sum() / (error**2).sum())) < 1e-9
    assert tally(x).sqnr() == math.inf
    assert tally(np.zeros(3, np.float32), "fp16").sqnr() == math.inf


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_change_neither_counts_nor_sums(monkeypatch, dtype):
    x = np.random.default_rng(0).standard_normal(5 * launch.PARALLEL // 2 + 7).astype(dtype)
    results = []
    for count in (1, 2, 3):
        monkeypatch.setattr(launch, "threads", lambda count=count: count)
        results.append(tally(x, "e4m3fn"))
    for a, b in itertools.pairwise(results):
        assert a == b
        assert a.sums.tolist() == b.sums.tolist()


def test_shares():
    t = tally(np.float32([0, 2.0**-25, 2.0**-24, 1]), "fp16")
    assert (t.share("zero"), t.share("underflow"), t.share("subnormal"), t.share("overflow")) == (
        0.25,
        0.25,
        0.25,
        0,
    )
    assert Tally().share("zero") == 0.0 and Tally().lost("fp16") == 0.0
    assert repr(t) == "Tally(count=4, zero=1, underflow=1, subnormal=1, amax=1)"


@pytest.mark.parametrize("x", [[], [np.nan, np.nan], [np.inf, -np.inf], [0.0, -0.0], np.zeros((0, 8))])
def test_nothing_raises_on_odd_arrays(x):
    x = np.asarray(x, np.float32)
    t = tally(x, "e4m3fn")
    assert t.count == x.size and t.amax == 0.0 and t.histogram.sum() == 0
    assert t.count == t.zero + t.nan + t.positive_infinity + t.negative_infinity


def test_negative_zero_is_no_underflow():
    assert tally(np.float32([-0.0, 0.0]), "fp16").underflow == 0
    assert tally(np.float32([-1e-9]), "fp16").underflow == 1
    assert tally(np.float32([-1e-9]), "e4m3fnuz").underflow == 1


def test_tensors_count_as_arrays_do_and_nothing_is_written():
    x = mixed()
    before = x.copy()
    assert tally(torch.from_numpy(x), "fp16") == tally(x, "fp16")
    assert tally(torch.from_numpy(x)[::3], "fp16") == tally(x[::3], "fp16")
    assert (x.view(np.uint32) == before.view(np.uint32)).all()
    half = torch.from_numpy(x).to(torch.bfloat16)
    assert tally(half) == tally(half.float())


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda t: t.share("zeros"), ValueError, "unknown count 'zeros'; choose from count, zero,"),
        (lambda t: t.lost("fp16", 3.0), ValueError, "scale must be a power of two .*, got 3.0"),
        (lambda t: t.lost("fp16", 0.0), ValueError, "scale must be a power of two"),
        (lambda t: t.lost("e8m0"), ValueError, "e8m0fnu has no zero to lose values to"),
        (
            lambda t: t + tally(np.ones(2, "f4"), "bf16"),
            ValueError,
            "tallies of rounding to binary16 and bfloat16",
        ),
        (lambda t: t + 1, TypeError, "unsupported operand"),
        (lambda t: tally([1.0]), TypeError, "x must be a numpy array or a torch tensor, got list"),
        (lambda t: tally(np.ones(2, "i4")), TypeError, "x must be an array of float32, float64"),
        (lambda t: tally(np.ones(2, "f4"), "fp17"), ValueError, "unknown format 'fp17'"),
        (lambda t: tally(np.ones(2, "f4"), "fp16", "stochastic"), ValueError, "needs key="),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(tally(np.ones(2, np.float32), "fp16"))
