"""Loops over blocks that share a scale, one after the other in memory; the arithmetic is in `scales`.

Blocks of float32 whose scales are powers of two of everyday size take a short way, in which a block is
multiplied by the inverse of its scale, rounded like any array, and multiplied back: all exact.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .cpu import loop, pointer, words_at
from .scalar import ABS, SIGN, U, bits_of, float_of, nearest_even_magic, rule_of, stochastic_usual
from .scales import element, element_stochastic, how_of, scale_of

F = np.float32
PIECE = 4096  # elements at a time
NEAR, FAR = U((127 - 40) << 23), U((127 + 40) << 23)  # float32 magnitudes of everyday size


@loop
def _scale(x, how_words, scale_words, limit):
    """The scale of one block."""
    amax, nan, infinite = 0.0, False, False
    for i in range(x.size):
        a = abs(np.float64(x[i]))
        amax = a if a < np.inf and a > amax else amax
        nan = nan or a != a
        infinite = infinite or a == np.inf
    return scale_of(amax, nan, infinite, how_of(how_words), rule_of(scale_words), limit)


@loop
def _round_block(x, out, drawn, s, unit, words):
    """Round one block: elements in units of ``s``, times ``unit``."""
    rule = rule_of(words)
    if drawn.size > 0:
        for i in range(x.size):
            out[i] = element_stochastic(np.float64(x[i]), s, drawn[i], rule) * unit
    else:
        for i in range(x.size):
            out[i] = element(np.float64(x[i]), s, rule) * unit


@loop
def blocks_loop(x, out, drawn, scales, size, plan, tensor_scale, coded, like):
    """Round blocks of ``size`` numbers of ``like``'s type at ``x`` to ``out``, which may be ``x``.

    Args:
        x: Address.
        out: Address.
        drawn: A random word for each element, or none.
        scales: Gets the scale of each block, without the array's.
        size: Elements of a block.
        plan: Words of a How, of the scale's Rule and of the element's, in binary64.
        tensor_scale: Of the array.
        coded: Whether to write elements in units of their scale.
        like: A zero of the dtype.
    """
    how, scale_words, words, largest = plan
    n = scales.size * size
    source, target = carray(pointer(x, like), (n,)), carray(pointer(out, like), (n,))
    for block in range(scales.size):
        here = slice(block * size, (block + 1) * size)
        scales[block] = _scale(source[here], how, scale_words, largest * tensor_scale)
        s = scales[block] * tensor_scale
        _round_block(source[here], target[here], drawn[here], s, 1.0 if coded else s, words)


@loop
def _pairs(x, out):
    for i in range(out.size):
        a, b = U(x[2 * i] & ABS), U(x[2 * i + 1] & ABS)
        out[i] = a if a > b else b


@loop
def _largest(x, size, out, half, quarter):
    """Bits of the largest magnitude of each block, NaN above all; the last two are scratch."""
    n = x.size
    if size % 16 == 0 and n <= PIECE:
        # Neighbours in pairs, again and again: a form that vectorises.
        _pairs(x, half[: n // 2])
        _pairs(half[: n // 2], quarter[: n // 4])
        _pairs(quarter[: n // 4], half[: n // 8])
        if size % 32 == 0:
            _pairs(half[: n // 8], quarter[: n // 16])
            _pairs(quarter[: n // 16], half[: n // 32])
            x, size = half, size // 32
        else:
            _pairs(half[: n // 8], quarter[: n // 16])
            x, size = quarter, size // 16
    if size == 1:
        for block in range(out.size):
            out[block] = U(x[block] & ABS)
        return
    for block in range(out.size):
        largest = U(0)
        for i in range(block * size, (block + 1) * size):
            a = U(x[i] & ABS)
            largest = a if a > largest else largest
        out[block] = largest


@njit(inline="always")
def _exponent(top, how_words):
    """Exponent of a block's scale: how_words[1:3] are emax and add."""
    return np.int32(U(top + U(how_words[2] >> 29)) >> U(23)) - np.int32(127 + how_words[1])


@loop
def _short_scales(tops, how_words, inverse, s):
    """Scales of blocks by their largest magnitudes, and inverses; how many are not of everyday size."""
    others = 0
    for block in range(tops.size):
        exponent = _exponent(tops[block], how_words)
        usual = everyday(tops[block], exponent, how_words[3], how_words[4])
        exponent = exponent if usual else np.int32(0)
        inverse[block] = float_of(U(U(np.int32(127) - exponent) << U(23)))
        s[block] = float_of(U(U(np.int32(127) + exponent) << U(23)))
        others += np.int64(not usual)
    return others


@njit(inline="always")
def everyday(top, exponent, low, high):
    return top >= NEAR and top <= FAR and exponent >= low and exponent <= high


@loop
def _nearest(x, size, out, inverse, s, words, zero_sign):
    rule = rule_of(words)
    for block in range(s.size):
        unit, times = s[block], inverse[block]
        numbers, results = x[block * size : (block + 1) * size], out[block * size : (block + 1) * size]
        for i in range(numbers.size):
            u = numbers[i]
            r = nearest_even_magic(bits_of(float_of(U(u & ABS)) * times), rule)
            sign = U(u & (SIGN if r > U(0) else zero_sign))
            results[i] = U(bits_of(float_of(r) * unit) | sign)


@loop
def _stochastic(x, size, drawn, out, inverse, s, words, zero_sign):
    rule = rule_of(words)
    for block in range(s.size):
        unit, times = s[block], inverse[block]
        here = slice(block * size, (block + 1) * size)
        numbers, words_drawn, results = x[here], drawn[here], out[here]
        for i in range(numbers.size):
            u = numbers[i]
            r, _ = stochastic_usual(bits_of(float_of(U(u & ABS)) * times), words_drawn[i], rule)
            sign = U(u & (SIGN if r > U(0) else zero_sign))
            results[i] = U(bits_of(float_of(r) * unit) | sign)


@loop
def _round_others(x, drawn, out, tops, scales, size, plan):
    """Round the blocks whose scales are not of everyday size."""
    how, scale_words, words, largest = plan
    numbers, results = x.view(F), out.view(F)
    for block in range(tops.size):
        here = slice(block * size, (block + 1) * size)
        if not everyday(tops[block], _exponent(tops[block], how), how[3], how[4]):
            unit = _scale(numbers[here], how, scale_words, largest)
            scales[block] = unit
            _round_block(numbers[here], results[here], drawn[here], unit, unit, words)


@loop
def _copy(x, out):
    for i in range(x.size):
        out[i] = x[i]


@loop
def short_loop(x, out, drawn, scales, size, plan, short):
    """`blocks_loop` of float32, whose scales are powers of two.

    ``short``: words of the element's Rule in binary32, and the bit of a zero's sign.
    """
    short_words, zero_sign = short
    n, many = scales.size * size, max(1, PIECE // size)
    source, target = words_at(x, n), words_at(out, n)
    tops, half, quarter = np.empty(many, U), np.empty(PIECE // 2, U), np.empty(PIECE // 4, U)
    inverse, units, rounded = np.empty(many, F), np.empty(many, F), np.empty(many * size, U)
    for first in range(0, scales.size, many):
        count = min(many, scales.size - first)
        piece = slice(first * size, (first + count) * size)
        top, s, times = tops[:count], units[:count], inverse[:count]
        _largest(source[piece], size, top, half, quarter)
        others = _short_scales(top, plan[0], times, s)
        # In place the input must outlive this, and a two-array loop on one array would not vectorise.
        place = rounded[: count * size] if x == out else target[piece]
        if drawn.size > 0:
            _stochastic(source[piece], size, drawn[piece], place, times, s, short_words, zero_sign)
        elif size == 32:
            _nearest(source[piece], 32, place, times, s, short_words, zero_sign)
        elif size == 16:
            _nearest(source[piece], 16, place, times, s, short_words, zero_sign)
        else:
            _nearest(source[piece], size, place, times, s, short_words, zero_sign)
        for block in range(count):
            scales[first + block] = s[block]
        if others > 0:
            _round_others(source[piece], drawn[piece], place, top, scales[first : first + count], size, plan)
        if x == out:
            _copy(place, target[piece])


@loop
def largest_finite(x, n, like):
    """The largest finite magnitude of ``n`` numbers at ``x``."""
    source = carray(pointer(x, like), (n,))
    amax = 0.0
    for i in range(n):
        a = abs(np.float64(source[i]))
        amax = a if a < np.inf and a > amax else amax
    return amax


@loop
def count_blocks(x, q, scales, size, words):
    """How many elements became subnormals of their block, and how many saturated.

    ``words``: of the element's format the smallest normal value, and the least magnitude past the largest.
    """
    subnormal, over = 0, 0
    for block in range(scales.size):
        s = scales[block]
        smallest, threshold = words[0] * s, words[1] * s
        for i in range(block * size, (block + 1) * size):
            a, r = abs(np.float64(x[i])), abs(np.float64(q[i]))
            subnormal += np.int64(r > 0.0 and r < smallest)
            over += np.int64(a < np.inf and a >= threshold)
    return subnormal, over
