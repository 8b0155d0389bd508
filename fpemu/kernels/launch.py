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
from . import blocks as block_loops
from . import cpu, gemm, gemm_random
from .block_rules import BlockPlan
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


def round_blocks(
    x: int,
    out: int,
    drawn: npt.NDArray[np.uint32],
    scales: npt.NDArray[np.float64],
    size: int,
    plan: BlockPlan,
    tensor_scale: float,
    coded: bool,
    like: np.floating[Any],
) -> None:
    """Round blocks of ``size`` numbers of ``like``'s dtype at address ``x`` to address ``out``.

    Args:
        drawn: A random word for each number, or none.
        scales: Gets the scale of each block, without ``tensor_scale``.
        coded: Write numbers in units of their block's scale.
    """

    def work(start: int, stop: int) -> None:
        here = slice(start // size, stop // size)
        at, to = x + like.itemsize * start, out + like.itemsize * start
        words = drawn[start:stop]
        if plan.short is not None and not coded and like.itemsize == 4:
            block_loops.short_loop(at, to, words, scales[here], size, plan.words, plan.short)
        else:
            block_loops.blocks_loop(at, to, words, scales[here], size, plan.words, tensor_scale, coded, like)

    over_chunks(scales.size * size, work, size * -(-GRAIN // size))


def largest_finite(x: int, n: int, like: np.floating[Any]) -> float:
    """The largest finite magnitude of ``n`` numbers of ``like``'s dtype at address ``x``; 0.0 without one."""
    found = []
    over_chunks(
        n,
        lambda start, stop: found.append(
            block_loops.largest_finite(x + like.itemsize * start, stop - start, like)
        ),
    )
    return float(max(found))


def count_blocks(
    x: npt.NDArray[Any],
    q: npt.NDArray[Any],
    scales: npt.NDArray[np.float64],
    limits: npt.NDArray[np.float64],
) -> tuple[int, int]:
    """How many elements of blocks, one a row, became subnormals, and how many lie past the largest value."""
    subnormal, over = block_loops.count_blocks(x.reshape(-1), q.reshape(-1), scales, x.shape[1], limits)
    return int(subnormal), int(over)


def draw(n: int, key: Key) -> npt.NDArray[np.uint32]:
    """The words of the first ``n`` elements of a call."""
    drawn, words = np.empty(n, np.uint32), key_words(key)
    over_chunks(n, lambda start, stop: cpu.draw(drawn[start:stop], key.offset + start, words))
    return drawn


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
    cpu.sum_rows_stochastic(rows, sums, plan.words, draw(rows.size, key).reshape(rows.shape))


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
