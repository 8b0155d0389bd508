"""The loop that compares weight updates with their weights, on the CPU."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .cpu import BLOCK, H, _sum, loop, pointer
from .layout import AMAX, BINS, COUNT, COUNTS, HISTOGRAM, INFINITIES, LOWEST, NANS, SQUARES, SUMS, ZEROS
from .scalar import FRACTION64, INF64, W, bits64_of, double_of

TOTALS = 4  # updates, lost ones, gradients, small ones


@njit(inline="always")
def _floats_at(address, n):
    return carray(pointer(address, np.float32(0)), (n,))


@loop
def _count(before, update, after, gradient, limits, totals):
    smallest_normal, below_normal, half_ulp_of_one = limits[0], limits[1], limits[2]
    moved, lost, seen, small = 0, 0, 0, 0
    for i in range(before.size):
        changes = update[i] != np.float32(0)
        moved += np.int64(changes)
        lost += np.int64(changes & (after[i] == before[i]))
        size, slope = np.float64(abs(before[i])), np.float64(abs(gradient[i]))
        # Without its fraction a number is the power of two of its binade.
        half_ulp = double_of(W(bits64_of(size) & INF64)) * half_ulp_of_one
        half_ulp = half_ulp if size >= smallest_normal else below_normal
        seen += np.int64(slope != 0)
        small += np.int64((slope != 0) & (slope < half_ulp) & (size < np.inf))
    totals[0] += moved
    totals[1] += lost
    totals[2] += seen
    totals[3] += small


@loop
def _ratios(before, update, at, finite):
    """Where |weight / update| is counted, a power of two apart; the bits of those that are finite."""
    for i in range(before.size):
        # In float64 a quotient of two float32 numbers is normal and never rounds up into the next binade.
        bits = bits64_of(abs(np.float64(before[i]) / np.float64(update[i])))
        where = W(bits >> W(52)) + W(HISTOGRAM - 1023 - LOWEST)
        where = where + W(BINS) if W(bits & FRACTION64) == W(0) else where
        where = W(ZEROS) if bits == W(0) else where
        where = W(INFINITIES) if bits == INF64 else where
        at[i] = H(where if bits <= INF64 else W(NANS))
        finite[i] = bits if bits < INF64 else W(0)


@loop
def _squares(finite, squares):
    largest = W(0)
    for i in range(finite.size):
        largest = finite[i] if finite[i] > largest else largest
        squares[i] = double_of(finite[i]) * double_of(finite[i])
    squares[finite.size :] = 0
    return double_of(largest)


@loop
def _add_places(at, counts):
    counts[COUNT] += at.size
    for i in range(at.size):
        place = np.int64(at[i])
        counts[place] += 1
        if place >= HISTOGRAM + BINS:  # a power of two is in its binade too
            counts[place - BINS] += 1


@loop
def updates_loop(before, update, after, gradient, n, limits, totals_at, counts_at, sums_at):
    """Add what ``n`` updates at these addresses, float32, come to; see `fpemu.updates.Updates`."""
    totals = carray(pointer(totals_at, np.int64(0)), (TOTALS,))
    counts = carray(pointer(counts_at, np.int64(0)), (COUNTS,))
    sums = carray(pointer(sums_at, np.float64(0)), (SUMS,))
    w, u = _floats_at(before, n), _floats_at(update, n)
    end, g = _floats_at(after, n), _floats_at(gradient, n)
    at, finite, squares = np.empty(BLOCK, H), np.empty(BLOCK, W), np.empty(BLOCK)
    for start in range(0, n, BLOCK):
        stop = min(n, start + BLOCK)
        here = slice(start, stop)
        _count(w[here], u[here], end[here], g[here], limits, totals)
        _ratios(w[here], u[here], at, finite)
        _add_places(at[: stop - start], counts)
        sums[AMAX] = max(sums[AMAX], _squares(finite[: stop - start], squares))
        sums[SQUARES] += _sum(squares)
