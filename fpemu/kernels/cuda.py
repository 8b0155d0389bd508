"""Loops over arrays on a CUDA device; no arithmetic of their own. The only file that imports numba.cuda.

A block of 128 threads serves a block of 1024 elements. Thread ``t`` rounds elements ``4t`` to ``4t + 3`` and
``512 + 4t`` to ``515 + 4t``: those to which one Philox call gives half a word each. Aligned whole blocks go
in 64-bit loads and stores (``whole``); ends, misaligned arrays and float64 element by element (``guarded``).

A thread reads an element before it writes it, and no other thread's: ``out`` may be ``x``.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import config, cuda, float64, int32, njit

from . import scalar
from .layout import (
    HISTOGRAM,
    INFINITIES,
    LOWEST,
    NANS,
    NEGATIVE,
    OVER,
    POWERS,
    SUBNORMAL,
    UNDER,
    ZEROS,
)
from .scalar import HALF, LOW, U, W, philox

# The simulator runs kernels as Python, and its arrays are none of numba's.
rule_of = scalar.rule_of.py_func if config.ENABLE_CUDASIM else scalar.rule_of

BLOCK = 1024
THREADS = 128
OWN = (0, 1, 2, 3, 512, 513, 514, 515)  # of a thread's elements, from its first one
UNDECIDED = U(1 << 16)
TALLY_BLOCKS = 1024  # at most: a fixed number, so that sums do not depend on the device


class Kernels(NamedTuple):
    """The kernels of one way to round; no ``whole`` for float64."""

    whole: object
    guarded: object


def deterministic_kernels(function, pairs=True):
    """Kernels of a function of a number and a rule."""

    @njit(inline="always")
    def two(pair, rule):
        return W(function(U(pair & LOW), rule)) | (W(function(U(pair >> HALF), rule)) << HALF)

    @cuda.jit
    def whole(x, out, words):
        rule = rule_of(words)
        i = W(cuda.blockIdx.x) * W(512) + W(cuda.threadIdx.x) * W(2)
        a, b, c, d = x[i], x[i + W(1)], x[i + W(256)], x[i + W(257)]
        a, b, c, d = two(a, rule), two(b, rule), two(c, rule), two(d, rule)
        out[i] = a
        out[i + W(1)] = b
        out[i + W(256)] = c
        out[i + W(257)] = d

    @cuda.jit
    def guarded(x, out, words):
        rule = rule_of(words)
        first = W(cuda.blockIdx.x) * W(BLOCK) + W(cuda.threadIdx.x) * W(4)
        for place in OWN:
            i = first + W(place)
            if i < W(x.size):
                out[i] = function(x[i], rule)

    return Kernels(whole if pairs else None, guarded)


@njit(inline="always")
def word_of(upper, lower, shift):
    """One element's word, its halves taken out of four upper and four lower ones."""
    return U(U(U(upper >> W(shift)) << U(16)) | U(U(lower >> W(shift)) & U(0xFFFF)))


@njit(inline="always")
def halves(counter, step_low, step_high, seed, stream):
    """The eight halves of one Philox call: of the first four elements, and of the last."""
    return philox(W(counter & LOW), W(counter >> HALF), step_low, step_high, seed, stream)


def stochastic_kernels(function, lazy, pairs=True):
    """Kernels of a function of a number, a word and a rule.

    Args:
        lazy: Whether the function also tells how near the decision was, so that the lower halves of words are
            computed only where they matter.
    """

    @njit(inline="always")
    def one(u, word, rule):
        if lazy:
            return function(u, word, rule)[0]
        return function(u, word, rule)

    @njit(inline="always")
    def two(pair, upper, lower, shift, rule):
        first, second = word_of(upper, lower, shift), word_of(upper, lower, shift + 16)
        if lazy:
            low, near = function(U(pair & LOW), first, rule)
            high, nearer = function(U(pair >> HALF), second, rule)
            near = near if near < nearer else nearer
        else:
            low, high = function(U(pair & LOW), first, rule), function(U(pair >> HALF), second, rule)
            near = U(0)
        return W(low) | (W(high) << HALF), near

    @cuda.jit
    def whole(x, out, words, offset, step_low, step_high, seed, stream):
        rule = rule_of(words)
        i = W(cuda.blockIdx.x) * W(512) + W(cuda.threadIdx.x) * W(2)
        counter = (W(offset) // W(BLOCK) + W(cuda.blockIdx.x)) * W(256) + W(cuda.threadIdx.x)
        a, b, c, d = x[i], x[i + W(1)], x[i + W(256)], x[i + W(257)]
        upper, upper_far = halves(counter, W(step_low), W(step_high), W(seed), W(stream))
        lower, lower_far = W(0), W(0)
        if not lazy:
            lower, lower_far = halves(counter + W(128), W(step_low), W(step_high), W(seed), W(stream))
        p, near_p = two(a, W(upper), W(lower), 0, rule)
        q, near_q = two(b, W(upper), W(lower), 32, rule)
        r, near_r = two(c, W(upper_far), W(lower_far), 0, rule)
        s, near_s = two(d, W(upper_far), W(lower_far), 32, rule)
        if lazy and (near_p < UNDECIDED or near_q < UNDECIDED or near_r < UNDECIDED or near_s < UNDECIDED):
            lower, lower_far = halves(counter + W(128), W(step_low), W(step_high), W(seed), W(stream))
            p, near_p = two(a, W(upper), W(lower), 0, rule)
            q, near_q = two(b, W(upper), W(lower), 32, rule)
            r, near_r = two(c, W(upper_far), W(lower_far), 0, rule)
            s, near_s = two(d, W(upper_far), W(lower_far), 32, rule)
        out[i] = p
        out[i + W(1)] = q
        out[i + W(256)] = r
        out[i + W(257)] = s

    @cuda.jit
    def guarded(x, out, words, offset, step_low, step_high, seed, stream):
        rule = rule_of(words)
        block = W(offset) // W(BLOCK) + W(cuda.blockIdx.x)
        counter = block * W(256) + W(cuda.threadIdx.x)
        upper, upper_far = halves(counter, W(step_low), W(step_high), W(seed), W(stream))
        lower, lower_far = halves(counter + W(128), W(step_low), W(step_high), W(seed), W(stream))
        first = block * W(BLOCK) + W(cuda.threadIdx.x) * W(4)
        for k in range(8):
            place = first + W(OWN[k])
            if place >= W(offset) and place - W(offset) < W(x.size):
                shift = 16 * (k % 4)
                word = word_of(W(upper if k < 4 else upper_far), W(lower if k < 4 else lower_far), shift)
                i = place - W(offset)
                out[i] = one(x[i], word, rule)

    return Kernels(whole if pairs else None, guarded)


KERNELS = {
    "nearest_even_magic": deterministic_kernels(scalar.nearest_even_magic),
    "nearest_even_wide": deterministic_kernels(scalar.nearest_even_wide),
    "deterministic_usual": deterministic_kernels(scalar.deterministic_usual),
    "deterministic": deterministic_kernels(scalar.deterministic),
    "deterministic64": deterministic_kernels(scalar.deterministic64, pairs=False),
    "stochastic_usual": stochastic_kernels(scalar.stochastic_usual, lazy=True),
    "stochastic": stochastic_kernels(scalar.stochastic, lazy=False),
    "stochastic64": stochastic_kernels(scalar.stochastic64, lazy=False, pairs=False),
    "encode": deterministic_kernels(scalar.encode_bits, pairs=False),
    "encode64": deterministic_kernels(scalar.encode_bits64, pairs=False),
}


def tally_kernel(T, absolute, infinity, place, lost, places, bias, lift):
    """A kernel that counts what numbers are and what rounding did to them.

    Each block counts in shared memory and adds to ``counts`` in the end; ``parts`` gets its sums of
    squares, of values and of errors, and its largest magnitude.
    """
    top = 2 * bias + 1

    @cuda.jit
    def tally(x, q, words, counts, parts):
        counted = cuda.shared.array(places, int32)
        few = cuda.shared.array(4, int32)  # negative, underflow, subnormal, overflow
        sums = cuda.shared.array((3, THREADS), float64)
        thread = cuda.threadIdx.x
        for k in range(thread, places, THREADS):
            counted[k] = 0
        if thread < 4:
            few[thread] = 0
        cuda.syncthreads()
        emin, largest, threshold = words[0], words[1], words[2]
        squares, errors, most = 0.0, 0.0, 0.0
        block = W(cuda.blockIdx.x)
        while block * W(BLOCK) < W(x.size):
            for place_in_block in OWN:
                i = block * W(BLOCK) + W(thread) * W(4) + W(place_in_block)
                if i < W(x.size):
                    u = x[i]
                    under, subnormal, over, value, error = lost(u, q[i], emin, largest, threshold)
                    cuda.atomic.add(counted, place(u), 1)
                    a = u & absolute
                    if a < infinity:
                        if u != a and a > T(0):
                            cuda.atomic.add(few, 0, 1)
                    if under:
                        cuda.atomic.add(few, 1, 1)
                    if subnormal:
                        cuda.atomic.add(few, 2, 1)
                    if over:
                        cuda.atomic.add(few, 3, 1)
                    squares += value * value
                    errors += error * error
                    most = value if value > most else most
            block += W(cuda.gridDim.x)
        sums[0, thread] = squares
        sums[1, thread] = errors
        sums[2, thread] = most
        cuda.syncthreads()
        if thread == 0:  # in order: the same sums each time
            squares, errors, most = 0.0, 0.0, 0.0
            for k in range(THREADS):
                squares += sums[0, k]
                errors += sums[1, k]
                most = sums[2, k] if sums[2, k] > most else most
            parts[cuda.blockIdx.x, 0] = squares
            parts[cuda.blockIdx.x, 1] = errors
            parts[cuda.blockIdx.x, 2] = most
            cuda.atomic.add(counts, NEGATIVE, few[0])
            cuda.atomic.add(counts, UNDER, few[1])
            cuda.atomic.add(counts, SUBNORMAL, few[2])
            cuda.atomic.add(counts, OVER, few[3])
            cuda.atomic.add(counts, ZEROS, counted[scalar.ZERO_PLACE])
            cuda.atomic.add(counts, NANS, counted[scalar.NAN_PLACE])
            cuda.atomic.add(counts, INFINITIES, counted[2 * top])
            cuda.atomic.add(counts, INFINITIES + 1, counted[2 * top + 1])
        for k in range(2 + thread, places, THREADS):
            field = k // 2
            if counted[k] > 0 and field != top:
                exponent = field - bias if field < top else field - top - 1 - bias - lift
                cuda.atomic.add(counts, HISTOGRAM + exponent - LOWEST, counted[k])
                if k % 2 == 1:
                    cuda.atomic.add(counts, POWERS + exponent - LOWEST, counted[k])

    return tally


TALLY = tally_kernel(U, scalar.ABS, scalar.INF, scalar.place, scalar.lost, scalar.PLACES, 127, 32)
TALLY64 = tally_kernel(
    W, scalar.ABS64, scalar.INF64, scalar.place64, scalar.lost64, scalar.PLACES64, 1023, 64
)
