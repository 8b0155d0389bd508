"""Matrix products whose sums are rounded at random as they accumulate: loops, in float64.

They run over blocks of elements of the result that share calls of Philox: whatever the shape, no word is
drawn in vain.
"""

from __future__ import annotations

import numpy as np

from .cpu import BLOCK, HALF_WORD, draw, fill_block, loop
from .gemm import INNER, OUTER, PRODUCT
from .scalar import U, bits64_of, deterministic64, double_of, rule_of, stochastic64
from .sums import folded, stochastic_short, sum_to_odd64


@loop
def _stochastic(values, drawn, words):
    rule = rule_of(words)
    for i in range(values.size):
        values[i] = double_of(stochastic64(bits64_of(values[i]), drawn[i], rule))


@loop
def _add_stochastic(sums, terms, drawn, words):
    rule = rule_of(words)
    for i in range(sums.size):
        sums[i] = double_of(stochastic64(bits64_of(sum_to_odd64(sums[i], terms[i])), drawn[i], rule))


@loop
def _try_short(sums, terms, upper, out, words):
    """Add and round with the upper halves of the words alone; whether a lower half could change a result."""
    rule = rule_of(words)
    closest = U(0xFFFFFFFF)
    for i in range(sums.size):
        word = U(U(upper[i]) << U(16))
        r, near = stochastic_short(bits64_of(sum_to_odd64(sums[i], terms[i])), word, rule)
        out[i] = double_of(r)
        closest = near if near < closest else closest
    return closest < HALF_WORD


@loop
def _short(sums, terms, upper, lower, out, words):
    rule = rule_of(words)
    for i in range(sums.size):
        word = U(U(U(upper[i]) << U(16)) | U(lower[i]))
        out[i] = double_of(stochastic_short(bits64_of(sum_to_odd64(sums[i], terms[i])), word, rule)[0])


@loop
def _copy(x, out):
    for i in range(x.size):
        out[i] = x[i]


@loop
def _add_at_random(sums, terms, first, key, words, short, drawn, halves, tried):
    """Add terms to a block of sums, from global index ``first`` on; the last three are room to work in."""
    if not short:
        draw(drawn[: sums.size], first, key)
        _add_stochastic(sums, terms, drawn, words)
        return
    block = first // BLOCK
    start = first - block * BLOCK
    upper, lower, out = halves[0, start:], halves[1, start:], tried[: sums.size]
    fill_block(halves[0], block, 0, key)
    if _try_short(sums, terms, upper, out, words):
        fill_block(halves[1], block, 1, key)
        _short(sums, terms, upper, lower, out, words)
    _copy(out, sums)


@loop
def _add(sums, terms, words):
    rule = rule_of(words)
    for i in range(sums.size):
        sums[i] = double_of(deterministic64(bits64_of(sum_to_odd64(sums[i], terms[i])), rule))


@loop
def _scaled(row, x, terms):
    for j in range(row.size):
        terms[j] = np.float64(x) * np.float64(row[j])


@loop
def _fill_terms(terms, a, b, a_of, b_of, k, start):
    """The products number ``k`` of consecutive elements of the result, the first of which is ``start``."""
    rows, columns = a.shape[1], b.shape[2]
    done = 0
    while done < terms.size:
        row, column = divmod(start + done, columns)
        batch = row // rows
        width = min(columns - column, terms.size - done)
        x = a[a_of[batch], row - batch * rows, k]
        _scaled(b[b_of[batch], k, column : column + width], x, terms[done : done + width])
        done += width


@loop
def _fold(key, number, room):
    room[:2] = key[:2]
    room[2], room[3] = folded(number, key[2], key[3])


@loop
def multiply_stochastic(a, b, c, a_of, b_of, start, stop, chunk, random, short, rules64, offset, keys):
    """Elements ``start`` to ``stop`` of a stack of matrix products, row by row, with sums rounded at random.

    Element ``i``'s sum after term ``k`` draws word ``offset + i`` of the key of sums folded with ``k``, and
    its product that of the key of products; the sum after chunk ``n`` that of the key of chunks with ``n``.

    Args:
        a, b, c, a_of, b_of, chunk, rules64: As for `multiply`.
        random: Whether products, sums of terms and sums of chunks are rounded at random; without chunks
            sums of terms are, with chunks those of chunks.
        short: Of the same three, whether `stochastic_short` is exact for them.
        offset: Global index of the result's first element.
        keys: uint64 (3, 4): a key as `fill_block` takes it for products, sums and sums of chunks.
    """
    terms, flat = a.shape[2], c.reshape(-1)
    sums, partial, products, tried = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    drawn, halves, key = np.empty(BLOCK, np.uint32), np.empty((2, BLOCK), np.uint16), np.empty(4, np.uint64)
    first = offset + start
    while first < offset + stop:
        last = min((first // BLOCK + 1) * BLOCK, offset + stop)
        n = last - first
        total, part, product, word = sums[:n], partial[:n], products[:n], drawn[:n]
        total[:] = 0.0
        part[:] = 0.0
        for k in range(terms):
            _fill_terms(product, a, b, a_of, b_of, k, first - offset)
            if random[PRODUCT]:
                _fold(keys[PRODUCT], k, key)
                draw(word, first, key)
                _stochastic(product, word, rules64[PRODUCT])
            sum_of = part if chunk > 0 else total
            if random[INNER]:
                _fold(keys[INNER], k, key)
                rule = rules64[INNER]
                _add_at_random(sum_of, product, first, key, rule, short[INNER], drawn, halves, tried)
            else:
                _add(sum_of, product, rules64[INNER])
            if chunk > 0 and ((k + 1) % chunk == 0 or k + 1 == terms):
                _fold(keys[OUTER], k // chunk, key)
                rule = rules64[OUTER]
                _add_at_random(total, part, first, key, rule, short[OUTER], drawn, halves, tried)
                part[:] = 0.0
        for i in range(n):
            flat[first - offset + i] = total[i]
        first = last
