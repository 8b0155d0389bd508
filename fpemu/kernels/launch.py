"""From arrays to loops: addresses, threads, keys.

Threads are Python's, not OpenMP's: the loops release the GIL, a forked child simply starts a pool of its
own, and no second OpenMP runtime meets torch's. A call uses as many as numba and, where it is loaded, torch
are set to (NUMBA_NUM_THREADS, torch.set_num_threads, OMP_NUM_THREADS).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ..formats import Format
from ..random import MASK, Key
from . import cpu, gemm, gemm_random
from .layout import COUNTS, SUMS
from .rules import Plan, tally_words
from .ways import Sums

PARALLEL = 1 << 18  # elements from which a second thread pays
GRAIN = 1 << 14  # a chunk is a multiple of this: whole blocks of random words

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    """In a forked child: the parent's threads are not there."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def threads() -> int:
    """How many threads a large call uses."""
    limit: int = numba.config.NUMBA_NUM_THREADS
    torch = sys.modules.get("torch")
    return min(limit, torch.get_num_threads()) if torch is not None else limit


def over_chunks(n: int, work: Callable[[int, int], None], grain: int = GRAIN, cost: int = 1) -> None:
    """Call ``work(start, stop)`` on pieces that make up ``range(n)``, in parallel if that pays.

    Each piece starts at a multiple of ``grain``. ``cost`` is that of one of the ``n``, in roundings.
    """
    if n * cost < PARALLEL or (workers := threads()) == 1:
        work(0, n)
        return
    step = -(-n // (workers * grain)) * grain
    starts = range(0, n, step)
    waiting = [_executor().submit(work, start, min(n, start + step)) for start in starts[1:]]
    work(0, min(n, step))
    for one in waiting:
        one.result()


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, numba.config.NUMBA_NUM_THREADS - 1), "fpemu")
        return _pool


def key_words(key: Key) -> npt.NDArray[np.uint64]:
    """The key as the loops take it."""
    return np.array([key.step & MASK, key.step >> 32, key.seed, key.stream], np.uint64)


def round_array(x: int, out: int, n: int, plan: Plan, key: Key | None) -> None:
    """Round ``n`` numbers of the plan's carrier at address ``x`` to address ``out``, which may be ``x``."""
    loop, width = cpu.LOOPS[plan.loop], plan.words.itemsize
    if key is None:
        if n < PARALLEL:
            loop(x, out, n, plan.words)
        else:
            over_chunks(
                n, lambda start, stop: loop(x + width * start, out + width * start, stop - start, plan.words)
            )
        return
    words = key_words(key)
    over_chunks(
        n,
        lambda start, stop: loop(
            x + width * start, out + width * start, stop - start, plan.words, key.offset + start, words
        ),
    )


def sum_rows(
    rows: npt.NDArray[np.float64],
    sums: npt.NDArray[np.float64],
    plan: Plan,
    compensated: bool,
    key: Key | None,
) -> None:
    """Sum each row of a C-contiguous array, every operation rounded as the plan for binary64 says."""
    if key is None:
        cpu.sum_rows(rows, sums, plan.words, compensated)
        return
    drawn = np.empty(rows.shape, np.uint32)
    cpu.draw(drawn.reshape(-1), key.offset, key_words(key))
    cpu.sum_rows_stochastic(rows, sums, plan.words, drawn)


def multiply(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    c: npt.NDArray[Any],
    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    chunk: int,
    steps: Sums,
    key: Key | None,
) -> None:
    """Write a stack of matrix products to ``c``, whose elements are +0.0; see `gemm.multiply`."""
    batches, rows, columns = c.shape
    if key is None:
        over_chunks(
            batches * rows,
            lambda start, stop: gemm.multiply(
                a, b, c, *places, start, stop, chunk, steps.way, steps.outer_way, steps.rules, steps.rules64
            ),
            grain=1,
            cost=columns * a.shape[2],
        )
        return
    keys = np.stack([key_words(one) for one in (key.fold_in("product"), key, key.fold_in("chunks"))])
    over_chunks(
        c.size,
        lambda start, stop: gemm_random.multiply_stochastic(
            a, b, c, *places, start, stop, chunk, steps.random, steps.short, steps.rules64, key.offset, keys
        ),
        grain=cpu.BLOCK,
        cost=a.shape[2],
    )


def encode_array(x: int, out: int, n: int, plan: Plan, like: np.unsignedinteger) -> None:
    """Codes of ``n`` numbers at ``x``, values of the plan's format, to ``out`` as ``like``'s type."""
    width, code_width = plan.words.itemsize, like.itemsize
    loop = cpu.encode_loop if width == 4 else cpu.encode64_loop
    over_chunks(
        n,
        lambda start, stop: loop(x + width * start, out + code_width * start, stop - start, plan.words, like),
    )


def tally_array(x: int, q: int, n: int, fmt: Format | None, carrier: Format, counts: int, sums: int) -> None:
    """Add what ``n`` numbers at ``x``, rounded to those at ``q``, come to, to counts and sums."""
    words = tally_words(fmt, carrier)
    loop, width = (cpu.tally_loop, 4) if words.itemsize == 4 else (cpu.tally64_loop, 8)
    if n <= PARALLEL:
        loop(x, q, n, words, counts, sums)
        return
    # Pieces of one size, merged in order: the float64 sums must not depend on the number of threads.
    pieces = -(-n // PARALLEL)
    parts = [(np.zeros(COUNTS, np.int64), np.zeros(SUMS)) for _ in range(pieces)]

    def work(first: int, last: int) -> None:
        for start in range(first, last, PARALLEL):
            part_counts, part_sums = (array.ctypes.data for array in parts[start // PARALLEL])
            count = min(PARALLEL, last - start)
            loop(x + width * start, q + width * start, count, words, part_counts, part_sums)

    over_chunks(n, work, PARALLEL)
    for part in parts:
        cpu.merge(counts, sums, *part)


@cache
def code_like(fmt: Format) -> np.unsignedinteger:
    """A zero of the smallest unsigned dtype that holds the codes of ``fmt``."""
    return next(t(0) for t in (np.uint8, np.uint16, np.uint32) if t(0).itemsize * 8 >= fmt.bits)
