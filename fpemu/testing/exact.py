"""The right results, of whole arrays: the reference decides on all but numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats import Format
from ..reference import round_value
from .calls import Floats


class Split(NamedTuple):
    """Magnitudes as ``(quanta + remainder) * 2**exponent``, ``0 <= remainder < 1``; 0 if not finite."""

    magnitude: Floats
    quanta: Floats
    remainder: Floats
    exponent: npt.NDArray[np.int64]


def split_quanta(x: npt.NDArray[Any], fmt: Format) -> Split:
    """Magnitudes in units of the last place of the format."""
    # float32 numbers of at most 24 bits over a quantum, a power of two: each step is exact in float64.
    with np.errstate(invalid="ignore"):
        magnitude = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64)
    binade = np.frexp(magnitude)[1].astype(np.int64) - 1
    lowest = math.frexp(fmt.smallest_subnormal)[1] - 1
    exponent = np.where(binade < fmt.emin, lowest, binade - fmt.precision + 1)
    scaled = np.ldexp(magnitude, -exponent)
    quanta = np.floor(scaled)
    return Split(magnitude, quanta, scaled - quanta, exponent)


def expected(x: npt.NDArray[np.float32], fmt: Format, rounding: str, overflow: str) -> Floats:
    """`reference.round_value` of a whole array, to any mode but stochastic."""
    split = split_quanta(x, fmt)
    negative = np.signbit(x)
    inexact, tie = split.remainder > 0, split.remainder == 0.5
    odd = split.quanta % 2 == 1
    if fmt.precision == 1 and fmt.ties_to_even_code:
        odd = (split.quanta > 0) & ((split.exponent - fmt.emin + 1) % 2 == 1)
    up = {
        "nearest_even": (split.remainder > 0.5) | (tie & odd),
        "nearest_away": split.remainder >= 0.5,
        "toward_zero": np.zeros_like(tie),
        "toward_positive": inexact & ~negative,
        "toward_negative": inexact & negative,
        "to_odd": inexact & ~odd,
    }[rounding]
    return _value(x, split, up, fmt, rounding, overflow)


def _value(
    x: npt.NDArray[np.float32],
    split: Split,
    up: npt.NDArray[np.bool_],
    fmt: Format,
    rounding: str,
    overflow: str,
) -> Floats:
    """The result where the magnitude went up or stayed below; the reference decides on all but numbers."""

    def exact(number: float | Fraction) -> float:
        return round_value(number, fmt, rounding, overflow=overflow, word=0)

    rounded = np.ldexp(split.quanta + up, split.exponent)
    over = rounded > fmt.max
    if not fmt.has_zero:
        rounded[rounded == 0] = fmt.smallest_subnormal
    negative = np.signbit(x)
    result = np.where(negative & ((rounded != 0) | fmt.has_negative_zero), -rounded, rounded)
    huge = Fraction(2) ** 2000
    result[over] = np.where(negative, exact(-huge), exact(huge))[over]
    if not fmt.signed:
        result[x < 0] = exact(-1.0)
    for special in (0.0, -0.0, math.inf, -math.inf):
        result[(x == special) & (negative == (math.copysign(1, special) < 0))] = exact(special)
    result[np.isnan(x)] = math.nan
    return result


def neighbours(x: npt.NDArray[np.float32], fmt: Format, overflow: str) -> tuple[Floats, Floats]:
    """What ``x`` may become: down and up in magnitude, the same where nothing is left to chance."""
    split = split_quanta(x, fmt)
    inexact = split.remainder > 0
    down = _value(x, split, np.zeros_like(inexact), fmt, "stochastic", overflow)
    return down, _value(x, split, inexact, fmt, "stochastic", overflow)
