"""From format, rounding and overflow policy to the numbers and the loop that carry them out in float32."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats import BINARY32, Format
from .scalar import Rule

ALL = (1 << 63) - 1  # in either carrier

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
    """Which loop of cpu.py to run, and its parameters, of the carrier's width."""

    loop: str
    words: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


@cache
def plan(
    fmt: Format,
    rounding: str,
    overflow: str,
    carrier: Format = BINARY32,
    random_bits: int | None = None,
    variant: str = "C",
    flush: bool = False,
) -> Plan:
    """How to round to ``fmt`` what is stored in ``carrier``, binary32 or binary64.

    Raises:
        ValueError: ``fmt`` has values that the carrier does not hold.
    """
    fmt = carried(fmt, carrier)
    rule = _rule(fmt, rounding, overflow, carrier)
    if random_bits is not None:
        rule = rule._replace(**_few_bits(random_bits, variant))
    if flush:
        rule = rule._replace(flush=_bits(fmt.smallest_normal, carrier))
    words = np.array([value & ((1 << carrier.bits) - 1) for value in rule], f"u{carrier.bits // 8}")
    words.setflags(write=False)
    return Plan(_loop(fmt, rounding, rule, carrier, random_bits), words)


def carried(fmt: Format, carrier: Format = BINARY32) -> Format:
    """``fmt``, or the carrier in its place where ``fmt`` holds all of it: rounding then changes nothing."""
    if fmt.precision >= carrier.precision and fmt.emin <= carrier.emin and fmt.max >= carrier.max:
        if (
            fmt.has_infinity
            and fmt.has_negative_zero
            and fmt.smallest_subnormal <= carrier.smallest_subnormal
        ):
            return carrier
    # One exponent below the carrier's normal values may be normal only where the carrier's subnormals have
    # that format's one quantum.
    emin = carrier.emin - (fmt.subnormal or fmt.precision == 1)
    fits = fmt.emin >= emin and fmt.smallest_subnormal >= carrier.smallest_subnormal
    if not fits or fmt.precision > carrier.precision or fmt.max > carrier.max:
        raise ValueError(
            f"{fmt.name} reaches from {fmt.smallest_subnormal:g} to {fmt.max:g} with {fmt.precision} "
            f"significand bits: {_DTYPE.get(carrier.name, carrier.name)} cannot hold all of that"
        )
    return fmt


_DTYPE = {"binary16": "float16", "binary32": "float32", "binary64": "float64"}


def _rule(fmt: Format, rounding: str, overflow: str, carrier: Format) -> Rule:
    bias = 1 - carrier.emin
    sign, nan = carrier.sign_code, carrier.nan_code or 0
    max_bits = _bits(fmt.max, carrier)
    beyond = _bits(math.inf, carrier) if fmt.has_infinity else nan if fmt.has_nan else max_bits
    mask_positive, mask_negative, mask_odd, tie_odd, tie, shift = ADDENDS[rounding]
    by_exponent = fmt.ties_to_even_code and fmt.precision == 1
    # IEEE 754-2019, 7.4: directed modes overflow only the way they round; toward zero and to odd never do.
    over_positive = max_bits if overflow != "ieee" or rounding in TO_MAX[0] else beyond
    over_negative = max_bits if overflow != "ieee" or rounding in TO_MAX[1] else beyond
    return Rule(
        drop=carrier.precision - fmt.precision,
        emin=fmt.emin + bias,
        extra=0 if fmt.subnormal else fmt.precision - 1,
        low=int(fmt.emin < carrier.emin),
        smallest=_bits(fmt.smallest_subnormal, carrier),
        max=max_bits,
        tie_field=int(by_exponent),
        tie_parity=(fmt.emin + bias + 1) % 2 if by_exponent else 1,
        flush=0,
        mask_positive=mask_positive,
        mask_negative=mask_negative,
        mask_odd=mask_odd,
        tie_odd=tie_odd,
        tie=tie,
        shift=shift,
        word_mask=0xFFFFFFFF,
        word_add=0,
        word_odd=0,
        word_shift=0,
        over_positive=over_positive,
        over_negative=over_negative,
        infinite=max_bits if overflow == "saturate" else beyond,
        zero=0 if fmt.has_zero else nan if overflow == "ieee" else _bits(fmt.smallest_subnormal, carrier),
        under=0 if fmt.has_zero else _bits(fmt.smallest_subnormal, carrier),
        below_zero=nan if fmt.has_nan else 0,
        sign=sign * fmt.signed,
        zero_sign=sign * fmt.has_negative_zero,
        **(_short_ways(fmt) if carrier == BINARY32 else dict.fromkeys(SHORT_WAYS, 0)),
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
SHORT_WAYS = ("emin_bits", "keep", "half", "clamp", "magic", "quanta", "quantum")


def _short_ways(fmt: Format) -> dict[str, int]:
    """What the short ways of the usual formats need, in binary32; no quanta where they do not reach."""
    drop = BINARY32.precision - fmt.precision
    wide = fmt.emin == BINARY32.emin
    quantum = fmt.emin - fmt.precision + 1
    short = -127 <= quantum <= 127 and not wide
    return {
        "emin_bits": 0 if wide else max(fmt.emin + 127, 0) << 23,
        "keep": -(1 << drop),
        "half": (1 << drop >> 1) - 1,
        "clamp": _bits(2.0 ** (fmt.emax + 1)) if fmt.emax < 127 else 0,
        "magic": drop << 23,
        "quanta": _bits(2.0**-quantum) if short else 0,
        "quantum": _bits(2.0**quantum) if short else 0,
    }


def _few_bits(count: int, variant: str) -> dict[str, int]:
    """Random words of which ``count`` bits are left: see scalar's `stochastic`."""
    rest = 32 - count
    return {
        "word_mask": (1 << 32) - (1 << rest),
        "word_add": {"A": 0, "B": 1 << rest >> 1, "C": (1 << rest >> 1) - 1}[variant],
        "word_odd": int(variant == "C"),
        "word_shift": rest,
    }


def _loop(fmt: Format, rounding: str, rule: Rule, carrier: Format, random_bits: int | None) -> str:
    """The fastest loop that is exact for this rule."""
    kind = "stochastic" if rounding == "stochastic" else "deterministic"
    if carrier != BINARY32:
        return f"{kind}64"
    wide = fmt.emin == BINARY32.emin
    usual = (
        fmt.subnormal and fmt.has_negative_zero and rule.drop > 0 and (wide or rule.quanta) and not rule.flush
    )
    if not usual:
        return kind
    same = rule.infinite == rule.over_positive  # an infinity becomes what an overflow does
    if rounding == "stochastic":
        return "stochastic_usual" if same and random_bits is None else "stochastic"
    if rounding == "nearest_even" and same and wide:
        return "nearest_even_wide"
    if rounding == "nearest_even" and same and fmt.emax + 1 + 127 + rule.drop <= 254:
        return "nearest_even_magic"
    # With one significand bit the last kept bit of a float is its exponent's, not its significand's.
    return "deterministic_usual" if fmt.precision > 1 else "deterministic"


def _bits(x: float, carrier: Format = BINARY32) -> int:
    if carrier == BINARY32:
        return int(np.float32(x).view(np.uint32))
    return int(np.float64(x).view(np.uint64))


@cache
def tally_words(fmt: Format | None, carrier: Format = BINARY32) -> npt.NDArray[Any]:
    """Bits of the smallest normal value, the largest finite one, and the least magnitude that overflows.

    A finite value overflows if nearest_even, with no bound on the exponent, takes it past the largest finite
    value: so saturating, which hides that, is counted too.
    """
    infinity = _bits(math.inf, carrier)
    words = [0, infinity, infinity]
    if fmt is not None:
        smallest_normal = _bits(fmt.smallest_normal, carrier)  # 0 where the carrier's numbers are all normal
        fmt = carried(fmt, carrier)
        # Half a quantum past the largest value is a tie: it goes up if that value's last bit is 1.
        threshold = fmt.max + math.ldexp(1.0, fmt.emax - fmt.precision)
        bits = _bits(threshold, carrier) if threshold <= carrier.max else infinity
        odd = fmt.max_code % 2 == 1 or (fmt.precision == 1 and not fmt.ties_to_even_code)
        words = [smallest_normal, _bits(fmt.max, carrier), bits + (not odd)]
    return np.array(words, f"u{carrier.bits // 8}")
