"""Every format, rounding, overflow policy and carrier against the reference, where rounding goes wrong."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from same import differ, same

from fpemu import Key, as_format, quantize, reference
from fpemu.formats import BINARY32, BINARY64, NAMED, OVERFLOWS, ROUNDINGS, Format
from fpemu.kernels.rules import carried

CUSTOM = [
    Format("all finite", 4, 4, bias=7, specials="finite"),
    Format("no subnormals", 3, 3, subnormal=False),
    Format("binary16 without subnormals", 5, 11, subnormal=False),
    Format("powers of two", 5, 1, specials="fn"),
    Format("few powers of two", 2, 1, specials="finite"),
    Format("signed, no zero", 8, 1, bias=127, specials="fn", subnormal=False),
    Format("unsigned", 6, 6, signed=False, specials="fn"),
    Format("one exponent bit", 1, 4, specials="finite"),
    Format("near binary32", 8, 20),
    Format("bfloat16, one binade up", 8, 8, bias=126, specials="finite"),
    Format("far down, no subnormals", 7, 12, bias=100, subnormal=False),
    Format("wide", 11, 30),
    Format("far up", 9, 3, bias=400),
]
P3109 = [
    as_format(f"binary{name}")
    for name in ("8p4se", "8p4sf", "8p1ue", "8p1uf", "8p1sf", "8p1se", "5p2uf", "4p3se", "6p6uf", "10p1ue")
]
SMALL = [f for f in NAMED if f.bits <= 8] + [
    as_format(f"binary{bits}p{precision}{sign}{domain}")
    for bits in range(3, 9)
    for sign in "su"
    for precision in range(1, bits + (sign == "u"))
    for domain in "ef"
    if not (bits == 3 and precision == bits - (sign == "s") and domain == "e" and precision > 2)
]
FEW_BITS = [{"random_bits": bits, "variant": variant} for variant in "ABC" for bits in (1, 7, 30)]


def holds(carrier: np.dtype, fmt: Format) -> bool:
    try:
        carried(fmt, BINARY64 if carrier == np.float64 else BINARY32)
    except ValueError:
        return False
    return True


def beside(values: np.ndarray, carrier: np.dtype) -> np.ndarray:
    """The values, the middles between neighbours, and what lies one ulp of the carrier beside; both signs."""
    values = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(carrier)
        points = np.concatenate(
            [points, np.nextafter(points, carrier.type(0)), np.nextafter(points, carrier.type(np.inf))]
        )
    return np.concatenate([points, -points])


def hard_inputs(fmt: Format, carrier: np.dtype, rng: np.random.Generator, count: int) -> np.ndarray:
    """Values, ties and one ulp beside; the ends of the range; any bits; specials."""
    codes = np.unique(rng.integers(0, fmt.max_code + 1, count))
    values = [fmt.magnitude(int(code)) for code in np.union1d(codes, np.minimum(codes + 1, fmt.max_code))]
    half_step = math.ldexp(1.0, fmt.emax - fmt.precision)
    ends = [
        fmt.smallest_subnormal / 2,
        fmt.smallest_subnormal,
        fmt.smallest_normal,
        fmt.max,
        fmt.max + half_step,
    ]
    bits = rng.integers(0, 2 ** (8 * carrier.itemsize), count, np.uint64).astype(f"u{carrier.itemsize}")
    info = np.finfo(carrier)
    specials = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal], carrier
    )
    return np.concatenate([beside(np.sort([*values, *ends]), carrier), bits.view(carrier), specials])


def expected(
    x: np.ndarray, fmt: Format, rounding: str, key: Key | None = None, **options: object
) -> np.ndarray:
    # A format that holds all of the carrier rounds nothing, and its largest value is then the carrier's.
    fmt = carried(fmt, BINARY64 if x.dtype == np.float64 else BINARY32)
    words = [None if key is None else key.word(i) for i in range(x.size)]
    rounded = [
        reference.round_value(float(value), fmt, rounding, word=word, **options)
        for value, word in zip(x, words, strict=True)
    ]
    return np.array(rounded, x.dtype)


def check(fmt: Format, carrier: np.dtype, x: np.ndarray, flush: bool, few: list[dict[str, object]]) -> None:
    for rounding, overflow in itertools.product(ROUNDINGS, OVERFLOWS):
        key = Key(7, offset=2**40 + 5) if rounding == "stochastic" else None
        for bits in [{}, *few] if key else [{}]:
            options = {"overflow": overflow, "flush_subnormals": flush, **bits}
            got, wanted = (
                quantize(x, fmt, rounding, key=key, **options),
                expected(x, fmt, rounding, key, **options),
            )
            wrong = np.flatnonzero(differ(got, wanted))
            assert not wrong.size, (
                f"{rounding} {options}: {x[wrong[0]].hex()} gave {got[wrong[0]]}, not {wanted[wrong[0]]}"
            )


@pytest.mark.parametrize("carrier", [np.dtype("f4"), np.dtype("f8")], ids=["float32", "float64"])
@pytest.mark.parametrize("fmt", [*NAMED, *CUSTOM, *P3109], ids=str)
def test_equals_the_reference(fmt, carrier):
    rng = np.random.default_rng([fmt.bits, fmt.precision, carrier.itemsize])
    if not holds(carrier, fmt):
        pytest.skip(f"{carrier} does not hold {fmt}")
    x = rng.permutation(hard_inputs(fmt, carrier, rng, 6))[:60]
    check(fmt, carrier, x, bool(rng.integers(2)), [FEW_BITS[i] for i in rng.integers(0, len(FEW_BITS), 2)])


@pytest.mark.slow
@pytest.mark.parametrize("carrier", [np.dtype("f4"), np.dtype("f8")], ids=["float32", "float64"])
@pytest.mark.parametrize("fmt", [*NAMED, *CUSTOM, *P3109], ids=str)
def test_equals_the_reference_on_many(fmt, carrier):
    rng = np.random.default_rng([fmt.bits, fmt.precision, carrier.itemsize, 1])
    if not holds(carrier, fmt):
        pytest.skip(f"{carrier} does not hold {fmt}")
    for flush in (False, True):
        check(fmt, carrier, hard_inputs(fmt, carrier, rng, 24), flush, FEW_BITS)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_all_of_a_small_format_equals_the_reference(fmt):
    carrier = np.dtype("f4" if holds(np.dtype("f4"), fmt) else "f8")
    positive = fmt.values()[fmt.values() >= 0]
    top = fmt.max + math.ldexp(1.0, fmt.emax - fmt.precision + 1)
    check(fmt, carrier, beside(np.append(positive, top), carrier), False, [])


def rounded_by_rint(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Nearest even by scaling with powers of two and rint, both exact in float64: an oracle of its own."""
    exponent = np.maximum(np.frexp(x)[1] - 1, fmt.emin) - fmt.precision + 1
    rounded = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
    return np.where(np.abs(rounded) > fmt.max, np.copysign(np.inf, x), rounded)


def double_rounding_points(fmt: Format, count: int, rng: np.random.Generator) -> np.ndarray:
    """float64 a hair beside the ties of a format, where float32 and other steps in between lie on them."""
    exponent = rng.integers(fmt.emin - fmt.precision - 1, fmt.emax + 2, count)
    odd = 2 * rng.integers(1 << (fmt.precision - 1), 1 << fmt.precision, count) + 1
    tie = np.ldexp(odd.astype(np.float64), exponent - fmt.precision)
    hair = np.ldexp(
        rng.choice([-1.0, 0.0, 1.0], count), exponent - rng.integers(fmt.precision + 1, 53, count)
    )
    return np.copysign(tie + hair, rng.choice([-1.0, 1.0], count))


@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp32", "e5m2", "e3m4"])
def test_float64_is_rounded_once(name):
    fmt, rng = as_format(name), np.random.default_rng(0)
    x = double_rounding_points(fmt, 2_000_000, rng)
    assert same(quantize(x, fmt), rounded_by_rint(x, fmt))
    if name == "fp16":
        with np.errstate(over="ignore"):
            assert same(quantize(x, fmt), x.astype(np.float16).astype(np.float64))


def test_float64_rounded_by_way_of_float32_differs():
    x = double_rounding_points(as_format("fp16"), 100_000, np.random.default_rng(0))
    with np.errstate(over="ignore"):
        twice = quantize(x.astype(np.float32), "fp16").astype(np.float64)
    assert not same(quantize(x, "fp16"), twice)


@pytest.mark.parametrize("bits, dropped", [(4, 13), (1, 13), (8, 13), (4, 4)])
def test_bias_of_few_bits_is_as_published(bits, dropped):
    # All fractions of so many dropped bits, times all words of so many bits: the mean is exact.
    fmt = Format("target", 8, 24 - dropped)
    fractions = np.arange(1 << dropped, dtype=np.float64) / (1 << dropped)
    x = (1 + fractions * fmt.eps).astype(np.float32)
    for variant, bias in (
        ("A", -(2.0 ** -(bits + 1)) + 2.0 ** -(dropped + 1)),
        ("B", 2.0 ** -(dropped + 1) if bits < dropped else 0.0),
        ("C", 0.0),
    ):
        ups = np.zeros(x.size)
        for word in range(1 << bits):
            ups += (
                [
                    reference.round_value(
                        float(v),
                        fmt,
                        "stochastic",
                        word=word << (32 - bits),
                        random_bits=bits,
                        variant=variant,
                    )
                    > 1
                    for v in x
                ]
                if x.size <= 64
                else _ups(x, fmt, bits, variant, word)
            )
        mean = (ups / (1 << bits) - fractions).mean()
        assert mean == bias if variant != "C" else abs(mean) <= 2.0 ** -(bits + dropped)


def _ups(x: np.ndarray, fmt: Format, bits: int, variant: str, word: int) -> np.ndarray:
    scaled = (x.astype(np.float64) - 1) / fmt.eps * (1 << bits)
    shares = {"A": np.floor(scaled), "B": np.floor(scaled + 0.5), "C": np.rint(scaled)}[variant]
    return shares + word >= (1 << bits)
