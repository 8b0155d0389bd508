"""Matrix products rounded as they accumulate: loops, whose arithmetic is that of `scalar` and `sums`.

Each element of the result is a sum of its own, from +0.0 on and in the order of the factors. So loops run
over the elements of a row of the result, which vectorises; their sums stay in the first-level cache, and the
columns of the right factor that belong to them in a panel of the second-level one.
"""

from __future__ import annotations

import numpy as np

from .cpu import loop
from .scalar import (
    U,
    bits64_of,
    bits_of,
    deterministic64,
    double_of,
    float_of,
    nearest_even_magic,
    nearest_even_wide,
    rule_of,
)
from .sums import fma, half, sum_to_odd, sum_to_odd64

TILE = 256  # columns of the result that are summed at a time
PANEL = 256  # rows of a panel: TILE * PANEL float32 are 256 KB
UNROLL = 8

# How terms are added: what rounds the product, where something does, and what rounds the sum.
ANY = 0  # float64; everything else is float32, and faster
ANY_PRODUCT = 1
HALF = 2  # binary16 by F16C
HALF_PRODUCT = 3
MAGIC = 4  # scalar's nearest_even_magic
MAGIC_PRODUCT = 5
WIDE = 6  # scalar's nearest_even_wide
WIDE_PRODUCT = 7
SINGLE = 8  # float32 itself
SINGLE_PRODUCT = 9

PRODUCT, INNER, OUTER = 0, 1, 2  # rows of the rules: of products, of sums, of the sums of chunks


@loop
def _any(acc, row, x, rules):
    rule = rule_of(rules[INNER])
    for j in range(acc.size):
        total = sum_to_odd64(np.float64(acc[j]), np.float64(x) * np.float64(row[j]))
        acc[j] = double_of(deterministic64(bits64_of(total), rule))


@loop
def _any_product(acc, row, x, rules):
    of_product, rule = rule_of(rules[PRODUCT]), rule_of(rules[INNER])
    for j in range(acc.size):
        product = double_of(deterministic64(bits64_of(np.float64(x) * np.float64(row[j])), of_product))
        total = sum_to_odd64(np.float64(acc[j]), product)
        acc[j] = double_of(deterministic64(bits64_of(total), rule))


@loop
def _half(acc, row, x):
    for j in range(acc.size):
        acc[j] = half(sum_to_odd(np.float32(acc[j]), np.float32(np.float32(x) * np.float32(row[j]))))


@loop
def _half_product(acc, panel, x):
    for j in range(acc.size):
        total = np.float32(acc[j])
        for k in range(UNROLL):
            total = half(total + half(np.float32(x[k]) * np.float32(panel[k, j])))
        acc[j] = total


@loop
def _half_product_one(acc, row, x):
    for j in range(acc.size):
        acc[j] = half(np.float32(acc[j]) + half(np.float32(x) * np.float32(row[j])))


@loop
def _magic(acc, row, x, rules):
    rule = rule_of(rules[INNER])
    for j in range(acc.size):
        total = sum_to_odd(np.float32(acc[j]), np.float32(np.float32(x) * np.float32(row[j])))
        acc[j] = float_of(nearest_even_magic(bits_of(total), rule))


@loop
def _magic_product(acc, row, x, rules):
    of_product, rule = rule_of(rules[PRODUCT]), rule_of(rules[INNER])
    for j in range(acc.size):
        product = float_of(nearest_even_magic(bits_of(np.float32(x) * np.float32(row[j])), of_product))
        acc[j] = float_of(nearest_even_magic(bits_of(np.float32(np.float32(acc[j]) + product)), rule))


@loop
def _wide(acc, row, x, rules):
    rule = rule_of(rules[INNER])
    for j in range(acc.size):
        total = sum_to_odd(np.float32(acc[j]), np.float32(np.float32(x) * np.float32(row[j])))
        acc[j] = float_of(nearest_even_wide(bits_of(total), rule))


@loop
def _wide_product(acc, row, x, rules):
    of_product, rule = rule_of(rules[PRODUCT]), rule_of(rules[INNER])
    for j in range(acc.size):
        product = float_of(nearest_even_wide(bits_of(np.float32(x) * np.float32(row[j])), of_product))
        acc[j] = float_of(nearest_even_wide(bits_of(np.float32(np.float32(acc[j]) + product)), rule))


@loop
def _single(acc, panel, x):
    for j in range(acc.size):
        total = np.float32(acc[j])
        for k in range(UNROLL):
            total = fma(np.float32(x[k]), np.float32(panel[k, j]), total)
        acc[j] = total


@loop
def _single_one(acc, row, x):
    for j in range(acc.size):
        acc[j] = fma(np.float32(x), np.float32(row[j]), np.float32(acc[j]))


@loop
def _single_product(acc, row, x):
    for j in range(acc.size):
        acc[j] = np.float32(acc[j]) + np.float32(np.float32(x) * np.float32(row[j]))


@loop
def _accumulate(way, acc, panel, x, rules, rules64):
    """Add the products of the numbers ``x`` and the panel's rows to the sums, one after the other."""
    whole = x.size - x.size % UNROLL if way == HALF_PRODUCT or way == SINGLE else 0
    for k in range(0, whole, UNROLL):
        if way == SINGLE:
            _single(acc, panel[k : k + UNROLL], x[k : k + UNROLL])
        else:
            _half_product(acc, panel[k : k + UNROLL], x[k : k + UNROLL])
    for k in range(whole, x.size):
        if way == ANY:
            _any(acc, panel[k], x[k], rules64)
        elif way == ANY_PRODUCT:
            _any_product(acc, panel[k], x[k], rules64)
        elif way == HALF:
            _half(acc, panel[k], x[k])
        elif way == HALF_PRODUCT:
            _half_product_one(acc, panel[k], x[k])
        elif way == MAGIC:
            _magic(acc, panel[k], x[k], rules)
        elif way == MAGIC_PRODUCT:
            _magic_product(acc, panel[k], x[k], rules)
        elif way == WIDE:
            _wide(acc, panel[k], x[k], rules)
        elif way == WIDE_PRODUCT:
            _wide_product(acc, panel[k], x[k], rules)
        elif way == SINGLE:
            _single_one(acc, panel[k], x[k])
        else:
            _single_product(acc, panel[k], x[k])


@loop
def _fill_panel(panel, b, k, j, count, width):
    for row in range(count):
        source, target = b[k + row, j : j + width], panel[row]
        for column in range(source.size):
            target[column] = source[column]


@loop
def multiply(a, b, c, a_of, b_of, start, stop, chunk, way, outer_way, rules, rules64):
    """Rows ``start`` to ``stop`` of a stack of matrix products, added to what is in ``c``.

    Args:
        a: Left factors (any, rows, terms), float32 or float64.
        b: Right factors (any, terms, columns), of the same dtype.
        c: Results (batches, rows, columns), of the same dtype; rows are counted through all of them.
        a_of: For each batch the place of its left factor.
        b_of: The same for the right one.
        chunk: Terms whose sum is made apart and then added; 0: none are.
        way: How terms are added, a number from above.
        outer_way: How sums of chunks are, one of those without a product.
        rules: uint32, the words of three rules: PRODUCT, INNER, OUTER.
        rules64: The same for float64.
    """
    rows, terms, columns = a.shape[1], a.shape[2], b.shape[2]
    block = PANEL if chunk == 0 else chunk * max(1, PANEL // chunk)
    block = min(block, terms)
    panel, partial = np.empty((block, TILE), a.dtype), np.empty(TILE, a.dtype)
    one = np.ones(1, a.dtype)
    for batch in range(start // rows, (stop + rows - 1) // rows):
        left, right, result = a[a_of[batch]], b[b_of[batch]], c[batch]
        first, last = max(start - batch * rows, 0), min(stop - batch * rows, rows)
        for j in range(0, columns, TILE):
            width = min(TILE, columns - j)
            for k in range(0, terms, block):
                count = min(block, terms - k)
                _fill_panel(panel, right, k, j, count, width)
                for row in range(first, last):
                    acc, x = result[row, j : j + width], left[row, k : k + count]
                    if chunk == 0:
                        _accumulate(way, acc, panel, x, rules, rules64)
                        continue
                    for i in range(0, count, chunk):
                        part = partial[:width]
                        part[:] = 0
                        _accumulate(way, part, panel[i:], x[i : i + chunk], rules, rules64)
                        _accumulate(outer_way, acc, part.reshape(1, width), one, rules[1:], rules64[1:])


@loop
def measure(x):
    """What the finite float32 numbers of a 1-d array need: significand bits and exponents.

    Returns:
        Bits of the longest significand, exponent of the lowest bit of all, exponent of the largest number;
        0, 0, 0 if all are zero.
    """
    together, least, most = U(0), U(255), U(0)
    for i in range(x.size):
        u = bits_of(x[i])
        field = U(U(u >> U(23)) & U(255))
        counts = field < U(255) and U(u << U(1)) > U(0)
        significand = U(U(u & U(0x007FFFFF)) | (U(0x00800000) if field > U(0) else U(0)))
        field = field if field > U(0) else U(1)
        together = U(together | (significand if counts else U(0)))
        field_low = field if counts else U(255)
        field_high = field if counts else U(0)
        least = field_low if field_low < least else least
        most = field_high if field_high > most else most
    if together == U(0):
        return 0, 0, 0
    zeros = 0
    while (together >> np.uint32(zeros)) & U(1) == U(0):
        zeros += 1
    return 24 - zeros, np.int64(least) - 150 + zeros, np.int64(most) - 127
