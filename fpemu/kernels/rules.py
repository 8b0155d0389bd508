"""From format, rounding and overflow policy to the numbers and the loop that carry them out in float32."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats import BINARY32, Format
from .scalar import Rule

ALL = 0x7FFFFFFF
NAN = 0x7FC00000

# What each mode adds below the last kept bit (see scalar.deterministic):
# mask for positive, mask for negative, mask if the kept bit is odd, tie bit if odd, tie bit, shift.
ADDENDS = {
    "nearest_even": (ALL, ALL, ALL, 1, 0, 1),
    "nearest_away": (ALL, ALL, ALL, 0, 1, 1),
    "toward_zero": (0, 0, ALL, 0, 0, 0),
    "toward_positive": (ALL, 0, ALL, 0, 0, 0),
    "toward_negative": (0, ALL, ALL, 0, 0, 0),
    "to_odd": (ALL, ALL, 0, 0, 0, 0),
    "stochastic": (0, 0, ALL, 0, 0, 0),
}


class Plan(NamedTuple):
    """Which loop of cpu.py to run, and its uint32 parameters."""

    loop: str
    words: npt.NDArray[np.uint32]


@cache
def plan(fmt: Format, rounding: str, overflow: str) -> Plan:
    """How to round float32 to ``fmt``.

    Raises:
        ValueError: ``fmt`` has values that no float32 holds.
    """
    fmt = carried(fmt)
    rule = _rule(fmt, rounding, overflow)
    words = np.array([value & 0xFFFFFFFF for value in rule], np.uint32)
    words.setflags(write=False)
    return Plan(_loop(fmt, rounding, rule), words)


def carried(fmt: Format) -> Format:
    """``fmt``, or binary32 in its place where it holds every float32: rounding then changes nothing."""
    if fmt.precision >= 24 and fmt.emin <= -126 and fmt.max >= BINARY32.max and fmt.specials == "ieee":
        if fmt.signed and fmt.subnormal and fmt.smallest_subnormal <= BINARY32.smallest_subnormal:
            return BINARY32
    # 2**-127 may be the smallest normal value only where float32's subnormals have that format's one quantum.
    emin = -127 if fmt.subnormal or fmt.precision == 1 else -126
    fits = fmt.emin >= emin and fmt.smallest_subnormal >= BINARY32.smallest_subnormal and fmt.precision <= 24
    if not fits or fmt.max > BINARY32.max:
        raise ValueError(
            f"{fmt.name} reaches from {fmt.smallest_subnormal:g} to {fmt.max:g} with {fmt.precision} "
            "significand bits: float32 cannot hold all of that"
        )
    return fmt


def _rule(fmt: Format, rounding: str, overflow: str) -> Rule:
    max_bits = _bits(fmt.max)
    beyond = _bits(math.inf) if fmt.has_infinity else NAN if fmt.has_nan else max_bits
    mask_positive, mask_negative, mask_odd, tie_odd, tie, shift = ADDENDS[rounding]
    # IEEE 754-2019, 7.4: directed modes overflow only the way they round; toward zero and to odd never do.
    over_positive = max_bits if overflow != "ieee" or rounding in TO_MAX[0] else beyond
    over_negative = max_bits if overflow != "ieee" or rounding in TO_MAX[1] else beyond
    infinite = max_bits if overflow == "saturate" else beyond
    drop = 24 - fmt.precision
    wide = fmt.emin == -126
    quantum = fmt.emin - fmt.precision + 1
    short = -149 <= quantum and -quantum <= 127 and not wide
    return Rule(
        drop=drop,
        emin=fmt.emin + 127,
        extra=0 if fmt.subnormal else fmt.precision - 1,
        low=int(fmt.emin == -127),
        smallest=_bits(fmt.smallest_subnormal),
        max=max_bits,
        mask_positive=mask_positive,
        mask_negative=mask_negative,
        mask_odd=mask_odd,
        tie_odd=tie_odd,
        tie=tie,
        shift=shift,
        over_positive=over_positive,
        over_negative=over_negative,
        inf_positive=infinite,
        inf_negative=infinite,
        zero=0 if fmt.has_zero else NAN if overflow == "ieee" else _bits(fmt.smallest_subnormal),
        under=0 if fmt.has_zero else _bits(fmt.smallest_subnormal),
        below_zero=NAN if fmt.has_nan else 0,
        sign=0x80000000 * fmt.signed,
        zero_sign=0x80000000 * fmt.has_negative_zero,
        emin_bits=0 if wide else max(fmt.emin + 127, 0) << 23,
        keep=-(1 << drop),
        half=(1 << drop >> 1) - 1,
        clamp=_bits(2.0 ** (fmt.emax + 1)) if fmt.emax < 127 else 0,
        magic=drop << 23,
        quanta=_bits(2.0**-quantum) if short else 0,
        quantum=_bits(2.0**quantum) if short else 0,
        code_shift=fmt.precision - 1,
        code_skip=int(not fmt.has_zero),
        code_sign=fmt.sign_code,
        code_inf=fmt.infinity_code or 0,
        # Where there is no NaN, the code of -0.0 stands for it, as in ml_dtypes.
        code_nan=fmt.sign_code if fmt.nan_code is None else fmt.nan_code,
    )


TO_MAX = (
    {"toward_zero", "to_odd", "toward_negative"},  # positive overflow stays finite
    {"toward_zero", "to_odd", "toward_positive"},  # negative overflow stays finite
)


def _loop(fmt: Format, rounding: str, rule: Rule) -> str:
    """The fastest loop that is exact for this rule."""
    usual = fmt.subnormal and fmt.has_negative_zero and rule.drop > 0 and fmt.emin >= -126
    wide = fmt.emin == -126
    if rounding == "stochastic":
        return "stochastic_usual" if usual and (wide or rule.quanta) else "stochastic"
    if rounding == "nearest_even" and usual and rule.inf_positive == rule.over_positive:
        if wide:
            return "nearest_even_wide"
        if fmt.emax + 1 + 127 + rule.drop <= 254:
            return "nearest_even_magic"
    return "deterministic"


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


@cache
def tally_words(fmt: Format | None) -> npt.NDArray[np.uint32]:
    """Bits of the smallest normal value, the largest finite one, and the least magnitude that overflows.

    A finite value overflows if nearest_even, with no bound on the exponent, takes it past the largest finite
    value: so saturating, which hides that, is counted too.
    """
    if fmt is None:
        return np.array([0, 0x7F800000, 0x7F800000], np.uint32)
    fmt = carried(fmt)
    # Half a quantum past the largest value is a tie: it goes up if that value's last bit is 1.
    half = math.ldexp(1.0, fmt.emax - fmt.precision)
    threshold = fmt.max + half
    bits = _bits(threshold) if threshold <= BINARY32.max else 0x7F800000
    odd = fmt.max_code % 2 == 1 or fmt.precision == 1
    return np.array([_bits(fmt.smallest_normal), _bits(fmt.max), bits + (not odd)], np.uint32)
