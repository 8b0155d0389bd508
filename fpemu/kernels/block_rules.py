"""From a block format, a rounding and an overflow policy to the numbers that the loops of `blocks` take."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..blocks import BlockFormat
from ..formats import BINARY32, BINARY64
from .rules import plan
from .scalar import Rule
from .scales import How

SCALE_ROUNDINGS = {"floor": "toward_zero", "round": "nearest_even", "ceil": "toward_positive"}
SHORT_LOOPS = {"nearest_even": "nearest_even_magic", "stochastic": "stochastic_usual"}


class BlockPlan(NamedTuple):
    """How to round to a block format.

    Attributes:
        words: Of a How, of the scale's Rule and the element's in binary64, and the element's largest value.
        short: For the short way of float32, the words of the element's Rule in binary32 and the sign of a
            zero; None where it does not reach.
    """

    words: tuple[Any, Any, Any, float]
    short: tuple[Any, np.uint32] | None


@cache
def block_plan(
    fmt: BlockFormat, rounding: str, overflow: str, random_bits: int | None, variant: str, flush: bool
) -> BlockPlan:
    """What the loops take; finite numbers saturate, whatever the policy."""
    few = random_bits, variant, flush
    policy = "saturate" if overflow == "saturate" else "propagate"
    words = plan(fmt.element, rounding, policy, BINARY64, *few).words
    zero_sign = 0 if fmt.twos_complement else 1 << 31
    if fmt.twos_complement:
        words = words.copy()
        words[Rule._fields.index("zero_sign")] = 0
        words.setflags(write=False)
    scale = plan(fmt.scale, SCALE_ROUNDINGS[fmt.scale_rule], "saturate", BINARY64).words
    return BlockPlan(
        (_how(fmt, policy), scale, words, fmt.element.max), _short(fmt, rounding, few, np.uint32(zero_sign))
    )


def _how(fmt: BlockFormat, policy: str) -> Any:
    element, scale = fmt.element, fmt.scale
    # In bits of binary64's fraction: a carry into the exponent is what makes a scale twice as large.
    significand = math.frexp(element.max)[0] * 2 - 1
    add = {
        "floor": 0,
        "round": 1 << (52 - element.precision),
        "ceil": (1 << 52) - 1 - int(significand * 2**52),
    }[fmt.scale_rule]
    how = How(
        power=int(fmt.power_of_two),
        emax=element.emax,
        add=add,
        low=math.frexp(scale.smallest_subnormal)[1] - 1,
        high=scale.emax,
        keeps_nan=int(element.has_nan),
        keeps_infinity=int(policy == "saturate" or element.has_infinity or element.has_nan),
    )
    words = np.array(how, np.int64)
    words.setflags(write=False)
    return words


def _short(fmt: BlockFormat, rounding: str, few: Any, zero_sign: np.uint32) -> Any:
    element = fmt.element
    if not fmt.power_of_two or abs(element.emax) > 40 or element.smallest_subnormal < 2.0**-60:
        return None
    steps = plan(element, rounding, "saturate", BINARY32, *few)
    return (steps.words, zero_sign) if SHORT_LOOPS.get(rounding) == steps.loop else None
