"""Loops over arrays on the CPU; no arithmetic of their own.

A loop body runs over a whole small slice, ``for i in range(x.size)``: that is the form Numba vectorises. In place has
a loop of its own: the two-array loop on one array would fail its overlap check and run element by element.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from .scalar import (
    HALF,
    LOW,
    U,
    W,
    deterministic,
    encode_bits,
    nearest_even_magic,
    nearest_even_wide,
    philox,
    rule_of,
    stochastic,
    stochastic_usual,
)

OPTIONS = dict(nogil=True, error_model="numpy", cache=True)
BLOCK = 1024  # elements that 256 Philox calls serve


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
