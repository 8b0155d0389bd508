"""All the arithmetic: one float's bits in, one float's bits out, for CPU and CUDA alike.

Integers throughout, but for a few exact float operations in the short ways, so that no device can flush a
subnormal, fuse two operations or round another way. Selects, no branches: loops over these functions
vectorise. Numba widens ``uint32 op uint32`` to uint64, so every cast is written.
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
ABS64, INF64, FRACTION64 = W((1 << 63) - 1), W(0x7FF << 52), W((1 << 52) - 1)

# What a format, a rounding and an overflow policy come to for the kernels: numbers of the carrier's width,
# made in rules.py. The carrier is what the values are stored in: float32 or float64.
Rule = namedtuple(
    "Rule",
    [
        # the format
        "drop",  # significand bits dropped in a normal value: the carrier's precision - precision
        "emin",  # the carrier's biased exponent of the smallest normal value
        "extra",  # bits dropped below emin on top of one a binade: 0, or precision - 1 without subnormals
        "low",  # bits fewer dropped in the carrier's subnormals: 1 if emin is one below the carrier's, else 0
        "smallest",  # bits of the smallest positive value
        "max",  # bits of the largest finite value
        "tie_field",  # 1 where the exponent's last bit says whether a code is odd, else 0
        "tie_parity",  # that bit of an even code; 1 where tie_field is 0
        "flush",  # bits of the value below which an input counts as zero; 0: none does
        # the rounding: what is added below the last kept bit before truncation, see `deterministic`
        "mask_positive",
        "mask_negative",
        "mask_odd",
        "tie_odd",
        "tie",
        "shift",
        # the random word's bits that count, and how the dropped fraction is rounded to as many: see
        # `stochastic`
        "word_mask",
        "word_add",
        "word_odd",
        "word_shift",
        # what special cases become: bits without sign
        "over_positive",
        "over_negative",
        "infinite",
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
    """The Rule that an array of unsigned integers holds, as numbers that stay in registers."""
    return Rule(
        words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7], words[8], words[9],
        words[10], words[11], words[12], words[13], words[14], words[15], words[16], words[17], words[18],
        words[19], words[20], words[21], words[22], words[23], words[24], words[25], words[26], words[27],
        words[28], words[29], words[30], words[31], words[32], words[33], words[34], words[35], words[36],
        words[37], words[38],
    )  # fmt: skip


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


@intrinsic
def double_of(typing_context, bits):
    """float64 with these uint64 bits."""
    return types.float64(types.uint64), lambda context, builder, sig, args: builder.bitcast(
        args[0], ir.DoubleType()
    )


@intrinsic
def bits64_of(typing_context, x):
    """uint64 bits of a float64."""
    return types.uint64(types.float64), lambda context, builder, sig, args: builder.bitcast(
        args[0], ir.IntType(64)
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
    """`stochastic`, all 32 bits, for the formats of `deterministic_usual`: the same bits in half the
    instructions.

    An infinity becomes what an overflow does. Returns also a number below 2**16 if the word's lower half
    could change the result.
    """
    a = U(u & ABS)
    small = a < rule.emin_bits
    # Subnormals in units of their quantum; scaling by a power of two is exact.
    scaled = float_of(a if small else ZERO) * float_of(rule.quanta)
    whole = np.int32(scaled)
    below = U((scaled - np.float32(whole)) * np.float32(4294967296.0))
    fraction = below if small else U(a << U(U(U(32) - rule.drop) & U(31)))
    limit = U(~word)
    up = fraction > limit
    r = U(U(a & rule.keep) + (U(ONE << U(rule.drop & U(31))) if up else ZERO))
    whole = np.int32(whole + (np.int32(1) if up else np.int32(0)))
    r = bits_of(np.float32(whole) * float_of(rule.quantum)) if small else r
    r = rule.over_positive if r > rule.max else r
    r = U(a | QUIET) if a > INF else r
    return U(r | U(u & SIGN)), U(fraction ^ limit)


def arithmetic(U, precision):
    """`addend`, `deterministic`, `stochastic` and `encode_bits` for every format, in one carrier.

    Args:
        U: Unsigned type of the carrier's width.
        precision: The carrier's significand bits.
    """
    width = 8 * U(0).itemsize
    ZERO, ONE = U(0), U(1)
    FIELD = U(precision - 1)  # where the exponent field starts
    IMPLICIT = U(1 << (precision - 1))
    FRACTION = U(IMPLICIT - ONE)
    SIGN = U(1 << (width - 1))
    ABS = U(SIGN - ONE)
    INF = U(ABS - FRACTION)
    QUIET = U(IMPLICIT >> ONE)
    PLACES = U(width - 1)  # masks a shift, whose operand must stay below the width
    PRECISION, DEEP = U(precision), U(precision + 2)
    TOP = U(width - precision)
    WORD = U(width - 32)
    BELOW = U((1 << (width - 32)) - 1)

    @njit(inline="always")
    def split(a, rule):
        """Significand of a magnitude, its exponent field (subnormals: 1), how many bits to drop."""
        field = U(a >> FIELD)
        normal = field > ZERO
        significand = U(U(a & FRACTION) | (IMPLICIT if normal else ZERO))
        drop = U(rule.drop - (ZERO if normal else rule.low))
        field = field if normal else ONE
        # Below emin the quantum stays put, so each binade down drops one more.
        below = U(U(rule.emin - field) + rule.extra)
        drop = U(drop + (below if U(a >> FIELD) < rule.emin else ZERO))
        return significand, field, drop

    @njit(inline="always")
    def finish(u, a, quanta, field, drop, rule):
        """Bits of ``quanta << drop`` in units of the last place of exponent ``field``; the special cases."""
        # Adding, not or-ing, lets a carry out of the significand raise the exponent. Past the carrier's
        # precision only the smallest value is left.
        r = U(U(U(field - ONE) << FIELD) + U(quanta << U(drop & PLACES)))
        r = rule.smallest if drop > PRECISION else r
        r = rule.under if quanta == ZERO else r
        over = rule.over_positive if u < SIGN else rule.over_negative
        r = over if r > rule.max else r
        r = rule.infinite if a == INF else r
        r = rule.zero if a == ZERO else r
        sign = U(u & rule.sign)
        r = rule.below_zero if sign != U(u & SIGN) and a > ZERO else r
        sign = U(sign & rule.zero_sign) if r == ZERO else sign
        return U(u | QUIET) if U(u & ABS) > INF else U(r | sign)

    @njit(inline="always")
    def magnitude(u, rule):
        """Bits without sign; those of zero for an input that is flushed."""
        a = U(u & ABS)
        return ZERO if a < rule.flush else a

    @njit(inline="always")
    def addend(u, odd, drop, rule):
        """What a mode adds below the last kept bit, of which ``odd`` is 1 if it is set.

        Directed modes add all ones or nothing by the sign; to_odd all ones if the last kept bit is 0; nearest
        modes half of (all ones + 1 if a tie goes up).
        """
        ones = U(U(ONE << drop) - ONE)
        mask = rule.mask_positive if u < SIGN else rule.mask_negative
        mask = U(mask & (rule.mask_odd if odd > ZERO else ABS))
        tie = U(U(odd & rule.tie_odd) | rule.tie)
        return U(U(U(ones & mask) + tie) >> U(rule.shift & PLACES))

    @njit(inline="always")
    def deterministic(u, rule):
        """Round one number by any mode but stochastic: add something below the last kept bit, truncate."""
        a = magnitude(u, rule)
        significand, field, drop = split(a, rule)
        # Past the significand's bits nothing changes any more.
        drop = drop if drop < DEEP else DEEP
        odd = U(U(significand >> drop) & ONE)
        # P3109 asks whether the code is odd: with one significand bit, its exponent.
        odd = U(odd & U(U(U(a >> FIELD) & rule.tie_field) ^ rule.tie_parity))
        quanta = U(U(significand + addend(u, odd, drop, rule)) >> drop)
        return finish(u, a, quanta, field, drop, rule)

    @njit(inline="always")
    def stochastic(u, word, rule):
        """Round one number up if its dropped fraction and the word's fraction, 32 bits of each, reach one.

        With N random bits the word's N upper ones count, and the fraction is first rounded to as many: down
        (A), a tie up (B), a tie to even (C). Adding to the word what that rounding adds to the fraction is
        the same.
        """
        a = magnitude(u, rule)
        significand, field, drop = split(a, rule)
        # The dropped fraction: the significand at the top, shifted by how far the binary point of the
        # quantum lies from there. What the shift loses shows in the last bit, where only a tie reads it.
        top = U(significand << TOP)
        left = U(top << U(U(PRECISION - drop) & PLACES))
        away = U(drop - U(PRECISION + ONE))
        away = away if away < PLACES else PLACES
        right = U(U(top >> ONE) >> U(away & PLACES))
        lost = drop > PRECISION and U(right << away) != U(top >> ONE)
        fraction = right if drop > PRECISION else left
        fraction = fraction if drop > ZERO else ZERO
        lost = lost or U(fraction & BELOW) != ZERO
        fraction = U(fraction >> WORD)
        sticky = ONE if lost and rule.word_odd > ZERO else ZERO
        fraction = U(fraction | sticky)
        odd = U(U(fraction >> rule.word_shift) & rule.word_odd)
        drawn = U(U(U(U(word) & rule.word_mask) + rule.word_add) + odd)
        carry = ONE if fraction > U(U(0xFFFFFFFF) - drawn) else ZERO
        drop = drop if drop < DEEP else DEEP
        quanta = U(U(significand >> drop) + carry)
        return finish(u, a, quanta, field, drop, rule)

    @njit(inline="always")
    def encode_bits(u, rule):
        """Code of a number that is a value of the format."""
        a = U(u & ABS)
        significand, _, drop = split(a, rule)
        drop = drop if drop < DEEP else DEEP
        field = U(a >> FIELD)
        field = U(field - rule.emin) if field > rule.emin else ZERO
        code = U(U(U(significand >> drop) + U(field << U(rule.code_shift & PLACES))) - rule.code_skip)
        code = rule.code_inf if a == INF else code
        code = rule.code_nan if a > INF else code
        return U(code | (rule.code_sign if u >= SIGN else ZERO))

    return addend, deterministic, stochastic, encode_bits


addend, deterministic, stochastic, encode_bits = arithmetic(np.uint32, 24)
_, deterministic64, stochastic64, encode_bits64 = arithmetic(np.uint64, 53)


@njit(inline="always")
def deterministic_usual(u, rule):
    """`deterministic` for signed formats with subnormals and -0.0: the same bits in half the instructions."""
    a = U(u & ABS)
    field = U(a >> U(23))
    significand = U(U(a & FRACTION) | (IMPLICIT if field > ZERO else ZERO))
    field = field if field > ONE else ONE
    small = a < rule.emin_bits
    drop = U(rule.drop + U(rule.emin - field)) if small else rule.drop
    drop = drop if drop < U(26) else U(26)
    base = significand if small else a
    odd = U(U(base >> drop) & ONE)
    quanta = U(U(base + addend(u, odd, drop, rule)) >> drop)
    # Subnormals in units of their quantum; scaling by a power of two is exact.
    r = bits_of(np.float32(np.int32(quanta)) * float_of(rule.quantum)) if small else U(quanta << drop)
    over = rule.over_positive if u < SIGN else rule.over_negative
    r = over if r > rule.max else r
    r = rule.infinite if a == INF else r
    r = U(a | QUIET) if a > INF else r
    return U(r | U(u & SIGN))


# Where a number is counted: twice its exponent field, and one more for an exact power of two. Subnormals
# count as what they are 2**32 up, from field 256 on; in float64 2**64 up, from 2048 on. No number has 0.
PLACES, PLACES64 = 1024, 2 * (2048 + 65)
ZERO_PLACE, NAN_PLACE = 0, 1
INFINITY_PLACE, INFINITY_PLACE64 = 2 * 255, 2 * 2047  # and -infinity the one after


@njit(inline="always")
def place(u):
    """Where a float32 is counted."""
    a = U(u & ABS)
    small = a < IMPLICIT
    lifted = U(bits_of(float_of(a if small else ZERO) * np.float32(4294967296.0)) | SIGN)
    a = lifted if small and a > ZERO else a
    power = U(1) if U(a & FRACTION) == ZERO else ZERO
    where = U(U(U(a >> U(23)) << ONE) | power)
    where = U(INFINITY_PLACE + 1) if a == INF and u >= SIGN else where
    where = U(INFINITY_PLACE) if a == INF and u < SIGN else where
    where = U(NAN_PLACE) if U(u & ABS) > INF else where
    return U(ZERO_PLACE) if U(u & ABS) == ZERO else where


@njit(inline="always")
def place64(u):
    """Where a float64 is counted."""
    a = W(u & ABS64)
    small = a < W(1 << 52)
    lifted = W(bits64_of(double_of(a if small else W(0)) * 18446744073709551616.0) + W(2048 << 52))
    a = lifted if small and a > W(0) else a
    power = W(1) if W(a & FRACTION64) == W(0) else W(0)
    where = W(W(W(a >> W(52)) << W(1)) | power)
    where = W(INFINITY_PLACE64 + 1) if a == INF64 and u > INF64 else where
    where = W(INFINITY_PLACE64) if a == INF64 and u == INF64 else where
    where = W(NAN_PLACE) if W(u & ABS64) > INF64 else where
    return W(ZERO_PLACE) if W(u & ABS64) == W(0) else where


@njit(inline="always")
def lost(u, q, emin, largest, threshold):
    """What rounding ``u`` to ``q`` did: underflow, subnormal, overflow; the magnitude and its error."""
    a, r = U(u & ABS), U(q & ABS)
    finite = a < INF
    value, rounded = np.float64(float_of(a if finite else ZERO)), np.float64(float_of(r if r < INF else ZERO))
    error = value - rounded if finite and r < INF else 0.0
    return (
        a > ZERO and r == ZERO,
        r > ZERO and r < emin,
        finite and ((r > largest and a > largest) or a >= threshold),
        value,
        error,
    )


@njit(inline="always")
def lost64(u, q, emin, largest, threshold):
    """`lost` for float64."""
    a, r = W(u & ABS64), W(q & ABS64)
    finite = a < INF64
    value, rounded = double_of(a if finite else W(0)), double_of(r if r < INF64 else W(0))
    error = value - rounded if finite and r < INF64 else 0.0
    return (
        a > W(0) and r == W(0),
        r > W(0) and r < emin,
        finite and ((r > largest and a > largest) or a >= threshold),
        value,
        error,
    )


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
