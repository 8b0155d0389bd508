"""`check`: a quantizer against the exact reference."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..formats import Format, as_format
from ..kernels.rules import carried
from ..quantize import planned, quantize
from ..reference import round_value
from .calls import Floats, Quantizer, as_float64, call, differ
from .exact import Split, expected, split_quanta
from .inputs import patterns
from .randomness import stochastic_rows
from .report import REGIONS, SIGNS, Example, Report, Row


def check(
    quantizer: Quantizer,
    fmt: str | Format,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    exhaustive: Literal[16, 32] | None = None,
    repeats: int = 64,
    seed: int = 0,
) -> Report:
    """How a quantizer compares with the exact reference, by kind of input and sign.

    It is tried on every value of the format, every midpoint of two, the float32 numbers next to both,
    infinities, NaNs, zeros, the ends of float32 and some random patterns; of a format of more than 16 bits,
    on a sample of its values.

    With ``rounding="stochastic"`` the rows are properties: a result is one of the two neighbours
    (``neighbour``); values of the format stay (``exact``); each position goes up as often as it should, to
    five sigma (``probability``); so do all of a sign together, to about 1/1000 ulp (``bias``); two calls
    differ (``fresh``); and, if the quantizer takes a second positional parameter, without default or called
    ``key``, the same key, an int, gives the same bits (``same key``).

    Args:
        quantizer: Takes a 1-d float32 numpy array, returns as many numbers in a numpy array or torch tensor
            of a floating dtype, which float64 holds exactly.
        fmt: The format it should round to, or its name; one that float32 carries.
        rounding: How it should round, one of ``formats.ROUNDINGS``.
        overflow: What it should do beyond the range, one of ``formats.OVERFLOWS``.
        exhaustive: 16: the 2**16 float32 patterns whose lower half is zero, instead. 32: all 2**32, which
            takes minutes; then `fpemu.quantize`, itself proven equal to the reference, says what is right.
        repeats: Calls with the same inputs, for stochastic rounding.
        seed: Of the random inputs, and the first key of stochastic rounding.

    Returns:
        A `Report`; NaN counts as NaN whatever its payload, -0.0 is not 0.0.

    Raises:
        ValueError: unknown format, rounding or overflow; a result of another shape.
        TypeError: a result that is no floating array.

    Example:
        >>> check(lambda x: x.astype(np.float16), "fp16").ok
        True
        >>> report = check(lambda x: x.clip(-448, 448).astype(np.float16), "e4m3fn")
        >>> report.row("tie").example
        Example(input=0.0009765625, got=0.0009765625, wanted=0.0)
    """
    planned(fmt, rounding, overflow)  # refuses unknown names
    target = carried(as_format(fmt))
    if exhaustive not in (None, 16, 32):
        raise ValueError(f"exhaustive must be 16, 32 or None for the hard inputs, got {exhaustive!r}")
    if not callable(quantizer):
        raise TypeError(f"quantizer must be a function of one array, got {quantizer!r}")
    if rounding == "stochastic":
        if exhaustive is not None:
            raise ValueError("exhaustive= does not apply to rounding='stochastic'; leave it out")
        if repeats < 2:
            raise ValueError(f"repeats must be at least 2 to see that draws differ, got {repeats!r}")
        return Report(target, rounding, overflow, stochastic_rows(quantizer, target, overflow, repeats, seed))
    counts = Counts(target)
    for bits in patterns(target, exhaustive, seed):
        x = bits.view(np.float32)
        if exhaustive == 32:
            wanted = as_float64(quantize(x, target, rounding, overflow=overflow), x.size)
        else:
            wanted = expected(x, target, rounding, overflow)
        counts.add(x, call(quantizer, x), wanted)
    return Report(target, rounding, overflow, counts.rows(rounding, overflow))


class Counts:
    """Results by region and sign, chunk by chunk."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        groups = len(REGIONS) * len(SIGNS)
        self.tried = np.zeros(groups, np.int64)
        self.wrong = np.zeros(groups, np.int64)
        self.worst: list[tuple[float, float, float]] = [(-1.0, 0.0, 0.0)] * groups  # error, input, result

    def add(self, x: npt.NDArray[np.float32], got: Floats, wanted: Floats) -> None:
        """Count a chunk."""
        split = split_quanta(x, self.fmt)
        group = _regions(x, split, self.fmt) * len(SIGNS) + np.signbit(x)
        self.tried += np.bincount(group, minlength=self.tried.size)
        wrong = np.flatnonzero(differ(got, wanted))
        self.wrong += np.bincount(group[wrong], minlength=self.wrong.size)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.ldexp(np.abs(got[wrong] - wanted[wrong]), -split.exponent[wrong])
        error[~np.isfinite(error)] = math.inf  # a number for no number
        for i in np.unique(group[wrong]).tolist():
            inside = np.flatnonzero(group[wrong] == i)
            worst = inside[np.argmax(error[inside])]
            if error[worst] > self.worst[i][0]:
                self.worst[i] = (float(error[worst]), float(x[wrong[worst]]), float(got[wrong[worst]]))

    def rows(self, rounding: str, overflow: str) -> tuple[Row, ...]:
        """The counts as rows of a report."""
        rows = []
        for i, (tried, wrong) in enumerate(zip(self.tried.tolist(), self.wrong.tolist(), strict=True)):
            example = None
            if wrong:
                _, x, got = self.worst[i]
                example = Example(x, got, round_value(x, self.fmt, rounding, overflow=overflow))
            rows.append(Row(REGIONS[i // len(SIGNS)], SIGNS[i % len(SIGNS)], tried, wrong, example))
        return tuple(rows)


def _regions(x: npt.NDArray[np.float32], split: Split, fmt: Format) -> npt.NDArray[np.int64]:
    """Index into REGIONS; a tie is one wherever it lies, up to where every number overflows."""
    name = {region: i for i, region in enumerate(REGIONS)}
    region = np.full(x.shape, name["normal"])
    region[split.magnitude < fmt.smallest_normal] = name["subnormal"]
    region[split.magnitude < fmt.smallest_subnormal] = name["underflow"]
    region[split.magnitude > fmt.max] = name["overflow"]
    region[(split.remainder == 0.5) & (split.magnitude < fmt.magnitude(fmt.max_code + 1))] = name["tie"]
    region[(x == 0) | ~np.isfinite(x)] = name["special"]
    return region
