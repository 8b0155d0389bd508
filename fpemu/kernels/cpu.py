"""Loops over arrays on the CPU; no arithmetic of their own.

A loop body runs over a whole small slice, ``for i in range(x.size)``: that is the form Numba vectorises. In
place has a loop of its own: the two-array loop on one array would fail its overlap check and run element by
element. So has float64: made by one factory, loops would be closures over the arithmetic, and those never hit
numba's cache on disk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from .layout import (
    AMAX,
    COUNT,
    COUNTS,
    ERRORS,
    HISTOGRAM,
    INFINITIES,
    LOWEST,
    NANS,
    NEGATIVE,
    OVER,
    POWERS,
    SQUARES,
    SUBNORMAL,
    SUMS,
    UNDER,
    ZEROS,
)
from .scalar import (
    ABS,
    ABS64,
    HALF,
    INF,
    INF64,
    LOW,
    NAN_PLACE,
    PLACES,
    PLACES64,
    ZERO_PLACE,
    U,
    W,
    bits64_of,
    deterministic,
    deterministic64,
    deterministic_usual,
    double_of,
    encode_bits,
    encode_bits64,
    float_of,
    lost,
    lost64,
    nearest_even_magic,
    nearest_even_wide,
    philox,
    place,
    place64,
    rule_of,
    stochastic,
    stochastic64,
    stochastic_usual,
)

H = np.uint16
LOW32, HALF_WORD = U(0xFFFFFFFF), U(1 << 16)
OPTIONS = dict(nogil=True, error_model="numpy", cache=True)
BLOCK = 1024  # elements that 128 Philox calls serve, or 256 where a word's lower half matters


def loop(function):
    """njit, its compiled form kept on disk, stale when any file here changes; numba looks at one."""
    compiled = njit(**OPTIONS)(function)
    index = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if index is not None:
        index._source_stamp = STAMP
    return compiled


STAMP = tuple(
    (path.stat().st_mtime, path.stat().st_size) for path in sorted(Path(__file__).parent.glob("*.py"))
)


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


@njit(inline="always")
def words64_at(address, n):
    return carray(pointer(address, W(0)), (n,), W)


@loop
def _magic(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = nearest_even_magic(x[i], rule)


@loop
def _magic_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = nearest_even_magic(x[i], rule)


@loop
def _wide(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = nearest_even_wide(x[i], rule)


@loop
def _wide_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = nearest_even_wide(x[i], rule)


@loop
def _usual(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = deterministic_usual(x[i], rule)


@loop
def _usual_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = deterministic_usual(x[i], rule)


@loop
def _deterministic(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = deterministic(x[i], rule)


@loop
def _deterministic_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = deterministic(x[i], rule)


@loop
def _deterministic64(x, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = deterministic64(x[i], rule)


@loop
def _deterministic64_inplace(x, words):
    rule = rule_of(words)
    for i in range(x.size):
        x[i] = deterministic64(x[i], rule)


@loop
def nearest_even_magic_loop(x, out, n, words):
    """Addresses of ``n`` numbers, and the words of a Rule; ``x`` may be ``out``."""
    if x == out:
        _magic_inplace(words_at(x, n), words)
    else:
        _magic(words_at(x, n), words_at(out, n), words)


@loop
def nearest_even_wide_loop(x, out, n, words):
    if x == out:
        _wide_inplace(words_at(x, n), words)
    else:
        _wide(words_at(x, n), words_at(out, n), words)


@loop
def deterministic_usual_loop(x, out, n, words):
    if x == out:
        _usual_inplace(words_at(x, n), words)
    else:
        _usual(words_at(x, n), words_at(out, n), words)


@loop
def deterministic_loop(x, out, n, words):
    if x == out:
        _deterministic_inplace(words_at(x, n), words)
    else:
        _deterministic(words_at(x, n), words_at(out, n), words)


@loop
def deterministic64_loop(x, out, n, words):
    if x == out:
        _deterministic64_inplace(words64_at(x, n), words)
    else:
        _deterministic64(words64_at(x, n), words64_at(out, n), words)


@loop
def _fill(low, high, first, key):
    """Philox words of consecutive counters: (0, 1) into ``low``, (2, 3) into ``high``."""
    c2, c3, k0, k1 = key[0], key[1], key[2], key[3]
    for t in range(low.size):
        j = W(first + W(t))
        a, b = philox(W(j & LOW), W(j >> HALF), c2, c3, k0, k1)
        low[t] = a
        high[t] = b


@loop
def fill_block(halves, block, lower, key):
    """The upper or lower halves, uint16, of a block's words; ``key``: step low, step high, seed, stream."""
    lanes = halves.view(np.uint64)
    _fill(lanes[:128], lanes[128:], W(W(block) * W(256)) + W(128 * lower), key)


@loop
def draw(out, offset, key):
    """The words of consecutive elements, from a global index on."""
    upper, lower = np.empty(BLOCK, H), np.empty(BLOCK, H)
    for block in range(offset // BLOCK, (offset + out.size + BLOCK - 1) // BLOCK):
        fill_block(upper, block, 0, key)
        fill_block(lower, block, 1, key)
        for i in range(max(block * BLOCK, offset), min((block + 1) * BLOCK, offset + out.size)):
            place = i - block * BLOCK
            out[i - offset] = U(U(U(upper[place]) << U(16)) | U(lower[place]))


@loop
def _try_usual(x, upper, out, words):
    """Round with the upper halves alone; whether a lower half could change a result."""
    rule = rule_of(words)
    closest = LOW32
    for i in range(x.size):
        r, distance = stochastic_usual(x[i], U(U(upper[i]) << U(16)), rule)
        out[i] = r
        closest = distance if distance < closest else closest
    return closest < HALF_WORD


@loop
def _usual_whole(x, upper, lower, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i], _ = stochastic_usual(x[i], U(U(U(upper[i]) << U(16)) | U(lower[i])), rule)


@loop
def _copy(x, out):
    # `whole[:] = tried` took the in-place loop from 0.46 of a copy to 0.28.
    for i in range(x.size):
        out[i] = x[i]


@loop
def _stochastic(x, drawn, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = stochastic(x[i], drawn[i], rule)


@loop
def _stochastic64(x, drawn, out, words):
    rule = rule_of(words)
    for i in range(x.size):
        out[i] = stochastic64(x[i], drawn[i], rule)


@loop
def stochastic_usual_loop(x, out, n, words, offset, key):
    """Like the loops above, with the global index of the first element and the key of `fill_block`."""
    upper, lower, rounded = np.empty(BLOCK, H), np.empty(BLOCK, H), np.empty(BLOCK, U)
    source, target = words_at(x, n), words_at(out, n)
    for block in range(offset // BLOCK, (offset + n + BLOCK - 1) // BLOCK):
        start, stop = max(block * BLOCK, offset), min((block + 1) * BLOCK, offset + n)
        drawn = slice(start - block * BLOCK, stop - block * BLOCK)
        fill_block(upper, block, 0, key)
        piece, whole = source[start - offset : stop - offset], target[start - offset : stop - offset]
        # In place the input must outlive the first try.
        tried = rounded[: stop - start] if x == out else whole
        if _try_usual(piece, upper[drawn], tried, words):
            fill_block(lower, block, 1, key)
            _usual_whole(piece, upper[drawn], lower[drawn], tried, words)
        if x == out:
            _copy(tried, whole)


@loop
def stochastic_loop(x, out, n, words, offset, key):
    drawn = np.empty(BLOCK, U)
    source, target = words_at(x, n), words_at(out, n)
    for block in range(offset // BLOCK, (offset + n + BLOCK - 1) // BLOCK):
        start, stop = max(block * BLOCK, offset), min((block + 1) * BLOCK, offset + n)
        draw(drawn[: stop - start], start, key)
        piece = slice(start - offset, stop - offset)
        _stochastic(source[piece], drawn, target[piece], words)


@loop
def stochastic64_loop(x, out, n, words, offset, key):
    drawn = np.empty(BLOCK, U)
    source, target = words64_at(x, n), words64_at(out, n)
    for block in range(offset // BLOCK, (offset + n + BLOCK - 1) // BLOCK):
        start, stop = max(block * BLOCK, offset), min((block + 1) * BLOCK, offset + n)
        draw(drawn[: stop - start], start, key)
        piece = slice(start - offset, stop - offset)
        _stochastic64(source[piece], drawn, target[piece], words)


@loop
def encode_loop(x, out, n, words, like):
    """Codes, of ``like``'s unsigned type, of ``n`` numbers that are values of the format."""
    rule = rule_of(words)
    source = words_at(x, n)
    target = carray(pointer(out, like), (n,))
    for i in range(source.size):
        target[i] = encode_bits(source[i], rule)


@loop
def encode64_loop(x, out, n, words, like):
    rule = rule_of(words)
    source = words64_at(x, n)
    target = carray(pointer(out, like), (n,))
    for i in range(source.size):
        target[i] = encode_bits64(source[i], rule)


@loop
def sum_rows(rows, sums, words, compensated):
    """Sum each row from its first element on, in float64, every operation rounded."""
    rule = rule_of(words)
    for row in range(rows.shape[0]):
        total, lost = 0.0, 0.0
        for i in range(rows.shape[1]):
            term = rows[row, i]
            if compensated:
                term = double_of(deterministic64(bits64_of(term - lost), rule))
            after = double_of(deterministic64(bits64_of(total + term), rule)) if i > 0 else term
            if compensated and i > 0:
                gained = double_of(deterministic64(bits64_of(after - total), rule))
                lost = double_of(deterministic64(bits64_of(gained - term), rule))
            total = after
        sums[row] = total


@loop
def sum_rows_stochastic(rows, sums, words, drawn):
    """`sum_rows` with a random word for each element."""
    rule = rule_of(words)
    for row in range(rows.shape[0]):
        total = 0.0
        for i in range(rows.shape[1]):
            term = rows[row, i]
            total = double_of(stochastic64(bits64_of(total + term), drawn[row, i], rule)) if i > 0 else term
        sums[row] = total


LOOPS = {
    "nearest_even_magic": nearest_even_magic_loop,
    "nearest_even_wide": nearest_even_wide_loop,
    "deterministic_usual": deterministic_usual_loop,
    "deterministic": deterministic_loop,
    "deterministic64": deterministic64_loop,
    "stochastic_usual": stochastic_usual_loop,
    "stochastic": stochastic_loop,
    "stochastic64": stochastic64_loop,
}


@loop
def spread(places, counts, bias, lift):
    """Add counts by place (see scalar's ``place``) of a carrier of this bias to the counts of a tally."""
    top = 2 * bias + 1
    counts[COUNT] += places.sum()
    counts[ZEROS] += places[ZERO_PLACE]
    counts[NANS] += places[NAN_PLACE]
    counts[INFINITIES] += places[2 * top]
    counts[INFINITIES + 1] += places[2 * top + 1]
    for field in range(1, places.size // 2):
        both = places[2 * field] + places[2 * field + 1]
        if both > 0 and field != top:
            exponent = field - bias if field < top else field - top - 1 - bias - lift
            counts[HISTOGRAM + exponent - LOWEST] += both
            counts[POWERS + exponent - LOWEST] += places[2 * field + 1]


@loop
def _sum(parts):
    """The sum of a block, halved again and again: an order that vectorises, and the same each time."""
    half = parts.size // 2
    while half >= 8:
        for i in range(half):
            parts[i] += parts[half + i]
        half //= 2
    return parts[:8].sum()


@loop
def _scatter(at, places):
    # One after the other, additions to one place would wait for each other: four tables in turn.
    whole = at.size // 4 * 4
    for i in range(0, whole, 4):
        places[0, at[i]] += 1
        places[1, at[i + 1]] += 1
        places[2, at[i + 2]] += 1
        places[3, at[i + 3]] += 1
    for i in range(whole, at.size):
        places[0, at[i]] += 1


@loop
def _what_numbers_are(x, at):
    largest, negative = U(0), 0
    for i in range(x.size):
        at[i] = H(place(x[i]))
        a = U(x[i] & ABS)
        largest = a if a < INF and a > largest else largest
        negative += np.int64(a < INF and x[i] > U(INF) and a > U(0))
    return largest, negative


@loop
def _what_rounding_did(x, q, words, squares, errors, counts):
    emin, largest, threshold = words[0], words[1], words[2]
    under, subnormal, over = 0, 0, 0
    for i in range(x.size):
        lost_all, small, large, value, off = lost(x[i], q[i], emin, largest, threshold)
        under += np.int64(lost_all)
        subnormal += np.int64(small)
        over += np.int64(large)
        squares[i] = value * value
        errors[i] = off * off
    counts[UNDER] += under
    counts[SUBNORMAL] += subnormal
    counts[OVER] += over
    squares[x.size :] = 0
    errors[x.size :] = 0


@loop
def tally_loop(x, q, n, words, counts_at, sums_at):
    """Add what ``n`` numbers at ``x``, fewer than 2**31, rounded to those at ``q``, come to."""
    counts = carray(pointer(counts_at, np.int64(0)), (COUNTS,))
    sums = carray(pointer(sums_at, np.float64(0)), (SUMS,))
    source, rounded = words_at(x, n), words_at(q, n)
    places, at = np.zeros((4, PLACES), np.int32), np.empty(BLOCK, H)
    squares, errors = np.empty(BLOCK), np.empty(BLOCK)
    largest = U(0)
    for start in range(0, n, BLOCK):
        stop = min(n, start + BLOCK)
        most, negative = _what_numbers_are(source[start:stop], at)
        largest = most if most > largest else largest
        counts[NEGATIVE] += negative
        _scatter(at[: stop - start], places)
        _what_rounding_did(source[start:stop], rounded[start:stop], words, squares, errors, counts)
        sums[SQUARES] += _sum(squares)
        sums[ERRORS] += _sum(errors)
    sums[AMAX] = max(sums[AMAX], np.float64(float_of(largest)))
    spread(places.sum(0), counts, 127, 32)


@loop
def _what_numbers_are64(x, at):
    largest, negative = W(0), 0
    for i in range(x.size):
        at[i] = H(place64(x[i]))
        a = W(x[i] & ABS64)
        largest = a if a < INF64 and a > largest else largest
        negative += np.int64(a < INF64 and x[i] > W(INF64) and a > W(0))
    return largest, negative


@loop
def _what_rounding_did64(x, q, words, squares, errors, counts):
    emin, largest, threshold = words[0], words[1], words[2]
    under, subnormal, over = 0, 0, 0
    for i in range(x.size):
        lost_all, small, large, value, off = lost64(x[i], q[i], emin, largest, threshold)
        under += np.int64(lost_all)
        subnormal += np.int64(small)
        over += np.int64(large)
        squares[i] = value * value
        errors[i] = off * off
    counts[UNDER] += under
    counts[SUBNORMAL] += subnormal
    counts[OVER] += over
    squares[x.size :] = 0
    errors[x.size :] = 0


@loop
def tally64_loop(x, q, n, words, counts_at, sums_at):
    """Add what ``n`` numbers at ``x``, fewer than 2**31, rounded to those at ``q``, come to."""
    counts = carray(pointer(counts_at, np.int64(0)), (COUNTS,))
    sums = carray(pointer(sums_at, np.float64(0)), (SUMS,))
    source, rounded = words64_at(x, n), words64_at(q, n)
    places, at = np.zeros((4, PLACES64), np.int32), np.empty(BLOCK, H)
    squares, errors = np.empty(BLOCK), np.empty(BLOCK)
    largest = W(0)
    for start in range(0, n, BLOCK):
        stop = min(n, start + BLOCK)
        most, negative = _what_numbers_are64(source[start:stop], at)
        largest = most if most > largest else largest
        counts[NEGATIVE] += negative
        _scatter(at[: stop - start], places)
        _what_rounding_did64(source[start:stop], rounded[start:stop], words, squares, errors, counts)
        sums[SQUARES] += _sum(squares)
        sums[ERRORS] += _sum(errors)
    sums[AMAX] = max(sums[AMAX], np.float64(double_of(largest)))
    spread(places.sum(0), counts, 1023, 64)


@loop
def merge(counts_at, sums_at, counts, sums):
    """Add a part's counts and sums to those at the addresses."""
    total = carray(pointer(counts_at, np.int64(0)), (COUNTS,))
    total_sums = carray(pointer(sums_at, np.float64(0)), (SUMS,))
    for i in range(COUNTS):
        total[i] += counts[i]
    total_sums[AMAX] = max(total_sums[AMAX], sums[AMAX])
    for i in range(AMAX + 1, SUMS):
        total_sums[i] += sums[i]
