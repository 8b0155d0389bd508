from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from dtypes import DTYPES
from gfloat.formats import format_info_p3109
from same import same

from fpemu import reference
from fpemu.formats import (
    ALIASES,
    BFLOAT16,
    BINARY16,
    BINARY32,
    BINARY64,
    DLFLOAT16,
    E2M1,
    E4M3,
    E4M3FN,
    E8M0FNU,
    NAMED,
    TF32,
    Format,
    as_format,
)

# All that have no dtype: their limits are written out below.
WITHOUT_DTYPE = {"tf32", "dlfloat16"}
SHORT = [name for name in DTYPES if as_format(name).bits <= 16]


def every_code(name):
    """Codes of a format of up to 16 bits, and what ml_dtypes or numpy make of each, in float64."""
    bits = as_format(name).bits
    codes = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes, codes.view(DTYPES[name]).astype(np.float64)


def test_every_named_format_is_checked_here():
    assert {fmt.name for fmt in NAMED} == DTYPES.keys() | WITHOUT_DTYPE == ALIASES.keys()


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_those_of_ml_dtypes(name):
    fmt, info = as_format(name), ml_dtypes.finfo(DTYPES[name])
    assert fmt.bits == info.bits
    for limit in ("max", "smallest_normal", "smallest_subnormal", "eps"):
        assert same(getattr(fmt, limit), float(getattr(info, limit))), limit
    assert fmt.emax == info.maxexp - 1
    assert fmt.emin == info.minexp
    assert fmt.precision == info.nmant + 1


@pytest.mark.parametrize("name", ["binary16", "binary32", "binary64"])
def test_limits_are_those_of_numpy(name):
    fmt, info = as_format(name), np.finfo(DTYPES[name])
    assert fmt.bits == info.bits
    for limit in ("max", "smallest_normal", "smallest_subnormal", "eps"):
        assert same(getattr(fmt, limit), float(getattr(info, limit))), limit


@pytest.mark.parametrize(
    "fmt, bits, largest, smallest_normal, smallest_subnormal, eps",
    [
        # Float32's exponent, binary16's precision.
        (TF32, 19, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2**-10),
        # Agrawal et al., "DLFloat", 2019: the largest value is 2**33 - 2**24.
        (DLFLOAT16, 16, 2.0**33 - 2**24, 2.0**-30, 2.0**-30, 2**-9),
        (Format("e4m3 of the design", 4, 4), 8, 240.0, 2**-6, 2**-9, 2**-3),
        (Format("all codes finite", 4, 4, specials="finite"), 8, 480.0, 2**-6, 2**-9, 2**-3),
        (Format("unsigned", 5, 4, signed=False), 8, 61440.0, 2**-14, 2**-17, 2**-3),
        (Format("biased", 4, 5, bias=0, specials="finite"), 9, 63488.0, 2.0, 2**-3, 2**-4),
        (Format("powers of two", 3, 1, specials="fn"), 4, 2.0**3, 2**-2, 2**-2, 1.0),
        (Format("one bit of exponent", 1, 3, specials="finite"), 4, 3.5, 2.0, 0.5, 2**-2),
    ],
    ids=str,
)
def test_limits_follow_from_the_fields(fmt, bits, largest, smallest_normal, smallest_subnormal, eps):
    limits = fmt.bits, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps
    assert limits == (bits, largest, smallest_normal, smallest_subnormal, eps)
    assert 2.0**fmt.emin == smallest_normal
    assert 2.0**fmt.emax <= largest < 2.0 ** (fmt.emax + 1)


@pytest.mark.parametrize("specials, bias", [("ieee", 7), ("fn", 7), ("finite", 7), ("fnuz", 8)])
def test_usual_bias(specials, bias):
    assert Format("f", 4, 4, specials=specials).bias == bias


@pytest.mark.parametrize("name", SHORT)
def test_values_are_those_of_the_dtype(name):
    _, expected = every_code(name)
    assert same(as_format(name).values(), np.unique(expected[np.isfinite(expected)] + 0.0))


def test_values_below_the_smallest_normal_are_missing_without_subnormals():
    fmt = Format("no subnormals", 4, 4, subnormal=False)
    twin = E4M3.values()
    assert same(fmt.values(), twin[(twin == 0) | (abs(twin) >= E4M3.smallest_normal)])


def test_values_of_an_unsigned_format_are_not_negative():
    fmt = Format("unsigned", 4, 4, specials="fn", signed=False)
    assert same(fmt.values(), E4M3FN.values()[E4M3FN.values() >= 0])


@pytest.mark.parametrize("fmt", [TF32, BINARY32, BINARY64], ids=str)
def test_values_of_a_wide_format_are_refused(fmt):
    with pytest.raises(ValueError, match=f"up to 16 bits, but '{fmt.name}' has {fmt.bits}"):
        fmt.values()


@pytest.mark.parametrize("name", SHORT)
def test_special_codes_are_those_of_the_dtype(name):
    fmt, (codes, values) = as_format(name), every_code(name)
    finite = np.where(np.isfinite(values), values, -1)
    assert fmt.max_code == codes[finite.argmax()]
    infinities = codes[np.isposinf(values)].tolist()
    assert ([] if fmt.infinity_code is None else [fmt.infinity_code]) == infinities
    assert fmt.has_infinity == bool(infinities)
    assert fmt.has_nan == np.isnan(values).any() == (fmt.nan_code is not None)
    zeros = np.signbit(values[values == 0]).tolist()
    assert (fmt.has_zero, fmt.has_negative_zero) == (False in zeros, True in zeros)
    assert fmt.sign_code == (2 ** (fmt.bits - 1) if (values < 0).any() else 0)


@pytest.mark.parametrize("name", [name for name in SHORT if as_format(name).has_nan])
def test_the_nan_code_is_the_one_that_a_cast_writes(name):
    dtype = DTYPES[name]
    written = np.array([np.nan], np.float32).astype(dtype)
    assert as_format(name).nan_code == int(written.view(f"u{written.itemsize}")[0])


@pytest.mark.parametrize(
    "fmt, max_code, infinity_code, nan_code",
    [
        (BINARY32, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0000),
        (BINARY64, 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x7FF8_0000_0000_0000),
        (TF32, 0x3FBFF, 0x3FC00, 0x3FE00),
        (DLFLOAT16, 0x7FFE, None, 0x7FFF),
        (Format("unsigned", 5, 4, signed=False), 0xF7, 0xF8, 0xFC),
        (Format("unsigned fn", 4, 4, specials="fn", signed=False), 0x7E, None, 0x7F),
        (Format("all codes finite", 4, 4, specials="finite"), 0x7F, None, None),
    ],
    ids=str,
)
def test_special_codes_follow_from_the_fields(fmt, max_code, infinity_code, nan_code):
    assert (fmt.max_code, fmt.infinity_code, fmt.nan_code) == (max_code, infinity_code, nan_code)
    assert fmt.magnitude(fmt.max_code) == fmt.max


@pytest.mark.parametrize("fmt", NAMED, ids=str)
def test_every_alias_names_its_format(fmt):
    for name in (fmt.name, *ALIASES[fmt.name]):
        assert as_format(name) is fmt
        assert as_format(name.upper()) is fmt


def test_no_alias_names_two_formats():
    names = [name for fmt in NAMED for name in (fmt.name, *ALIASES[fmt.name])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name, fmt",
    [
        ("half", BINARY16),
        ("bf16", BFLOAT16),
        ("fp8_e4m3", E4M3FN),  # what deep learning means by it
        ("e4m3", E4M3),  # what IEEE 754 makes of it
        ("fp4", E2M1),
        ("e8m0", E8M0FNU),
        ("e5m10", BINARY16),
        ("e8m23", BINARY32),
        ("e11m52", BINARY64),
        ("e6m9", Format("e6m9", 6, 10)),
        ("E6M9", Format("e6m9", 6, 10)),
        ("e3m3fn", Format("e3m3fn", 3, 4, specials="fn")),
        ("e3m3fnuz", Format("e3m3fnuz", 3, 4, bias=4, specials="fnuz")),
        ("e5m0", Format("e5m0", 5, 1, specials="fn")),
    ],
)
def test_a_name_gives_its_format(name, fmt):
    assert as_format(name) == fmt


def test_a_format_stands_for_itself():
    fmt = Format("mine", 4, 4)
    assert as_format(fmt) is fmt


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_dtypes_name_formats(name):
    assert as_format(DTYPES[name]) is as_format(np.dtype(DTYPES[name])) is as_format(name)


@pytest.mark.parametrize(
    "dtype, name",
    [
        ("float16", "binary16"),
        ("half", "binary16"),
        ("bfloat16", "bfloat16"),
        ("float32", "binary32"),
        ("float64", "binary64"),
        ("float8_e4m3fn", "e4m3fn"),
        ("float8_e4m3fnuz", "e4m3fnuz"),
        ("float8_e5m2", "e5m2"),
        ("float8_e5m2fnuz", "e5m2fnuz"),
        ("float8_e8m0fnu", "e8m0fnu"),
        ("float4_e2m1fn_x2", "e2m1"),
    ],
)
def test_torch_dtypes_name_formats(dtype, name):
    assert as_format(getattr(torch, dtype)) is as_format(name)


# Not float8_e5m2fnuz: torch 2.13 has 2**-3 for its eps, but with three significand bits it is 2**-2.
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
)
def test_limits_are_those_of_torch(dtype):
    fmt, info = as_format(dtype), torch.finfo(getattr(torch, dtype))
    for limit in ("bits", "max", "smallest_normal", "eps"):
        assert getattr(fmt, limit) == getattr(info, limit), limit


@pytest.mark.parametrize(
    "name", ["", "fp17", "float8", "e4", "m3e4", "e4m3x", "fp16 ", "ee4m3", "torch.float16"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"unknown format '{name}'; choose from binary16, .*'eXmY'"):
        as_format(name)


@pytest.mark.parametrize(
    "spec", [16, 1.5, int, np.int32, np.complex64, torch.int8, ml_dtypes.int4, [16], object()]
)
def test_what_names_no_format_is_refused(spec):
    with pytest.raises(TypeError, match="by name, as a Format or by a floating-point dtype, got "):
        as_format(spec)


def test_none_names_no_format():
    with pytest.raises(TypeError, match="got None"):
        as_format(None)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"specials": "inf"},
            "specials must be one of ieee, fn, fnuz, finite, p3109e, p3109f, got 'inf' for format 'bad'",
        ),
        ({"exponent_bits": 0}, "exponent_bits must be an int from 1 to 11, got 0 for format 'bad'"),
        ({"exponent_bits": 12}, "exponent_bits must be an int from 1 to 11, got 12"),
        ({"exponent_bits": 4.0}, "exponent_bits must be an int from 1 to 11, got 4.0"),
        ({"exponent_bits": True}, "exponent_bits must be an int from 1 to 11, got True"),
        ({"precision": 0}, "precision must be an int from 1 to 53, got 0"),
        ({"precision": 54}, "precision must be an int from 1 to 53, got 54"),
        ({"precision": None}, "precision must be an int from 1 to 53, got None"),
        ({"bias": 7.0}, "bias must be an int, got 7.0 for format 'bad'"),
        ({"bias": False}, "bias must be an int, got False"),
        ({"specials": "fnuz", "signed": False}, "keeps NaN in the code of -0.0, but 'bad' is unsigned"),
        ({"precision": 1}, "needs a fraction bit .* 'bad' has precision=1; use specials='fn'"),
        ({"exponent_bits": 1, "subnormal": False}, "no finite value but zero: give it more exponent bits"),
        ({"exponent_bits": 1, "precision": 1, "specials": "fn"}, "'bad' has no finite value but zero"),
        ({"exponent_bits": 11, "specials": "finite"}, r"exact in binary64 .* from 2\*\*-1025 to 2\*\*1025"),
        (
            {"exponent_bits": 11, "precision": 53, "bias": 1024},
            r"exact in binary64 .* from 2\*\*-1075 to 2\*\*1023",
        ),
        ({"bias": -1100}, "exact in binary64 .* choose fewer exponent bits or another bias"),
        ({"bias": 1100}, "exact in binary64"),
    ],
)
def test_a_format_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Format(**{"name": "bad", "exponent_bits": 4, "precision": 4, **fields})


@pytest.mark.parametrize("name", ["e0m3", "e12m3", "e5m53", "e11m52fn"])
def test_an_exmy_that_cannot_be_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        as_format(name)


def test_the_widest_bias_reaches_the_ends_of_binary64():
    assert Format("low", 4, 4, bias=1072).smallest_subnormal == math.ulp(0.0)
    assert Format("high", 4, 4, specials="finite", bias=15 - 1023).max == 1.875 * 2.0**1023


def test_a_format_is_a_frozen_value():
    fmt = Format("mine", 4, 4, specials="fn")
    assert {fmt: 1}[Format("mine", exponent_bits=4, precision=4, bias=7, specials="fn")] == 1
    assert fmt != Format("other", 4, 4, specials="fn")
    assert fmt != dataclasses.replace(fmt, subnormal=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.precision = 5
    assert pickle.loads(pickle.dumps(fmt)) == copy.deepcopy(fmt) == fmt


def test_a_format_prints_as_its_name():
    assert [str(fmt) for fmt in (BINARY16, E4M3FN)] == ["binary16", "e4m3fn"]


P3109 = [
    (bits, precision, sign, domain)
    for bits in range(3, 11)
    for sign in "su"
    for precision in range(1, bits + (sign == "u"))
    for domain in "ef"
]


def p3109_value(code, bits, precision, signed, extended):
    """The definition of IEEE P3109, in fractions: an oracle of its own."""
    top = 2 ** (bits - 1) if signed else 2**bits - 1  # the code of NaN
    if code == top:
        return math.nan
    if signed and code > top:
        return -p3109_value(code - top, bits, precision, signed, extended)
    if extended and code == top - 1:
        return math.inf
    bias = 2 ** (bits - precision - 1) if signed else 2 ** (bits - precision)
    exponent, trailing = divmod(code, 2 ** (precision - 1))
    significand = Fraction(trailing, 2 ** (precision - 1)) + (exponent > 0)
    return float(significand * Fraction(2) ** (max(exponent, 1) - bias))


@pytest.mark.parametrize("bits, precision, sign, domain", P3109)
def test_p3109_formats_follow_their_definition(bits, precision, sign, domain):
    fmt = as_format(f"binary{bits}p{precision}{sign}{domain}")
    wanted = [p3109_value(code, bits, precision, sign == "s", domain == "e") for code in range(2**bits)]
    assert same([reference.decode(code, fmt) for code in range(2**bits)], wanted)
    assert fmt.bits == bits
    assert fmt.max == max(value for value in wanted if math.isfinite(value))
    assert fmt.smallest_subnormal == min(value for value in wanted if value > 0)


@pytest.mark.parametrize("bits, precision, sign, domain", [row for row in P3109 if row[0] <= 8])
def test_p3109_formats_agree_with_gfloat(bits, precision, sign, domain):
    theirs = format_info_p3109(
        bits,
        precision,
        gfloat.Signedness.Signed if sign == "s" else gfloat.Signedness.Unsigned,
        gfloat.Domain.Extended if domain == "e" else gfloat.Domain.Finite,
    )
    fmt = as_format(f"binary{bits}p{precision}{sign}{domain}")
    codes = range(2**bits)
    assert same(
        [reference.decode(code, fmt) for code in codes],
        [float(gfloat.decode_float(theirs, code).fval) for code in codes],
    )
    # Rounding too, ties to even codes and the three overflow policies among it.
    for x in [*np.linspace(-2 * fmt.max, 2 * fmt.max, 97), *(1.5 * 2.0 ** np.arange(-9, 9)), math.inf, -0.0]:
        if x < 0 and sign == "u":
            continue  # NaN here, zero there
        for overflow in ("ieee", "saturate"):
            got = reference.round_value(float(x), fmt, overflow=overflow)
            assert same(got, float(gfloat.round_float(theirs, float(x), sat=overflow == "saturate"))), x


@pytest.mark.parametrize("name", ["binary8p9se", "binary8p8se", "binary8p0ue", "binary4p5uf"])
def test_a_p3109_precision_out_of_range_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' needs a precision from 1 to "):
        as_format(name)
