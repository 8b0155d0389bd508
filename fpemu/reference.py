"""The specification: exact rounding of one number with Python integers and fractions.

Slow and plain on purpose. Every kernel is tested against this file, bit for bit.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .formats import Format, as_format


def round_value(
    x: float | Fraction,
    fmt: str | Format,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    word: int | None = None,
    random_bits: int | None = None,
    variant: str = "C",
    flush_subnormals: bool = False,
) -> float:
    """The value of ``fmt`` that ``x`` rounds to.

    Args:
        x: Any int, float or Fraction; infinities, NaN and -0.0 included.
        fmt: Target format, or its name.
        rounding: One of ``formats.ROUNDINGS``.
        overflow: One of ``formats.OVERFLOWS``.
        word: The 32-bit random word of ``"stochastic"``, ``0 <= word < 2**32``.
        random_bits: How many of the word's upper bits count; None: all, and of the dropped fraction the
        first 32.
        variant: ``"A"``, ``"B"`` or ``"C"``: how the dropped fraction is rounded to ``random_bits`` bits, as
            in StochasticA, B and C of IEEE P3109: down, to nearest with ties up, to nearest with ties to
            even.
        flush_subnormals: Take an ``x`` below ``fmt.smallest_normal`` in magnitude for zero.

    Returns:
        A float, exact: every value of every format is one.

    Example:
        >>> from fractions import Fraction
        >>> round_value(Fraction(1, 10), "fp16"), round_value(65520, "fp16"), round_value(464, "e4m3fn")
        (0.0999755859375, inf, 448.0)
    """
    fmt = as_format(fmt)
    if x != x:
        return math.nan
    if flush_subnormals and -fmt.smallest_normal < x < fmt.smallest_normal:
        x = -0.0 if x < 0 else 0.0 * x
    if x < 0 and not fmt.signed:
        return math.nan if fmt.has_nan else 0.0
    negative = fmt.signed and (x < 0 or (x == 0 and math.copysign(1.0, x) < 0))
    if isinstance(x, float) and math.isinf(x):
        return _signed(_beyond(fmt) if overflow in ("ieee", "propagate") else fmt.max, negative, fmt)
    if x == 0:
        if fmt.has_zero:
            return _signed(0.0, negative, fmt)
        return math.nan if overflow == "ieee" else _signed(fmt.smallest_subnormal, negative, fmt)

    magnitude = abs(Fraction(x))
    quantum = _quantum(magnitude, fmt)
    quanta = magnitude // quantum
    remainder = magnitude / quantum - quanta  # in units of the quantum, 0 <= remainder < 1
    odd = _is_odd(quanta, quantum, fmt)
    quanta += _rounds_up(remainder, odd, negative, rounding, word, random_bits, variant)
    rounded = quanta * quantum

    if rounded > Fraction(fmt.max):
        if overflow == "ieee" and _overflows_to_infinity(rounding, negative):
            return _signed(_beyond(fmt), negative, fmt)
        return _signed(fmt.max, negative, fmt)
    if rounded == 0 and not fmt.has_zero:
        return _signed(fmt.smallest_subnormal, negative, fmt)
    return _signed(float(rounded), negative, fmt)


def _quantum(magnitude: Fraction, fmt: Format) -> Fraction:
    """Distance between neighbouring values of ``fmt``, as if it had no largest one."""
    exponent = floor_log2(magnitude)
    if exponent < fmt.emin:
        return Fraction(fmt.smallest_subnormal)
    return Fraction(2) ** (exponent - fmt.precision + 1)


def floor_log2(x: Fraction) -> int:
    """Exponent of the binade that positive ``x`` lies in, exact."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if x >= Fraction(2) ** exponent else exponent - 1


def _is_odd(quanta: int, quantum: Fraction, fmt: Format) -> bool:
    """Whether the neighbour below is odd: its significand, in P3109 its code."""
    if fmt.precision == 1 and fmt.ties_to_even_code:
        # All significands are 1; the code counts exponents from emin, which is code 1.
        return quanta > 0 and (floor_log2(quanta * quantum) - fmt.emin + 1) % 2 == 1
    # With precision 1 a normal significand is always 1, odd: ties go to the larger magnitude.
    return quanta % 2 == 1


def _rounds_up(
    remainder: Fraction,
    odd: bool,
    negative: bool,
    rounding: str,
    word: int | None,
    random_bits: int | None,
    variant: str,
) -> bool:
    """Whether the magnitude goes to the neighbour above (IEEE 754-2019, clause 4.3)."""
    if rounding == "nearest_even":
        return remainder > Fraction(1, 2) or (remainder == Fraction(1, 2) and odd)
    if rounding == "nearest_away":
        return remainder >= Fraction(1, 2)
    if rounding == "toward_zero":
        return False
    if rounding == "toward_positive":
        return remainder > 0 and not negative
    if rounding == "toward_negative":
        return remainder > 0 and negative
    if rounding == "to_odd":
        return remainder > 0 and not odd
    if rounding == "stochastic":
        if word is None:
            raise ValueError("rounding='stochastic' needs word=, a 32-bit random integer")
        if random_bits is None:
            return math.floor(remainder * 2**32) + word >= 2**32
        scaled = remainder * 2**random_bits
        # round() of a Fraction goes to nearest, ties to even.
        shares = {"A": math.floor(scaled), "B": math.floor(scaled + Fraction(1, 2)), "C": round(scaled)}
        return shares[variant] + (word >> (32 - random_bits)) >= 2**random_bits
    raise ValueError(f"unknown rounding {rounding!r}")


def _overflows_to_infinity(rounding: str, negative: bool) -> bool:
    """Whether overflow gives infinity rather than the largest finite value (IEEE 754-2019, clause 7.4)."""
    if rounding in ("toward_zero", "to_odd"):
        return False
    if rounding in ("toward_positive", "toward_negative"):
        return negative == (rounding == "toward_negative")
    return True


def _beyond(fmt: Format) -> float:
    """What stands above the largest finite value: infinity, else NaN, else that value itself."""
    return math.inf if fmt.has_infinity else math.nan if fmt.has_nan else fmt.max


def _signed(magnitude: float, negative: bool, fmt: Format) -> float:
    return -magnitude if negative and (magnitude != 0 or fmt.has_negative_zero) else magnitude


def decode(code: int, fmt: str | Format) -> float:
    """The value of a code: exact, NaN for a NaN of any payload.

    Example:
        >>> decode(0x3C01, "fp16"), decode(0x80, "e4m3fnuz"), decode(0xFF, "e4m3")
        (1.0009765625, nan, nan)
    """
    fmt = as_format(fmt)
    magnitude_code = code & ~fmt.sign_code
    negative = code != magnitude_code
    if code == fmt.nan_code:
        return math.nan
    if magnitude_code > fmt.max_code:
        return _signed(math.inf, negative, fmt) if magnitude_code == fmt.infinity_code else math.nan
    return _signed(fmt.magnitude(magnitude_code), negative, fmt)


def encode(value: float, fmt: str | Format) -> int:
    """The code of a float that is a value of ``fmt``.

    NaN becomes the quiet NaN of its sign; in a format without NaN, the code of -0.0, as in ml_dtypes.

    Raises:
        ValueError: ``value`` is not a value of ``fmt``.

    Example:
        >>> hex(encode(1.0009765625, "fp16")), hex(encode(float("nan"), "e4m3fnuz"))
        ('0x3c01', '0x80')
    """
    fmt = as_format(fmt)
    sign = fmt.sign_code if math.copysign(1.0, value) < 0 else 0
    if value != value:
        return fmt.sign_code if fmt.nan_code is None else fmt.nan_code | sign
    magnitude = abs(value)
    if math.isinf(magnitude) and fmt.infinity_code is not None:
        return sign | fmt.infinity_code
    code = _magnitude_code(magnitude, fmt)
    if code is None or (sign and not (magnitude or fmt.has_negative_zero)) or (value < 0 and not fmt.signed):
        raise ValueError(f"{value!r} is not a value of {fmt.name}; round it first")
    return sign | code


def _magnitude_code(magnitude: float, fmt: Format) -> int | None:
    if magnitude == 0 or magnitude > fmt.max:
        return 0 if magnitude == 0 and fmt.has_zero else None
    if round_value(magnitude, fmt, "toward_zero") != magnitude:
        return None
    exponent = max(math.frexp(magnitude)[1] - 1, fmt.emin)
    # In units of the quantum; a normal significand's implicit bit adds the 1 that the lowest field lacks.
    significand = int(math.ldexp(magnitude, fmt.precision - 1 - exponent))
    lowest_field = 1 if fmt.has_zero else 0
    return significand + (exponent - fmt.emin + lowest_field - 1) * (1 << (fmt.precision - 1))
