"""The arithmetic of blocks that share a scale, for CPU and CUDA alike; in binary64, where it is exact."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from .scalar import ABS64, INF64, W, bits64_of, deterministic64, double_of, stochastic64

# What a block format comes to for the kernels, all int64.
How = namedtuple(
    "How",
    [
        "power",  # 1 where scales are powers of two
        "emax",  # exponent of the element's largest value
        "add",  # added to the bits of a largest magnitude before its exponent is taken: the scale rule
        "low",  # exponent of the least scale that is a power of two
        "high",  # of the largest
        "keeps_nan",  # 1 where an element may be NaN
        "keeps_infinity",  # 1 where an infinity has an element to become
    ],
)
TINY = 2.0**-700  # far below half of any smallest element


@njit(inline="always")
def how_of(words):
    return How(words[0], words[1], words[2], words[3], words[4], words[5], words[6])


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c, rounded once."""
    double = types.float64
    return double(double, double, double), lambda context, builder, sig, args: builder.fma(*args)


@njit(inline="always")
def quotient(x, s):
    """x / s for s > 0, rounded to odd: on the side of every shorter number, a tie too, where x / s is."""
    a = W(bits64_of(x) & ABS64)
    q = x / s
    rest = fma(-q, s, x)
    inexact = a < INF64 and rest != 0.0
    beyond = (rest < 0.0) != (x < 0.0)
    bits = bits64_of(q)
    bits = W(bits - W(1)) if inexact and beyond else bits
    bits = W(bits | W(1)) if inexact else bits
    size = W(bits & ABS64)
    # Neither zero nor infinity for a number that is none.
    size = bits64_of(TINY) if a > W(0) and size < bits64_of(TINY) else size
    size = W(INF64 - W(1)) if a < INF64 and size >= INF64 else size
    return W(size | W(bits64_of(x) & W(~ABS64)))


@njit(inline="always")
def scale_of(amax, nan, infinite, how, scale_rule, limit):
    """The scale of a block: ``limit`` is the element's largest value, times the array's scale.

    Args:
        amax: Largest finite magnitude, binary64.
        nan: Whether there is a NaN in the block.
        infinite: Whether there is an infinity.
        how: A How.
        scale_rule: A Rule of binary64, of the scale's format.
        limit: What an amax with scale one would be.
    """
    exponent = np.int64(W(bits64_of(amax) + W(how.add)) >> W(52)) - np.int64(1023) - how.emax
    exponent = exponent if exponent > how.low else how.low
    exponent = exponent if exponent < how.high else how.high
    power = double_of(W(W(exponent + np.int64(1023)) << W(52)))
    other = double_of(deterministic64(quotient(amax, limit), scale_rule))
    scale = power if how.power > 0 else other
    spoiled = (nan and how.keeps_nan == 0) or (infinite and how.keeps_infinity == 0)
    return np.nan if spoiled else scale


@njit(inline="always")
def in_units(x, s):
    """Bits of ``x`` in units of its block's scale; a zero where the scale is zero."""
    y = quotient(x, s if s != 0.0 else 1.0)
    y = W(y & W(~ABS64)) if s == 0.0 and W(y & ABS64) < INF64 else y
    return y if s == s else bits64_of(s)


@njit(inline="always")
def element(x, s, rule):
    """What ``x`` becomes, in units of its block's scale."""
    return double_of(deterministic64(in_units(x, s), rule))


@njit(inline="always")
def element_stochastic(x, s, word, rule):
    return double_of(stochastic64(in_units(x, s), word, rule))
