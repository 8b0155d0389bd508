"""Stochastic rounding: to a neighbour, as often as it should, and never the same again."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..formats import Format
from .calls import Floats, Quantizer, call, differ, takes_key
from .exact import neighbours, split_quanta
from .inputs import hard_patterns
from .report import SIGNS, Example, Row

SIGMAS = 5
POSITIONS, COPIES = 64, 256  # places between two values, and elements at each


def stochastic_rows(
    quantizer: Quantizer, fmt: Format, overflow: str, repeats: int, seed: int
) -> tuple[Row, ...]:
    """What a check of stochastic rounding tells, property by property."""
    rng = np.random.default_rng(seed)
    keys = range(seed, seed + repeats) if takes_key(quantizer) else None
    x = hard_patterns(fmt, rng).view(np.float32)
    got = call(quantizer, x, *(keys[:1] if keys else ()))
    down, up = neighbours(x, fmt, overflow)
    fixed = ~differ(down, up)
    rows = [*_each_sign("neighbour", x, got, down, up, ~fixed), *_each_sign("exact", x, got, down, up, fixed)]

    x, p = _positions(fmt, overflow, rng)
    if not x.size:  # no float32 number between two values
        return tuple(rows)
    tiled = np.tile(x, COPIES)
    _, up = neighbours(x, fmt, overflow)
    ups = np.zeros(x.size, np.int64)
    results: list[Floats] = []
    fresh = False
    for i in range(repeats):
        got = call(quantizer, tiled, *(keys[i : i + 1] if keys else ()))
        ups += np.sum(~differ(got, np.tile(up, COPIES)).reshape(COPIES, -1), axis=0)
        results = [*results[:1], got]
        fresh = fresh or bool(differ(results[0], results[-1]).any())
    rows += _statistics(x, p, ups, repeats * COPIES)
    rows.append(Row("fresh", "", 1, int(not fresh), None))
    if keys:
        again = call(quantizer, tiled, keys[-1])
        other = differ(again, results[-1])
        i = int(np.argmax(other))
        example = Example(float(tiled[i]), float(again[i]), float(results[-1][i])) if other.any() else None
        rows.append(Row("same key", "", tiled.size, int(other.sum()), example))
    return tuple(rows)


def _each_sign(
    name: str,
    x: npt.NDArray[np.float32],
    got: Floats,
    down: Floats,
    up: Floats,
    among: npt.NDArray[np.bool_],
) -> list[Row]:
    rows = []
    wrong = among & differ(got, down) & differ(got, up)
    for sign in SIGNS:
        here = np.signbit(x) == (sign == "-")
        example = None
        if (wrong & here).any():
            i = int(np.argmax(wrong & here))
            nearer = down if abs(got[i] - down[i]) <= abs(got[i] - up[i]) else up
            example = Example(float(x[i]), float(got[i]), float(nearer[i]))
        rows.append(Row(name, sign, int((among & here).sum()), int((wrong & here).sum()), example))
    return rows


def _positions(
    fmt: Format, overflow: str, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], Floats]:
    """Inputs between two values, from the smallest to beyond the largest, and their chance to go up."""
    codes = np.unique(np.linspace(0, fmt.max_code, POSITIONS).astype(np.int64)).tolist()
    low = np.array([fmt.magnitude(code) for code in codes])
    high = np.array([fmt.magnitude(code + 1) for code in codes])
    fractions = np.concatenate([rng.uniform(1 / 64, 63 / 64, (3, low.size)), np.full((1, low.size), 0.5)])
    with np.errstate(over="ignore"):
        x = (low + fractions * (high - low)).astype(np.float32).ravel()
    x = np.concatenate([x, -x])
    p = split_quanta(x, fmt).remainder
    down, up = neighbours(x, fmt, overflow)
    # Nearer to 0 or 1 than this five sigma are too few draws.
    kept = differ(down, up) & (p >= 1 / 64) & (p <= 63 / 64)
    return x[kept], p[kept]


def _statistics(x: npt.NDArray[np.float32], p: Floats, ups: npt.NDArray[np.int64], draws: int) -> list[Row]:
    rows, bias = [], []
    variance = draws * p * (1 - p)
    off = (ups - draws * p) / np.sqrt(variance)
    for sign in SIGNS:
        here = np.flatnonzero(np.signbit(x) == (sign == "-"))
        if not here.size:
            continue
        worst = here[np.argmax(np.abs(off[here]))]
        wrong = int((np.abs(off[here]) > SIGMAS).sum())
        example = Example(float(x[worst]), float(ups[worst] / draws), float(p[worst])) if wrong else None
        rows.append(Row("probability", sign, here.size, wrong, example))
        total = float((ups[here] - draws * p[here]).sum())
        biased = abs(total) > SIGMAS * math.sqrt(variance[here].sum())
        mean = Example(None, total / (draws * here.size), 0.0) if biased else None  # in ulps
        bias.append(Row("bias", sign, 1, int(biased), mean))
    return rows + bias
