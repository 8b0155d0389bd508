"""tally against plain loops, the reference and numpy: counts are exact."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fpemu import Format, Tally, as_format, quantize, reference, tally
from fpemu.formats import OVERFLOWS, ROUNDINGS
from fpemu.kernels import launch

FORMATS = ["fp16", "bf16", "e5m2", "e4m3fn", "e4m3", "e3m2", "e2m1", "e4m3fnuz", "dlfloat16", "tf32"]
DTYPES = ["float32", "float64", "float16"]
UNSIGNED = Format("unsigned", 4, 4, specials="fn", signed=False)
UNSIGNED_FINITE = Format("unsigned, all finite", 4, 4, specials="finite", signed=False)
CUSTOM = [
    Format("binary16 without subnormals", 5, 11, subnormal=False),
    Format("all finite", 4, 4, specials="finite"),
    Format("powers of two", 5, 1, specials="fn"),
    Format("biased down", 4, 3, bias=100),
    as_format("binary8p4se"),
    as_format("binary8p3sf"),
]


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


@pytest.mark.parametrize("rounding", [mode for mode in ROUNDINGS if mode != "stochastic"])
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("fmt", [*CUSTOM, "fp16", "e4m3fnuz", "dlfloat16"], ids=str)
def test_zeros_and_subnormals_are_those_of_each_rounding(fmt, rounding, overflow):
    x, f = mixed(count=200, seed=3), as_format(fmt)
    rounded = [abs(reference.round_value(v, f, rounding, overflow=overflow)) for v in x.tolist()]
    got = tally(x, fmt, rounding, overflow=overflow)
    assert got.underflow == sum(v != 0 and r == 0 for v, r in zip(x.tolist(), rounded, strict=True))
    assert got.subnormal == sum(0 < r < f.smallest_normal for r in rounded)


@pytest.mark.parametrize("fmt", [*FORMATS, *CUSTOM, "e3m4", "e2m3", "e5m2fnuz"], ids=str)
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_overflow_starts_where_a_format_with_a_wider_exponent_passes_the_largest_value(fmt, overflow):
    f = as_format(fmt)
    specials = "p3109f" if f.ties_to_even_code else "ieee" if f.precision > 1 else "fn"
    wider = Format("wider", 10, f.precision, 500, specials)  # same values, and more above the largest
    tie = f.max + math.ldexp(1.0, f.emax - f.precision)
    for v in (f.max, math.nextafter(tie, 0), tie, math.nextafter(tie, math.inf), 2 * f.max):
        past = reference.round_value(v, wider) > f.max
        assert tally(np.array([v, -v]), fmt, overflow=overflow).overflow == 2 * past


def test_a_negative_value_of_an_unsigned_format_is_no_overflow():
    # "Finite values that round to nearest, the exponent unbounded, past the format's largest": -1 does not.
    assert tally(np.float32([-1.0]), UNSIGNED).overflow == 0


def test_zero_in_a_format_without_zero_is_no_overflow():
    assert tally(np.float32([0.0, -0.0]), "e8m0").overflow == 0


def test_a_subnormal_of_float32_is_a_normal_value_of_binary64():
    assert tally(np.float32([1e-40]), "fp64").subnormal == 0


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


@pytest.mark.parametrize("fmt", [*FORMATS, *CUSTOM], ids=str)
@pytest.mark.parametrize("exponent", [-1074, -1000, -149, -60, -1, 0, 1, 15, 90, 125, 900, 1023])
def test_what_is_lost_is_what_the_reference_loses_at_any_scale(fmt, exponent):
    f, scale = as_format(fmt), 2.0**exponent
    tie = math.frexp(f.smallest_subnormal)[1] - 2 - exponent
    near = [2.0**e for e in range(tie - 2, tie + 3) if -149 <= e <= 127]
    x = np.float32([*near, *(v * 1.5 for v in near if v < 2.0**127), -1.0, 2.0**-149, 2.0**127, 1.3])
    x = np.concatenate([x, np.nextafter(x, np.float32(0))])
    x = x[x != 0]
    lost = sum(reference.round_value(Fraction(float(v)) * Fraction(scale), f) == 0 for v in x)
    assert tally(x).lost(fmt, scale) == lost / x.size


@pytest.mark.parametrize("fmt, x", [(UNSIGNED_FINITE, [-1.0, 1.0]), (UNSIGNED, [-(2.0**-40), 1.0])], ids=str)
def test_what_an_unsigned_format_loses_is_exact_or_refused(fmt, x):
    # A negative value becomes zero without NaN, and NaN with it, whatever its size.
    x = np.float32(x)
    counted = tally(x)
    try:
        got = counted.lost(fmt)
    except ValueError:
        return
    assert got == ((quantize(x, fmt) == 0) & (x != 0)).sum() / (x != 0).sum()


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


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1", "bf16"])
def test_sums_are_exact_where_float64_is(fmt):
    # Sixteenths: squares are multiples of 2**-8, and no sum of 4000 of them passes 2**53 of those.
    x = (np.random.default_rng(0).integers(-96, 97, 4000) / 16).astype(np.float32)
    exact = x.astype(np.float64)
    squares, errors = (exact**2).sum(), ((exact - quantize(x, fmt)) ** 2).sum()
    got = tally(x, fmt)
    assert got.sums.tolist() == [abs(exact).max(), squares, errors]
    assert got.sqnr() == (10 * math.log10(squares / errors) if errors else math.inf)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("fmt", [None, "e4m3fn"])
def test_threads_of_torch_change_neither_counts_nor_sums(dtype, fmt):
    x = np.random.default_rng(1).standard_normal(2**19 + 12345).astype(dtype)
    x[::1001] = np.nan
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            results.append(tally(x, fmt))
    finally:
        torch.set_num_threads(before)
    assert all(r.counts.tolist() == results[0].counts.tolist() for r in results)
    assert all(r.sums.tolist() == results[0].sums.tolist() for r in results)
    halves = tally(x[: 2**18], fmt) + tally(x[2**18 :], fmt)
    assert halves == results[0] and halves.amax == results[0].amax


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


SYMMETRIC = ["nearest_even", "nearest_away", "toward_zero", "to_odd"]


@pytest.mark.parametrize("rounding", SYMMETRIC)
@pytest.mark.parametrize("fmt", [*FORMATS, *CUSTOM], ids=str)
def test_what_other_roundings_lose_is_what_they_round_to_zero(fmt, rounding):
    x = mixed("float64", seed=7, count=2000)
    x = np.concatenate([x[(np.abs(x) < 1e30) & (np.abs(x) > 1e-300)], 2.0 ** np.arange(-60, 20)])
    counted = tally(x)
    for exponent in (-7, 0, 1, 12):
        scaled = x * 2.0**exponent
        lost = (quantize(scaled, fmt, rounding) == 0) & (x != 0)
        assert counted.vanishing(fmt, 2.0**exponent, rounding) == lost.sum()
        assert counted.lost(fmt, 2.0**exponent, rounding) == lost.sum() / counted.histogram.sum()


@pytest.mark.parametrize("fmt", [*FORMATS, *CUSTOM, "fp32"], ids=str)
@pytest.mark.parametrize("exponent", [-9, 0, 5, 60])
def test_overflow_at_a_scale_lies_within_its_bounds(fmt, exponent):
    f = as_format(fmt)
    rng = np.random.default_rng(2)
    x = np.ldexp(rng.standard_normal(3000), rng.integers(f.emax - 4, f.emax + 3, 3000) - exponent)
    limit = f.max + math.ldexp(1.0, f.emax - f.precision)
    for part in (x, x[np.abs(x) * 2.0**exponent < limit * 0.999], np.array([limit * 1.01 * 2.0**-exponent])):
        over = tally(part * 2.0**exponent, fmt).overflow
        low, high = tally(part).overflowing(fmt, 2.0**exponent)
        assert low <= over <= high
        assert (low > 0) == (over > 0)


def test_overflow_is_exact_where_the_largest_value_stays_below_the_limit():
    assert tally(np.float32([65519, 1.0])).overflowing("fp16") == (0, 0)
    assert tally(np.float32([65520, 32768.0, 1.0])).overflowing("fp16") == (1, 1)
    assert tally(np.float32([40000, 65536.0])).overflowing("fp16") == (1, 2)
    assert tally(np.array([1e308])).overflowing("fp64") == (0, 0)
    assert tally(np.array([1e308])).overflowing("fp64", 2.0) == (1, 1)


def test_quantiles_are_those_of_numpy_to_a_binade():
    x = mixed(seed=11)
    magnitudes = np.sort(np.abs(x[np.isfinite(x) & (x != 0)]).astype(float))
    for share in (0, 0.01, 0.25, 0.5, 0.9, 1):
        wanted = magnitudes[min(int(share * magnitudes.size), magnitudes.size - 1)]
        low = tally(x).quantile(share)
        assert low <= wanted < 2 * low
    assert Tally().quantile(0.5) == 0.0


def test_range_and_root_mean_square():
    x = np.float32([0, 2**-10, -1.5, np.inf, np.nan, 3])
    t = tally(x)
    assert t.dynamic_range() == 12  # binades -10 to 1
    assert t.rms() == math.sqrt((2**-20 + 1.5**2 + 9) / 4)
    assert (Tally().dynamic_range(), Tally().rms()) == (0, 0.0)


@pytest.mark.parametrize("exponent", [-30, -1, 0, 8])
def test_a_scaled_tally_is_that_of_the_scaled_values(exponent):
    x = mixed(seed=4)
    got, wanted = tally(x, "fp16").scaled(2.0**exponent), tally(x.astype(float) * 2.0**exponent)
    assert got == wanted
    assert got.amax == wanted.amax


def test_a_scale_that_leaves_float64_is_refused():
    with pytest.raises(ValueError, match=r"at scale 4\.0 values leave the range of float64"):
        tally(np.array([1e308])).scaled(4.0)


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


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, 0.1, math.inf, math.nan])
def test_a_scale_that_is_no_power_of_two_is_refused(scale):
    with pytest.raises(
        ValueError, match=f"scale must be a power of two of float64, for exact counts, got {scale}"
    ):
        tally(np.float32([1.0])).lost("fp16", scale)


@pytest.mark.parametrize(
    "x, message",
    [
        (np.ma.zeros(2, "f4"), "got MaskedArray of float32"),
        (np.zeros(2, "c8"), "got ndarray of complex64"),
        (torch.eye(2).to_sparse(), "x must be a dense tensor, got layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.int64), "got torch.int64; cast first"),
    ],
    ids=["masked", "complex", "sparse", "int"],
)
@pytest.mark.parametrize("fmt", [None, "fp16"])
def test_arrays_of_another_kind_are_refused(x, message, fmt):
    with pytest.raises(TypeError, match=message):
        tally(x, fmt)


def test_a_read_only_array_and_a_tensor_with_gradient_are_counted_and_left_alone():
    x = mixed(seed=5)
    before = x.tobytes()
    x.setflags(write=False)
    whole = tally(x, "fp16")
    tensor = torch.from_numpy(x.copy()).requires_grad_()
    assert tally(tensor, "fp16") == whole
    assert tensor._version == 0 and tensor.detach().numpy().tobytes() == x.tobytes() == before


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
        (lambda t: t.lost("fp16", 2**1024), ValueError, "scale must be a power of two of float64"),
        (
            lambda t: t.lost("fp16", 1.0, "stochastic"),
            ValueError,
            "rounding must be one of nearest_even, .*got 'sto",
        ),
        (lambda t: t.overflowing("fp16", 3.0), ValueError, "scale must be a power of two"),
        (lambda t: t.quantile(1.5), ValueError, "share must be from 0 to 1, got 1.5"),
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


@pytest.mark.parametrize("x", [1e-200, 1.1e200])
def test_sqnr_is_nan_where_float64_does_not_hold_the_squares(x):
    assert math.isnan(tally(np.array([x]), "e11m30").sqnr())


def test_where_all_is_lost_sqnr_is_0_db():
    assert tally(np.float32([1e-40, -1e-42]), "fp16").sqnr() == 0.0
