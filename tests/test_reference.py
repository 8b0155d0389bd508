"""fpemu.reference against what others wrote: numpy, ml_dtypes, gfloat, and the rules worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import gfloat
import gfloat.formats
import numpy as np
import pytest
from dtypes import SHORT as DTYPES
from gfloat import Domain, FormatInfo, RoundMode
from hypothesis import given, settings
from hypothesis import strategies as st
from same import differ, same

from fpemu.formats import DLFLOAT16, E4M3, E4M3FN, E8M0FNU, NAMED, OVERFLOWS, ROUNDINGS, Format, as_format
from fpemu.reference import decode, encode, floor_log2, round_value

MODES = {
    "nearest_even": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "toward_positive": RoundMode.TowardPositive,
    "toward_negative": RoundMode.TowardNegative,
    "stochastic": RoundMode.StochasticFastest,  # up if fraction + word * 2**-32 >= 1
}
INF, NAN = math.inf, math.nan

BINARY16_NOSUB = Format("binary16 without subnormals", 5, 11, subnormal=False)
E4M3_FINITE = Format("e4m3 finite", 4, 4, specials="finite")
UE5M3 = Format("ue5m3", 5, 4, signed=False)
UE4M3FN = Format("ue4m3fn", 4, 4, specials="fn", signed=False)
UE4M3_FINITE = Format("ue4m3 finite", 4, 4, specials="finite", signed=False)


def make_info(fmt):
    """gfloat's description of a format, for those that gfloat has no name for."""
    # IEEE: the top binade is infinity and NaNs, 2**(precision - 1) codes.
    high_nans = {"ieee": 2 ** (fmt.precision - 1) - 1, "fn": 1, "fnuz": 0, "finite": 0}[fmt.specials]
    return FormatInfo(
        fmt.name,
        fmt.bits,
        fmt.precision,
        bias=fmt.bias,
        is_signed=fmt.signed,
        domain=Domain.Extended if fmt.specials == "ieee" else Domain.Finite,
        has_nz=fmt.specials != "fnuz" and fmt.signed,
        num_high_nans=high_nans,
        has_subnormals=fmt.subnormal,
        is_twos_complement=False,
    )


INFOS = {
    "binary16": gfloat.formats.format_info_binary16,
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e4m3": make_info(as_format("e4m3")),
    "e3m4": make_info(as_format("e3m4")),
    "e5m2fnuz": make_info(as_format("e5m2fnuz")),
    "e4m3fnuz": make_info(as_format("e4m3fnuz")),
    "e4m3b11fnuz": make_info(as_format("e4m3b11fnuz")),
    "tf32": make_info(as_format("tf32")),
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}


def every_code(name):
    """Codes of a format of up to 16 bits, and what ml_dtypes or numpy make of each, in float64."""
    bits = as_format(name).bits
    codes = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes, codes.view(DTYPES[name]).astype(np.float64)


def grid(name):
    """Some positive values of a format, ascending: every one, or of many both ends and a sample between.

    Above the largest stand the two that would come next.
    """
    if name == "tf32":
        values = np.arange(0x3FC00, dtype=np.uint32)[1:] << np.uint32(13)
        values = values.view(np.float32).astype(np.float64)
    else:
        _, values = every_code(name)
        values = np.unique(values[(values > 0) & np.isfinite(values)])
    step = values[-1] - values[-2] if name != "e8m0fnu" else values[-1]
    values = np.append(values, [values[-1] + step, values[-1] + 2 * step])
    if values.size < 512:
        return values
    sample = np.random.default_rng(0).integers(0, values.size, 512)
    binades = np.flatnonzero(np.frexp(values)[0] == 0.5)
    ends = [*range(64), *range(values.size - 64, values.size)]
    return values[np.unique(np.concatenate([ends, sample, binades, binades[1:] - 1]))]


def around(name, dtype):
    """Where rounding goes wrong: values, ties, both neighbours of each in ``dtype``, specials; both signs."""
    values = grid(name)
    below = np.append(0.0, values[:-1])
    points = np.concatenate([values, (values + below) / 2, (3 * values + below) / 4])
    with np.errstate(over="ignore", under="ignore"):
        points = points.astype(dtype)
        points = np.concatenate([points, np.nextafter(points, dtype(INF)), np.nextafter(points, dtype(0))])
    info = np.finfo(dtype)
    ends = dtype([0, info.smallest_subnormal, info.smallest_normal, info.max, INF])
    points = np.unique(np.concatenate([points, ends]))
    return np.concatenate([-points, points, dtype([NAN])])


def misrounded(x, expected, fmt, *args, word=None, **kwargs):
    """The first few of ``x`` that do not round to ``expected``: (input, rounded, expected)."""
    draws = [None] * len(x) if word is None else word.tolist()
    pairs = zip(x.tolist(), draws, strict=True)
    got = np.array([round_value(v, fmt, *args, word=w, **kwargs) for v, w in pairs])
    wrong = np.flatnonzero(differ(got, expected))[:5]
    return [(float(x[i]).hex(), got[i], expected[i], draws[i]) for i in wrong]


def without_lost_nans(x, name):
    """``x``, its NaNs left out where the format has none: the peers refuse them or write some zero."""
    return x if as_format(name).has_nan else x[~np.isnan(x)]


def cast(x, name):
    """``x`` through numpy's or ml_dtypes' own conversion, back in float64."""
    with np.errstate(all="ignore"):
        return x.astype(DTYPES[name]).astype(np.float64)


def gfloat_round(x, info, rounding, saturate=False, word=None):
    """``x`` rounded by gfloat."""
    with np.errstate(over="ignore"):
        if word is None:
            return gfloat.round_ndarray(info, x, MODES[rounding], saturate)
        return gfloat.round_ndarray(info, x, MODES[rounding], saturate, word, 32)


def test_same_tells_zeros_apart_and_takes_nan_as_nan():
    quiet, negative = np.array([0x7FC0_0000, 0xFFC0_0001], np.uint32).view(np.float32)
    assert same(quiet, negative)
    assert not same(0.0, -0.0)
    assert not same([1.0, NAN], [NAN, 1.0])
    assert not same(np.float32(1), 1.0)
    assert not same([1.0], [1.0, 1.0])


# Nearest even, against numpy and ml_dtypes


@pytest.mark.parametrize("name", DTYPES)
def test_nearest_even_is_the_cast_of_the_dtype_at_ties_and_their_neighbours(name):
    x = around(name, np.float32)
    if name == "e8m0fnu":
        x = x[~(abs(x) < 2.0**-126) | (x == 0)]  # ml_dtypes misplaces float32's subnormals here
    x = without_lost_nans(x, name)
    assert not misrounded(x, cast(x, name), name)


@pytest.mark.parametrize("name", DTYPES)
def test_nearest_even_is_the_cast_of_the_dtype_on_every_float16(name):
    _, x = every_code("binary16")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = without_lost_nans(x.astype(np.float32), name)
    assert not misrounded(x, cast(x, name), name)


@pytest.mark.parametrize("name, dtype", [("binary16", np.float16), ("binary32", np.float32)])
def test_float64_rounds_once_as_in_numpy(name, dtype):
    rng = np.random.default_rng(0)
    grain = as_format(name).eps
    ties = (1 + grain * (rng.integers(0, 1 / grain, 500) + 0.5)) * 2.0 ** rng.integers(-30, 17, 500)
    x = np.concatenate([ties * (1 + k * 2.0**-40) for k in (-1, 0, 1)] + [around("binary16", np.float64)])
    with np.errstate(all="ignore"):
        expected = x.astype(dtype).astype(np.float64)
    assert not misrounded(x, expected, name)


# The other modes, against gfloat


@pytest.mark.parametrize("saturate", [False, True], ids=["ieee", "saturate"])
@pytest.mark.parametrize("rounding", [mode for mode in MODES if mode != "stochastic"])
@pytest.mark.parametrize("name", INFOS)
def test_rounding_is_that_of_gfloat(name, rounding, saturate):
    x = without_lost_nans(around(name, np.float64), name)
    # gfloat refuses overflow without saturation where there is nothing beyond the largest value.
    expected = gfloat_round(x, INFOS[name], rounding, saturate or not as_format(name).has_nan)
    assert not misrounded(x, expected, name, rounding, overflow="saturate" if saturate else "ieee")


@pytest.mark.parametrize("name", INFOS)
def test_stochastic_is_that_of_gfloat_with_the_same_word(name):
    x = without_lost_nans(around(name, np.float32).astype(np.float64), name)
    rng = np.random.default_rng(0)
    ends = [0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 3 * 2**30 - 1, 3 * 2**30, 2**32 - 1]
    word = np.where(rng.random(x.size) < 0.5, rng.choice(ends, x.size), rng.integers(0, 2**32, x.size))
    expected = gfloat_round(x, INFOS[name], "stochastic", not as_format(name).has_nan, word)
    assert not misrounded(x, expected, name, "stochastic", word=word)


@pytest.mark.parametrize("rounding", ["toward_zero", "toward_positive", "toward_negative"])
def test_directed_rounding_in_e8m0_is_that_of_gfloat(rounding):
    x = around("e8m0fnu", np.float64)
    x = x[x >= 2.0**-127]  # below, gfloat leaves the format
    expected = gfloat_round(x, gfloat.formats.format_info_ocp_e8m0, rounding)
    assert not misrounded(x, expected, "e8m0fnu", rounding)


@st.composite
def formats(draw):
    """Any format with subnormals and a fraction, inside binary64's range with room to spare."""
    specials = draw(st.sampled_from(["ieee", "fn", "fnuz", "finite"]))
    exponent_bits, precision = draw(st.integers(2, 8)), draw(st.integers(2, 24))
    return Format("drawn", exponent_bits, precision, draw(st.integers(-40, 200)), specials)


@st.composite
def inputs(draw, fmt):
    """A float64 on or near a value of ``fmt``, a tie, or an end of the range."""
    code = draw(st.one_of(st.integers(0, fmt.max_code), st.integers(max(0, fmt.max_code - 2), fmt.max_code)))
    value, quantum = fmt.magnitude(code), fmt.magnitude(min(code + 1, fmt.max_code)) - fmt.magnitude(code)
    quantum = quantum or fmt.max - fmt.magnitude(fmt.max_code - 1)
    x = value + quantum * draw(st.sampled_from([0, 0.25, 0.5, 0.75, 1, 1.5]))
    for _ in range(draw(st.integers(0, 2))):
        x = math.nextafter(x, draw(st.sampled_from([0.0, INF])))
    return draw(st.sampled_from([x, -x]))


@settings(max_examples=500, deadline=None)
@given(data=st.data(), fmt=formats(), rounding=st.sampled_from([*MODES]), word=st.integers(0, 2**32 - 1))
def test_rounding_to_any_format_is_that_of_gfloat(data, fmt, rounding, word):
    x = data.draw(inputs(fmt))
    draw = word if rounding == "stochastic" else None
    for overflow in ("ieee", "saturate"):
        saturate = overflow == "saturate" or not fmt.has_nan
        words = np.array([word]) if draw is not None else None
        expected = gfloat_round(np.array([x]), make_info(fmt), rounding, saturate, words)
        assert same([round_value(x, fmt, rounding, overflow=overflow, word=draw)], expected)


# To odd: truncate, and if that was inexact take the neighbour with the odd code (Boldo and Melquiond, 2008)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "e8m0fnu"])
def test_to_odd_takes_the_neighbour_with_the_odd_code(name):
    x = around(name, np.float64)
    codes, values = every_code(name)
    odd = set(abs(values[codes % 2 == 1]).tolist())
    x = x[abs(x) <= as_format(name).max]
    down = [round_value(v, name, "toward_negative") for v in x.tolist()]
    up = [round_value(v, name, "toward_positive") for v in x.tolist()]
    expected = np.array([d if d == u or abs(d) in odd else u for d, u in zip(down, up, strict=True)])
    assert not misrounded(x, expected, name, "to_odd")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("x", [65504.5, 65519.99, 65520, 65536, 1e300])
def test_to_odd_never_overflows(x, sign):
    assert round_value(sign * x, "fp16", "to_odd") == sign * 65504


def test_rounding_by_way_of_odd_is_rounding_once():
    _, x = every_code("binary16")
    x = x[np.isfinite(x)] * (1 + 2**-30)
    wide = Format("two bits more than e4m3 needs", 6, 6)
    for v in x[::7].tolist():
        assert same(round_value(round_value(v, wide, "to_odd"), E4M3), round_value(v, E4M3))


# Codes


@pytest.mark.parametrize("name", DTYPES)
def test_decode_is_that_of_the_dtype(name):
    codes, expected = every_code(name)
    assert same([decode(code, name) for code in codes.tolist()], expected)


@pytest.mark.parametrize("name, step", [(name, 1 if as_format(name).bits < 16 else 7) for name in INFOS])
def test_decode_is_that_of_gfloat(name, step):
    fmt = as_format(name)
    codes = range(0, 2**fmt.bits, step if fmt.bits <= 16 else 61)
    expected = [float(gfloat.decode_float(INFOS[name], code).fval) for code in codes]
    assert same([decode(code, fmt) for code in codes], expected)


def test_decode_of_tf32_is_that_of_float32_without_thirteen_bits():
    codes = np.arange(2**19, dtype=np.uint32)[::11]
    with np.errstate(invalid="ignore"):
        expected = (codes << np.uint32(13)).view(np.float32).astype(np.float64)
    assert same([decode(code, "tf32") for code in codes.tolist()], expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decode_and_encode_are_views_of_numpy(dtype):
    bits = np.dtype(dtype).itemsize * 8
    codes = np.random.default_rng(0).integers(0, 2**bits, 4000, np.dtype(f"u{bits // 8}"))
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    name = np.dtype(dtype).name
    assert same([decode(code, name) for code in codes.tolist()], values)
    finite = np.isfinite(values)
    assert [encode(v, name) for v in values[finite].tolist()] == codes[finite].tolist()


def test_decode_of_dlfloat_is_that_of_gfloat_but_for_the_lowest_binade():
    info = make_info(DLFLOAT16)
    for code in range(0, 2**16, 5):
        magnitude = code & 0x7FFF
        if magnitude < 2**9:  # normal values with IBM, zero here
            expected = -0.0 if code > magnitude else 0.0
        else:
            expected = float(gfloat.decode_float(info, code).fval)
        assert same(decode(code, DLFLOAT16), expected)


def canonical(code, fmt):
    """The code that encode gives for the value of ``code``: without subnormals several mean zero."""
    return code & fmt.sign_code if decode(code, fmt) == 0 else code


SHORT = [fmt for fmt in NAMED if fmt.bits <= 16]


@pytest.mark.parametrize("fmt", [*SHORT, UE5M3, UE4M3_FINITE, E4M3_FINITE, BINARY16_NOSUB], ids=str)
def test_encode_undoes_decode_on_every_code(fmt):
    numbers = [code for code in range(2**fmt.bits) if not math.isnan(decode(code, fmt))]
    back = [encode(decode(code, fmt), fmt) for code in numbers]
    assert back == [canonical(code, fmt) for code in numbers]


@pytest.mark.parametrize("name", DTYPES)
def test_encode_is_that_of_the_dtype(name):
    x = around(name, np.float32)
    if name == "e8m0fnu":
        x = x[x > 2.0**-126]
    with np.errstate(all="ignore"):
        written = x.astype(DTYPES[name])
    values, codes = written.astype(np.float64), written.view(f"u{written.itemsize}")
    number = ~np.isnan(values)
    assert [encode(v, name) for v in values[number].tolist()] == codes[number].tolist()


# ml_dtypes writes +0.0 for a negative NaN where there is no NaN, fpemu -0.0 for either.
@pytest.mark.parametrize(
    "name, sign",
    [(name, sign) for name in DTYPES for sign in (1.0, -1.0) if sign > 0 or as_format(name).has_nan],
)
def test_encode_of_nan_is_that_of_the_dtype(name, sign):
    with np.errstate(all="ignore"):
        written = np.float32([math.copysign(NAN, sign)]).astype(DTYPES[name])
    assert encode(math.copysign(NAN, sign), name) == int(written.view(f"u{written.itemsize}")[0])


@pytest.mark.parametrize("fmt, code", [("e2m1", 0x8), ("e3m2", 0x20), (E4M3_FINITE, 0x80), (UE4M3_FINITE, 0)])
def test_encode_of_nan_is_negative_zero_where_there_is_no_nan(fmt, code):
    assert encode(NAN, fmt) == encode(-NAN, fmt) == code


@pytest.mark.parametrize(
    "value, fmt",
    [
        (1 + 2**-11, "fp16"),  # between two values
        (2**-25, "fp16"),  # below the smallest
        (65536.0, "fp16"),  # above the largest
        (INF, "e4m3fn"),
        (-INF, "e2m1"),
        (480.0, "e4m3fn"),  # would be NaN's code
        (-0.0, "e4m3fnuz"),  # would be NaN's code
        (0.0, "e8m0"),
        (-1.0, "e8m0"),
        (-1.0, UE5M3),
        (2**-15, BINARY16_NOSUB),
    ],
)
def test_encode_refuses_what_is_no_value_of_the_format(value, fmt):
    with pytest.raises(ValueError, match=f"is not a value of {as_format(fmt).name}; round it first"):
        encode(value, fmt)


# The rules, each worked out by hand

TABLE = [
    # fp16, around its ends
    (65519.99, "fp16", "nearest_even", 65504.0),
    (65520, "fp16", "nearest_even", INF),  # tie with 65536, whose significand is even
    (Fraction(65520) - Fraction(1, 2**200), "fp16", "nearest_even", 65504.0),
    (-65520, "fp16", "nearest_even", -INF),
    (65520, "fp16", "nearest_away", INF),
    (2**-25, "fp16", "nearest_even", 0.0),  # tie with 2**-24, code 1
    (-(2**-25), "fp16", "nearest_even", -0.0),
    (2**-25, "fp16", "nearest_away", 2**-24),
    (math.nextafter(2**-25, 1), "fp16", "nearest_even", 2**-24),
    (1 + 2**-11 + 2**-40, "fp16", "nearest_even", 1.0009765625),  # a tie, once it has been a float32
    (3 * 2**-25, "fp16", "nearest_even", 2**-23),
    (2**-14 - 2**-25, "fp16", "nearest_even", 2**-14),  # carries into the smallest normal value
    # Directed modes go to infinity on their own side only
    (1e300, "fp16", "toward_zero", 65504.0),
    (-1e300, "fp16", "toward_zero", -65504.0),
    (65504.01, "fp16", "toward_positive", INF),
    (-1e300, "fp16", "toward_positive", -65504.0),
    (-65504.01, "fp16", "toward_negative", -INF),
    (1e300, "fp16", "toward_negative", 65504.0),
    (1e-300, "fp16", "toward_positive", 2**-24),
    (-1e-300, "fp16", "toward_positive", -0.0),
    (-1e-300, "fp16", "toward_negative", -(2**-24)),
    (1e-300, "fp16", "to_odd", 2**-24),
    # Toward zero never overflows, in formats without infinity either
    (1e300, "e4m3fn", "toward_zero", 448.0),
    (-1e300, "e4m3fnuz", "toward_zero", -240.0),
    (1e300, "e8m0", "toward_zero", 2.0**127),
    # Beyond the largest value: infinity, NaN, or that value
    (464, "e4m3fn", "nearest_even", 448.0),  # tie with 480, whose significand is odd
    (464.01, "e4m3fn", "nearest_even", NAN),
    (-480, "e4m3fn", "nearest_even", NAN),
    (248, "e4m3", "nearest_even", INF),  # tie with 256
    (247.9, "e4m3", "nearest_even", 240.0),
    (61440, "e5m2", "nearest_even", INF),
    (248, "e4m3fnuz", "nearest_even", NAN),
    (1e300, "e2m1", "nearest_even", 6.0),
    (-1e300, "e3m2", "toward_negative", -28.0),
    (480, E4M3_FINITE, "nearest_even", 480.0),
    (1e300, E4M3_FINITE, "nearest_even", 480.0),
    (INF, E4M3_FINITE, "nearest_even", 480.0),
    # Precision 1: ties to the larger magnitude
    (1.5, "e8m0", "nearest_even", 2.0),
    (3, "e8m0", "nearest_even", 4.0),
    (math.nextafter(3, 0), "e8m0", "nearest_even", 2.0),
    (1.5 * 2.0**-127, "e8m0", "nearest_even", 2.0**-126),
    (1.5 * 2.0**127, "e8m0", "nearest_even", NAN),
    (-1.0, "e8m0", "nearest_even", NAN),
    (-0.0, "e8m0", "nearest_even", NAN),
    (1e-300, "e8m0", "nearest_even", 2.0**-127),
    (1e-300, "e8m0", "toward_zero", 2.0**-127),
    (1e-300, "e8m0", "toward_negative", 2.0**-127),
    (1.5, "e8m0", "to_odd", 1.0),
    # Unsigned formats
    (-1e-300, UE5M3, "nearest_even", NAN),
    (-INF, UE5M3, "nearest_even", NAN),
    (INF, UE5M3, "nearest_even", INF),
    (-1.0, UE4M3FN, "toward_positive", NAN),
    (450, UE4M3FN, "nearest_even", 448.0),
    (465, UE4M3FN, "nearest_even", NAN),
    (-1.0, UE4M3_FINITE, "nearest_even", 0.0),
    (-INF, UE4M3_FINITE, "nearest_even", 0.0),
    (-0.0, UE5M3, "nearest_even", 0.0),
    # Without subnormals the grid below the smallest normal value N = 2**-14 is {0, N}
    (2**-15, BINARY16_NOSUB, "nearest_even", 0.0),
    (-(2**-15), BINARY16_NOSUB, "nearest_even", -0.0),
    (math.nextafter(2**-15, 1), BINARY16_NOSUB, "nearest_even", 2**-14),
    (2**-15, BINARY16_NOSUB, "nearest_away", 2**-14),
    (2**-14 - 2**-60, BINARY16_NOSUB, "toward_zero", 0.0),
    (2**-60, BINARY16_NOSUB, "toward_positive", 2**-14),
    (-(2**-60), BINARY16_NOSUB, "toward_negative", -(2**-14)),
    (2**-14 * (1 + 2**-11), BINARY16_NOSUB, "nearest_even", 2**-14),
    (2.0**-31, "dlfloat16", "nearest_even", 0.0),
    (1.5 * 2.0**-31, "dlfloat16", "nearest_even", 2.0**-30),
    # Signed zeros
    (-0.0, "fp16", "nearest_even", -0.0),
    (0.0, "fp16", "toward_negative", 0.0),
    (-0.0, "e2m1", "nearest_even", -0.0),
    (-0.0, "e4m3fnuz", "nearest_even", 0.0),
    (-1e-300, "e5m2fnuz", "nearest_even", 0.0),
    (-1e-300, "e5m2fnuz", "toward_negative", -(2**-17)),
    # Inputs wider than any float
    (2**64 + 2**53 + 1, "binary64", "nearest_even", 2.0**64 + 2**53),
    (0x102FFFF, "bf16", "nearest_even", 16908288.0),
    (Fraction(1, 10), "fp16", "nearest_even", 0.0999755859375),
    (10**400, "fp16", "nearest_even", INF),
    (Fraction(-1, 10**400), "binary64", "toward_negative", -5e-324),
    (Fraction(1, 2**1075), "binary64", "nearest_even", 0.0),
]


@pytest.mark.parametrize(
    "x, fmt, rounding, expected",
    [pytest.param(*row, id=f"{i}-{as_format(row[1]).name}-{row[2]}") for i, row in enumerate(TABLE)],
)
def test_rule(x, fmt, rounding, expected):
    assert same(round_value(x, fmt, rounding), float(expected))


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", [*NAMED, BINARY16_NOSUB, UE5M3, UE4M3_FINITE], ids=str)
def test_nan_stays_nan_and_zero_stays_zero(fmt, rounding, overflow):
    def rounded(x):
        return round_value(x, fmt, rounding, overflow=overflow, word=2**32 - 1)

    assert math.isnan(rounded(NAN)) and math.isnan(rounded(-NAN))
    if fmt.has_zero:
        assert same(rounded(0.0), 0.0)
        assert same(rounded(-0.0), -0.0 if fmt.has_negative_zero else 0.0)
    else:
        assert same(rounded(0.0), NAN if overflow == "ieee" else 2.0**-127)


@pytest.mark.parametrize(
    "x, fmt, ieee, saturate, propagate",
    [
        (1e300, "fp16", INF, 65504.0, 65504.0),
        (-1e300, "fp16", -INF, -65504.0, -65504.0),
        (INF, "fp16", INF, 65504.0, INF),
        (-INF, "fp16", -INF, -65504.0, -INF),
        (1e300, "e4m3fn", NAN, 448.0, 448.0),
        (INF, "e4m3fn", NAN, 448.0, NAN),
        (-INF, "e4m3fnuz", NAN, -240.0, NAN),
        (1e300, "e2m1", 6.0, 6.0, 6.0),
        (-INF, "e2m1", -6.0, -6.0, -6.0),
        (1e300, "e8m0", NAN, 2.0**127, 2.0**127),
        (INF, "e8m0", NAN, 2.0**127, NAN),
        (0.0, "e8m0", NAN, 2.0**-127, 2.0**-127),
        (-1.0, "e8m0", NAN, NAN, NAN),
    ],
)
def test_overflow_policy(x, fmt, ieee, saturate, propagate):
    got = [round_value(x, fmt, overflow=overflow) for overflow in ("ieee", "saturate", "propagate")]
    assert same(got, [ieee, saturate, propagate])


@pytest.mark.parametrize("rounding", [rounding for rounding in ROUNDINGS if rounding != "stochastic"])
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_infinity_does_not_round(rounding, overflow):
    expected = 65504.0 if overflow == "saturate" else INF
    assert round_value(INF, "fp16", rounding, overflow=overflow) == expected
    assert round_value(-INF, "fp16", rounding, overflow=overflow) == -expected


@pytest.mark.parametrize("name", INFOS)
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_positive", "to_odd"])
def test_propagate_saturates_finite_values_and_keeps_infinity(name, rounding):
    x = around(name, np.float32)[::5]
    for v in [*x.tolist(), INF, -INF]:
        other = "ieee" if math.isinf(v) else "saturate"
        got = round_value(v, name, rounding, overflow="propagate")
        assert same(got, round_value(v, name, rounding, overflow=other))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", [fmt for fmt in NAMED if fmt.bits <= 8], ids=str)
def test_every_value_rounds_to_itself(fmt, rounding):
    x = fmt.values()
    for word in (0, 2**32 - 1):
        assert not misrounded(x, x, fmt, rounding, word=np.full(x.size, word))


@pytest.mark.parametrize("rounding", [rounding for rounding in ROUNDINGS if rounding != "stochastic"])
def test_without_subnormals_normal_values_round_as_with_them(rounding):
    twin = as_format("binary16")
    x = around("binary16", np.float64)
    x = x[abs(x) >= twin.smallest_normal]
    expected = np.array([round_value(v, twin, rounding) for v in x.tolist()])
    assert not misrounded(x, expected, BINARY16_NOSUB, rounding)


@pytest.mark.parametrize("rounding", [rounding for rounding in ROUNDINGS if rounding != "stochastic"])
def test_unsigned_formats_round_positive_values_as_their_signed_twins(rounding):
    x = around("e4m3fn", np.float64)
    x = x[~np.signbit(x)]
    expected = np.array([round_value(v, E4M3FN, rounding) for v in x.tolist()])
    assert not misrounded(x, expected, UE4M3FN, rounding)


# Stochastic: the floor(p * 2**32) highest words go up


@pytest.mark.parametrize(
    "x, fmt, down, up, p",
    [
        (1 + 2**-12, "fp16", 1.0, 1 + 2**-10, Fraction(1, 4)),
        (-(1 + 3 * 2**-12), "fp16", -1.0, -(1 + 2**-10), Fraction(3, 4)),
        (1 + 2**-40, "fp16", 1.0, 1 + 2**-10, Fraction(1, 2**30)),
        (1 + 2**-42, "fp16", 1.0, 1 + 2**-10, Fraction(1, 2**32)),
        (1 + 2**-43, "fp16", 1.0, 1 + 2**-10, 0),  # half of a word's weight: never
        (Fraction(3073, 3072), "fp16", 1.0, 1 + 2**-10, Fraction(1, 3)),  # 1 + 2**-10 / 3
        (2**-25, "fp16", 0.0, 2**-24, Fraction(1, 2)),
        (-(2**-26), "fp16", -0.0, -(2**-24), Fraction(1, 4)),
        (2**-57, "fp16", 0.0, 2**-24, 0),
        (2.0**-149, "fp16", 0.0, 2**-24, 0),
        (65504 + 8, "fp16", 65504.0, INF, Fraction(1, 4)),  # as if 65536 existed
        (65536, "fp16", INF, INF, 0),
        (440 + 24, "e4m3fn", 448.0, NAN, Fraction(1, 2)),
        (2**-16, BINARY16_NOSUB, 0.0, 2**-14, Fraction(1, 4)),
        (-(2**-19), "e5m2fnuz", 0.0, -(2**-17), Fraction(1, 4)),
        (5, "e8m0", 4.0, 8.0, Fraction(1, 4)),
        (2.0**-128, "e8m0", 2.0**-127, 2.0**-127, 0),
        (7, "e2m1", 6.0, 6.0, 0),
    ],
)
def test_stochastic_goes_up_from_its_threshold_on(x, fmt, down, up, p):
    threshold = 2**32 - math.floor(p * 2**32)
    for word in {0, 1, 2**31, threshold - 1, threshold, 2**32 - 1} - {2**32}:
        got = round_value(x, fmt, "stochastic", word=word)
        assert same(got, float(up if word >= threshold else down)), f"word {word:#x}"


def test_stochastic_overflow_saturates_where_asked():
    for overflow in ("saturate", "propagate"):
        assert round_value(65504 + 8, "fp16", "stochastic", overflow=overflow, word=2**32 - 1) == 65504


def test_stochastic_needs_a_word():
    with pytest.raises(ValueError, match="rounding='stochastic' needs word=, a 32-bit random integer"):
        round_value(0.1, "fp16", "stochastic")


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="unknown rounding 'nearest'"):
        round_value(0.1, "fp16", "nearest")


@pytest.mark.parametrize("x", [1, 3, Fraction(1, 3), Fraction(2, 3), 2**70, 2**70 - 1, Fraction(1, 2**1100)])
def test_floor_log2_is_the_binade(x):
    exponent = floor_log2(Fraction(x))
    assert Fraction(2) ** exponent <= x < Fraction(2) ** (exponent + 1)


@pytest.mark.parametrize("fmt", [E4M3, E8M0FNU], ids=str)
def test_a_name_does_for_a_format(fmt):
    assert same(round_value(1.3, fmt.name), round_value(1.3, fmt))
    assert same(decode(3, fmt.name), decode(3, fmt))
    assert encode(1.0, fmt.name) == encode(1.0, fmt)
