"""Loops over arrays on the CPU; no arithmetic of their own.

A loop body runs over a whole small slice, ``for i in range(x.size)``: that is the form Numba vectorises. In
place has a loop of its own: the two-array loop on one array would fail its overlap check and run element by
element.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from .layout import AMAX, COUNTS, ERRORS, FIELDS, HISTOGRAM, LOWEST, POWERS, SQUARES, SUMS
from .scalar import (
    ABS,
    FRACTION,
    HALF,
    IMPLICIT,
    INF,
    LOW,
    ONE,
    SIGN,
    ZERO,
    U,
    W,
    bits_of,
    deterministic,
    encode_bits,
    float_of,
    nearest_even_magic,
    nearest_even_wide,
    philox,
    rule_of,
    stochastic,
    stochastic_usual,
)

OPTIONS = dict(nogil=True, error_model="numpy", cache=True)
BLOCK = 1024  # elements that 256 Philox calls serve
TWO_32 = np.float32(2.0**32)
ZEROS, NEGATIVE, INFINITIES, NANS = (
    FIELDS.index(name) for name in ("zero", "negative", "positive_infinity", "nan")
)
UNDER, SUBNORMAL, OVER = (FIELDS.index(name) for name in ("underflow", "subnormal", "overflow"))


@intrinsic
def pointer(typing_context, address, like):
    """The address, an int, as a pointer to values of ``like``'s type.

    A torch tensor comes as its data_ptr: making a numpy array of a parameter would pin its storage.
    """

    def build(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.CPointer(like)(types.intp, like), build


@njit(inline="always")
def words_at(address, n):
    return carray(pointer(address, U(0)), (n,), U)


@njit(**OPTIONS)
def _magic(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = nearest_even_magic(x[i], rule)


@njit(**OPTIONS)
def _magic_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = nearest_even_magic(x[i], rule)


@njit(**OPTIONS)
def _wide(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = nearest_even_wide(x[i], rule)


@njit(**OPTIONS)
def _wide_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = nearest_even_wide(x[i], rule)


@njit(**OPTIONS)
def _deterministic(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = deterministic(x[i], rule)


@njit(**OPTIONS)
def _deterministic_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = deterministic(x[i], rule)


@njit(**OPTIONS)
def _usual(x, random, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = stochastic_usual(x[i], random[i], rule)


@njit(**OPTIONS)
def _usual_inplace(x, random, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = stochastic_usual(x[i], random[i], rule)


@njit(**OPTIONS)
def _stochastic(x, random, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = stochastic(x[i], random[i], rule)


@njit(**OPTIONS)
def _stochastic_inplace(x, random, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = stochastic(x[i], random[i], rule)


@njit(**OPTIONS)
def nearest_even_magic_loop(x, out, n, words):
    """Addresses of ``n`` float32, and the words of a Rule; ``x`` may be ``out``."""
    if x == out:
        _magic_inplace(words_at(x, n), words)
    else:
        _magic(words_at(x, n), words_at(out, n), words)


@njit(**OPTIONS)
def nearest_even_wide_loop(x, out, n, words):
    if x == out:
        _wide_inplace(words_at(x, n), words)
    else:
        _wide(words_at(x, n), words_at(out, n), words)


@njit(**OPTIONS)
def deterministic_loop(x, out, n, words):
    if x == out:
        _deterministic_inplace(words_at(x, n), words)
    else:
        _deterministic(words_at(x, n), words_at(out, n), words)


@njit(**OPTIONS)
def _fill(low, high, first, key):
    """Philox words of consecutive counters: (0, 1) into ``low``, (2, 3) into ``high``."""
    c2, c3, k0, k1 = key[0], key[1], key[2], key[3]
    for t in range(low.size):
        j = W(first + W(t))
        a, b = philox(W(j & LOW), W(j >> HALF), c2, c3, k0, k1)
        low[t] = a
        high[t] = b


@njit(**OPTIONS)
def fill_block(random, block, key):
    """The 1024 words of one block; ``key`` is uint64 (step low, step high, seed, stream)."""
    lanes = random.view(np.uint64)
    _fill(lanes[:256], lanes[256:], W(W(block) * W(256)), key)


@njit(**OPTIONS)
def stochastic_usual_loop(x, out, n, words, offset, key):
    """Like the loops above, with the global index of the first element and the key of `fill_block`."""
    random = np.empty(BLOCK, U)
    source, target = words_at(x, n), words_at(out, n)
    first = offset // BLOCK
    for block in range(first, (offset + n + BLOCK - 1) // BLOCK):
        fill_block(random, block, key)
        start, stop = max(block * BLOCK, offset), min((block + 1) * BLOCK, offset + n)
        drawn = random[start - block * BLOCK : stop - block * BLOCK]
        piece = source[start - offset : stop - offset]
        if x == out:
            _usual_inplace(piece, drawn, words)
        else:
            _usual(piece, drawn, target[start - offset : stop - offset], words)


@njit(**OPTIONS)
def stochastic_loop(x, out, n, words, offset, key):
    random = np.empty(BLOCK, U)
    source, target = words_at(x, n), words_at(out, n)
    first = offset // BLOCK
    for block in range(first, (offset + n + BLOCK - 1) // BLOCK):
        fill_block(random, block, key)
        start, stop = max(block * BLOCK, offset), min((block + 1) * BLOCK, offset + n)
        drawn = random[start - block * BLOCK : stop - block * BLOCK]
        piece = source[start - offset : stop - offset]
        if x == out:
            _stochastic_inplace(piece, drawn, words)
        else:
            _stochastic(piece, drawn, target[start - offset : stop - offset], words)


@njit(**OPTIONS)
def encode_loop(x, out, n, words, like):
    """Codes, of ``like``'s unsigned type, of ``n`` float32 that are values of the format."""
    rule = rule_of(words)
    source = words_at(x, n)
    target = carray(pointer(out, like), (n,))
    for i in range(source.size):
        target[i] = encode_bits(source[i], rule)


LOOPS = {
    "nearest_even_magic": nearest_even_magic_loop,
    "nearest_even_wide": nearest_even_wide_loop,
    "deterministic": deterministic_loop,
    "stochastic_usual": stochastic_usual_loop,
    "stochastic": stochastic_loop,
}


@njit(**OPTIONS)
def _what_rounding_did(x, q, words, counts, sums):
    """The counts that need the rounded value too; a loop of its own, since this one vectorises."""
    emin, largest, threshold = words[0], words[1], words[2]
    under, subnormal, over, error, square = 0, 0, 0, 0.0, 0.0
    for i in range(x.size):
        a, r = U(x[i] & ABS), U(q[i] & ABS)
        finite = a < INF
        under += np.int64((a > ZERO) & (r == ZERO))
        subnormal += np.int64((r > ZERO) & (r < emin))
        over += np.int64(finite & ((r > largest) | (a >= threshold)))
        value, rounded = np.float64(float_of(a)), np.float64(float_of(r))
        square += value * value if finite else 0.0
        error += (value - rounded) * (value - rounded) if finite & (r < INF) else 0.0
    counts[UNDER] += under
    counts[SUBNORMAL] += subnormal
    counts[OVER] += over
    sums[SQUARES] += square
    sums[ERRORS] += error


@njit(**OPTIONS)
def _what_it_is(x, bins, counts):
    """Binades by a table of (exponent field, is a power of two); returns the largest finite one's bits."""
    largest = ZERO
    for i in range(x.size):
        u = x[i]
        a = U(u & ABS)
        if U(a - ONE) < U(INF - ONE):  # neither zero nor infinite nor NaN
            largest = a if a > largest else largest
            counts[NEGATIVE] += np.int64(u >> U(31))
            if a < IMPLICIT:  # a float32 subnormal: as a normal value, 2**32 up
                a = U(bits_of(float_of(a) * TWO_32) | U(SIGN))
            bins[a >> U(23), np.int64(U(a & FRACTION) == ZERO)] += 1
        elif a == ZERO:
            counts[ZEROS] += 1
        elif a == INF:
            counts[INFINITIES + np.int64(u >> U(31))] += 1
        else:
            counts[NANS] += 1
    return largest


@njit(**OPTIONS)
def tally_loop(x, q, n, words, counts_at, sums_at):
    """Add what ``n`` float32 at ``x``, rounded to those at ``q``, come to."""
    counts = carray(pointer(counts_at, np.int64(0)), (COUNTS,))
    sums = carray(pointer(sums_at, np.float64(0)), (SUMS,))
    source, rounded = words_at(x, n), words_at(q, n)
    bins = np.zeros((512, 2), np.int64)
    counts[0] += n
    largest = ZERO
    for start in range(0, n, 4 * BLOCK):
        piece = source[start : min(n, start + 4 * BLOCK)]
        top = _what_it_is(piece, bins, counts)
        largest = top if top > largest else largest
        _what_rounding_did(piece, rounded[start : min(n, start + 4 * BLOCK)], words, counts, sums)
    sums[AMAX] = max(sums[AMAX], np.float64(float_of(largest)))
    for field in range(512):
        exponent = field - 127 if field < 256 else field - 256 - 127 - 32
        both = bins[field, 0] + bins[field, 1]
        if both > 0:
            counts[HISTOGRAM + exponent - LOWEST] += both
            counts[POWERS + exponent - LOWEST] += bins[field, 1]


@njit(**OPTIONS)
def merge(counts_at, sums_at, counts, sums):
    """Add a part's counts and sums to those at the addresses."""
    total = carray(pointer(counts_at, np.int64(0)), (COUNTS,))
    total_sums = carray(pointer(sums_at, np.float64(0)), (SUMS,))
    for i in range(COUNTS):
        total[i] += counts[i]
    total_sums[AMAX] = max(total_sums[AMAX], sums[AMAX])
    for i in range(AMAX + 1, SUMS):
        total_sums[i] += sums[i]
