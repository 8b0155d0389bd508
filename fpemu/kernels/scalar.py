"""All the arithmetic: one float's bits in, one float's bits out, for CPU and CUDA alike.

Integers throughout, but for one magic addition, so that no device can flush a subnormal, fuse two operations
or round another way. Selects, no branches: loops over these functions vectorise. Numba widens ``uint32 op
uint32`` to uint64, so every cast is written.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

U = np.uint32
W = np.uint64
ABS, SIGN, INF, QUIET = U(0x7FFFFFFF), U(0x80000000), U(0x7F800000), U(0x00400000)
FRACTION, IMPLICIT = U(0x007FFFFF), U(0x00800000)
ZERO, ONE = U(0), U(1)

# What a format, a rounding and an overflow policy come to for the kernels: uint32 numbers, made in rules.py.
Rule = namedtuple(
    "Rule",
    [
        # the format
        "drop",  # significand bits dropped in a normal value, 24 - precision
        "emin",  # biased float32 exponent of the smallest normal value
        "extra",  # bits dropped below emin on top of one a binade: 0, or precision - 1 without subnormals
        "low",  # bits fewer dropped in float32 subnormals: 1 in a format whose emin is -127, else 0
        "smallest",  # bits of the smallest positive value
        "max",  # bits of the largest finite value
        # the rounding: what is added below the last kept bit before truncation, see `deterministic`
        "mask_positive",
        "mask_negative",
        "mask_odd",
        "tie_odd",
        "tie",
        "shift",
        # what special cases become: bits without sign
        "over_positive",
        "over_negative",
        "inf_positive",
        "inf_negative",
        "zero",  # +-0.0
        "under",  # a nonzero value rounded to zero
        "below_zero",  # a negative value, in an unsigned format
        "sign",  # ANDed to the sign bit: 0 in unsigned formats
        "zero_sign",  # ANDed to the sign bit of a zero
        # the short ways of the usual formats
        "emin_bits",  # bits of the smallest normal value; 0 where every binade drops the same
        "keep",  # mask of the kept bits of a normal value
        "half",  # just under half a quantum: 2**(drop - 1) - 1
        "clamp",  # bits of the power of two above the largest finite value
        "magic",  # added to an exponent field: the power of two whose last place is one quantum
        "quanta",  # bits of 1 / the quantum of subnormals
        "quantum",  # bits of the quantum of subnormals
        # codes
        "code_shift",  # fraction bits of a code, precision - 1
        "code_skip",  # 1 where code 0 is no zero
        "code_sign",
        "code_inf",
        "code_nan",
    ],
)


@njit(inline="always")
def rule_of(words):
    """The Rule that an array of uint32 holds, as numbers that stay in registers."""
    return Rule(
        words[0],
        words[1],
        words[2],
        words[3],
        words[4],
        words[5],
        words[6],
        words[7],
        words[8],
        words[9],
        words[10],
        words[11],
        words[12],
        words[13],
        words[14],
        words[15],
        words[16],
        words[17],
        words[18],
        words[19],
        words[20],
        words[21],
        words[22],
        words[23],
        words[24],
        words[25],
        words[26],
        words[27],
        words[28],
        words[29],
        words[30],
        words[31],
        words[32],
    )


@intrinsic
def float_of(typing_context, bits):
    """float32 with these uint32 bits."""
    return types.float32(types.uint32), lambda context, builder, sig, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic
def bits_of(typing_context, x):
    """uint32 bits of a float32."""
    return types.uint32(types.float32), lambda context, builder, sig, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@njit(inline="always")
def nearest_even_magic(u, rule):
    """Round to nearest even by adding and subtracting a power of two whose last place is one quantum.

    For formats with subnormals, -0.0 and room above them in float32 (at most 7 exponent bits), where an
    infinity becomes what an overflow does.
    """
    a = U(u & ABS)
    clamped = a if a < rule.clamp else rule.clamp
    field = U(clamped & INF)
    field = field if field > rule.emin_bits else rule.emin_bits
    magic = float_of(U(field + rule.magic))
    r = bits_of((float_of(clamped) + magic) - magic)
    r = rule.over_positive if r > rule.max else r
    r = U(a | QUIET) if a > INF else r
    return U(r | U(u & SIGN))


@njit(inline="always")
def nearest_even_wide(u, rule):
    """Round to nearest even where every binade, float32's subnormals too, drops the same: bfloat16, tf32."""
    a = U(u & ABS)
    odd = U(U(a >> U(rule.drop & U(31))) & ONE)
    r = U(U(a + U(rule.half + odd)) & rule.keep)
    r = rule.over_positive if r > rule.max else r
    r = U(a | QUIET) if a > INF else r
    return U(r | U(u & SIGN))


@njit(inline="always")
def stochastic_usual(u, word, rule):
    """`stochastic` for signed formats with subnormals and -0.0: the same bits in half the instructions."""
    a = U(u & ABS)
    # A carry out of the dropped bits: their fraction and the word's top bits reach one quantum.
    r = U(U(a + U(word >> U(U(U(32) - rule.drop) & U(31)))) & rule.keep)
    # Subnormals in units of their quantum; scaling by a power of two is exact.
    small = float_of(a if a < rule.emin_bits else ZERO) * float_of(rule.quanta)
    whole = np.int32(small)
    fraction = U((small - np.float32(whole)) * np.float32(4294967296.0))
    whole = np.int32(whole + (np.int32(1) if fraction > U(~word) else np.int32(0)))
    r = bits_of(np.float32(whole) * float_of(rule.quantum)) if a < rule.emin_bits else r
    r = rule.over_positive if r > rule.max else r
    r = rule.inf_positive if a == INF else r
    r = U(a | QUIET) if a > INF else r
    return U(r | U(u & SIGN))


@njit(inline="always")
def split(a, rule):
    """Significand of a float32 magnitude, its exponent field (subnormals: 1), how many bits to drop."""
    field = U(a >> U(23))
    normal = field > ZERO
    significand = U(U(a & FRACTION) | (IMPLICIT if normal else ZERO))
    drop = U(rule.drop - (ZERO if normal else rule.low))
    field = field if normal else ONE
    # Below emin the quantum stays put, so each binade down drops one more. Past 26 nothing changes but the
    # odds.
    below = U(U(rule.emin - field) + rule.extra)
    drop = U(drop + (below if field < rule.emin else ZERO))
    return significand, field, drop


@njit(inline="always")
def finish(u, a, quanta, field, drop, rule):
    """Bits of ``quanta << drop`` in units of the last place of exponent ``field``, and the special cases."""
    # Adding, not or-ing, lets a carry out of the significand raise the exponent. Past 24 dropped bits
    # only the smallest value is left.
    r = U(U(U(field - ONE) << U(23)) + U(quanta << U(drop & U(31))))
    r = rule.smallest if drop > U(24) else r
    r = rule.under if quanta == ZERO else r
    positive = u < SIGN
    over = rule.over_positive if positive else rule.over_negative
    infinite = rule.inf_positive if positive else rule.inf_negative
    r = over if r > rule.max else r
    r = infinite if a == INF else r
    r = rule.zero if a == ZERO else r
    sign = U(u & rule.sign)
    r = rule.below_zero if sign != U(u & SIGN) and a > ZERO else r
    sign = U(sign & rule.zero_sign) if r == ZERO else sign
    return U(u | QUIET) if a > INF else U(r | sign)


@njit(inline="always")
def deterministic(u, rule):
    """Round one float32 by any mode but stochastic.

    Every mode is: add something below the last kept bit, then truncate. Directed modes add all ones or
    nothing by the sign; to_odd all ones if the last kept bit is 0; nearest modes half of (all ones + 1 if a
    tie goes up).
    """
    a = U(u & ABS)
    significand, field, drop = split(a, rule)
    drop = drop if drop < U(26) else U(26)
    odd = U(U(significand >> U(drop & U(31))) & ONE)
    ones = U(U(ONE << U(drop & U(31))) - ONE)
    mask = rule.mask_positive if u < SIGN else rule.mask_negative
    mask = U(mask & (rule.mask_odd if odd > ZERO else ABS))
    tie = U(U(odd & rule.tie_odd) | rule.tie)
    addend = U(U(U(ones & mask) + tie) >> U(rule.shift & U(31)))
    quanta = U(U(significand + addend) >> U(drop & U(31)))
    return finish(u, a, quanta, field, drop, rule)


@njit(inline="always")
def stochastic(u, word, rule):
    """Round one float32 up with probability floor(dropped fraction * 2**32) / 2**32."""
    a = U(u & ABS)
    significand, field, drop = split(a, rule)
    # The dropped fraction's first 32 bits: the significand at the top of a word, shifted by how far the
    # binary point of the quantum lies from there.
    top = U(significand << U(8))
    left = U(top << U(U(U(24) - drop) & U(31)))
    right = U(drop - U(25))
    right = right if right < U(31) else U(31)
    fraction = left if drop < U(25) else U(U(top >> ONE) >> U(right & U(31)))
    fraction = fraction if drop > ZERO else ZERO
    drop = drop if drop < U(26) else U(26)
    carry = ONE if fraction > U(~word) else ZERO
    quanta = U(U(significand >> U(drop & U(31))) + carry)
    return finish(u, a, quanta, field, drop, rule)


@njit(inline="always")
def encode_bits(u, rule):
    """Code, as uint32, of a float32 that is a value of the format."""
    a = U(u & ABS)
    significand, _, drop = split(a, rule)
    drop = drop if drop < U(26) else U(26)
    field = U(a >> U(23))
    field = U(field - rule.emin) if field > rule.emin else ZERO
    code = U(U(U(significand >> U(drop & U(31))) + U(field << U(rule.code_shift & U(31)))) - rule.code_skip)
    code = rule.code_inf if a == INF else code
    code = rule.code_nan if a > INF else code
    return U(code | (rule.code_sign if u >= SIGN else ZERO))


# Philox4x32-10 in uint64 lanes that hold 32-bit words in their lower half: twice as fast on a CPU as 32-bit
# lanes.
LOW, HALF = W(0xFFFFFFFF), W(32)
M0, M1, W0, W1 = W(0xD2511F53), W(0xCD9E8D57), W(0x9E3779B9), W(0xBB67AE85)


@njit(inline="always")
def philox(c0, c1, c2, c3, k0, k1):
    """Words (0, 1) and (2, 3) of Philox4x32-10, as two uint64, lower word first; arguments below 2**32."""
    for _ in range(10):
        low = W(W(c0 & LOW) * M0)
        high = W(W(c2 & LOW) * M1)
        c0 = W(W(W(high >> HALF) ^ c1) ^ k0)
        c2 = W(W(W(low >> HALF) ^ c3) ^ k1)
        c1 = high
        c3 = low
        k0 = W(W(k0 + W0) & LOW)
        k1 = W(W(k1 + W1) & LOW)
    return W(W(c0 & LOW) | W(c1 << HALF)), W(W(c2 & LOW) | W(c3 << HALF))
