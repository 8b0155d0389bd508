"""Tallies: what numbers an array holds and what rounding does to them, counted exactly, in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import as_array, carrier_of, is_tensor
from .blocks import BlockFormat, found
from .blockwise import Rounded, count_in_blocks
from .formats import BINARY32, BINARY64, Format, as_format
from .kernels import launch
from .kernels.layout import (
    AMAX,
    BINS,
    COUNTS,
    ERRORS,
    FIELDS,
    HISTOGRAM,
    LOWEST,
    OVER,
    POWERS,
    SQUARES,
    SUBNORMAL,
    SUMS,
)
from .kernels.rules import tally_words
from .quantize import in_blocks, quantize

# Rounding modes that treat both signs alike and draw nothing: what they lose, a histogram tells.
SYMMETRIC = ("nearest_even", "nearest_away", "toward_zero", "to_odd")


def log2_of(scale: float) -> int:
    """The exponent of a power of two.

    Raises:
        ValueError: it is none, or float64 does not hold it.
    """
    try:
        mantissa, exponent = math.frexp(scale)
    except OverflowError:  # an int beyond float64
        mantissa = math.nan
    if mantissa != 0.5:
        raise ValueError(f"scale must be a power of two of float64, for exact counts, got {scale!r}")
    return exponent - 1


def zero_edge(fmt: str | Format, scale: float = 1.0, rounding: str = "nearest_even") -> tuple[int, bool]:
    """Which values rounding to ``fmt`` makes zero, as ``Tally.lost`` counts them.

    Returns:
        The binade below which all values become zero, and whether that binade's power of two does.
    """
    fmt = as_format(fmt)
    shift = log2_of(scale)
    if not fmt.has_zero or not fmt.signed:
        lack = "zero to lose values to" if not fmt.has_zero else "sign, and the histogram does not tell signs"
        raise ValueError(f"{fmt.name} has no {lack}")
    if rounding not in SYMMETRIC:
        raise ValueError(
            f"rounding must be one of {', '.join(SYMMETRIC)}, whose zeros a histogram tells, got {rounding!r}"
        )
    if rounding == "to_odd":
        return LOWEST, False
    # To nearest, everything up to half the smallest value becomes zero: the tie, a power of two, too if it
    # goes to even. Toward zero, everything below the smallest value.
    edge = math.frexp(fmt.smallest_subnormal)[1] - 1 - (rounding != "toward_zero") - shift
    return edge, rounding == "nearest_even"


def overflow_limit(fmt: Format) -> float:
    """The least magnitude that rounds to nearest past the largest value; infinity if float64 has none."""
    tie = fmt.max + math.ldexp(1.0, fmt.emax - fmt.precision)
    # Half way up from an odd code the tie goes up; from an even one it stays.
    goes_up = fmt.max_code % 2 == 1 or (fmt.precision == 1 and not fmt.ties_to_even_code)
    return tie if goes_up else math.nextafter(tie, math.inf)


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts of what an array holds. ``a + b`` is the tally of both arrays together.

    Attributes:
        counts: int64, what the properties below and the histogram read.
        sums: float64: the largest finite magnitude, the sums of squares of values and of rounding errors.
        fmt: Format whose rounding was counted, None if none was.
    """

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(COUNTS, np.int64))
    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(SUMS))
    fmt: Format | BlockFormat | None = None

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        if self.fmt != other.fmt and self.count and other.count:
            raise ValueError(
                f"tallies of rounding to {self.fmt} and {other.fmt} do not add up; count both for one format"
            )
        sums = self.sums + other.sums
        sums[AMAX] = max(self.amax, other.amax)
        return Tally(self.counts + other.counts, sums, self.fmt or other.fmt)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tally) and self.fmt == other.fmt and np.array_equal(self.counts, other.counts)
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={int(self.counts[i])}" for i, name in enumerate(FIELDS) if self.counts[i])
        return f"Tally({parts}, amax={self.amax:g})"

    def _named(self, name: str) -> int:
        return int(self.counts[FIELDS.index(name)])

    @property
    def count(self) -> int:
        """Elements."""
        return self._named("count")

    @property
    def zero(self) -> int:
        """Zeros of either sign."""
        return self._named("zero")

    @property
    def negative(self) -> int:
        """Finite values below zero."""
        return self._named("negative")

    @property
    def positive_infinity(self) -> int:
        """Elements that are +infinity."""
        return self._named("positive_infinity")

    @property
    def negative_infinity(self) -> int:
        """Elements that are -infinity."""
        return self._named("negative_infinity")

    @property
    def infinities(self) -> int:
        """Elements that are infinite, of either sign."""
        return self.positive_infinity + self.negative_infinity

    @property
    def nan(self) -> int:
        """NaNs."""
        return self._named("nan")

    @property
    def underflow(self) -> int:
        """Nonzero values that became zero."""
        return self._named("underflow")

    @property
    def subnormal(self) -> int:
        """Values that became a subnormal of the format."""
        return self._named("subnormal")

    @property
    def overflow(self) -> int:
        """Finite values that round to nearest, the exponent unbounded, past the format's largest."""
        return self._named("overflow")

    @property
    def histogram(self) -> npt.NDArray[np.int64]:
        """Counts by binade: bin ``i`` has the finite nonzero values with ``floor(log2(|x|)) == i - 1074``."""
        return self.counts[HISTOGRAM:POWERS]

    @property
    def powers(self) -> npt.NDArray[np.int64]:
        """Those of `histogram` that are exact powers of two."""
        return self.counts[POWERS:COUNTS]

    @property
    def exponents(self) -> npt.NDArray[np.int64]:
        """The binade of each bin of `histogram`: -1074 to 1023."""
        return np.arange(LOWEST, LOWEST + BINS)

    @property
    def amax(self) -> float:
        """Largest finite magnitude; 0.0 if there is none."""
        return float(self.sums[AMAX])

    def share(self, name: str) -> float:
        """One of the counts above as a share of all elements, 0.0 to 1.0; 0.0 of an empty tally.

        Raises:
            ValueError: no count has that name.
        """
        if name not in FIELDS:
            raise ValueError(f"unknown count {name!r}; choose from {', '.join(FIELDS)}")
        return self._named(name) / self.count if self.count else 0.0

    def lost(self, fmt: str | Format, scale: float = 1.0, rounding: str = "nearest_even") -> float:
        """Share of the nonzero finite values that rounding to ``fmt`` makes zero, exact.

        Args:
            fmt: Format with a zero, or its name; any, whatever the tally counted.
            scale: A power of two to multiply the values by first, as loss scaling does.
            rounding: One of SYMMETRIC, the modes that do not ask for signs and draw nothing.

        Raises:
            ValueError: ``scale`` is no power of two, the format has no zero or no sign, or the rounding is
                another.
        """
        total = int(self.histogram.sum())
        below = self.vanishing(fmt, scale, rounding)
        return below / total if total else 0.0

    def vanishing(self, fmt: str | Format, scale: float = 1.0, rounding: str = "nearest_even") -> int:
        """The values that `lost` gives the share of, counted."""
        edge, tie = zero_edge(fmt, scale, rounding)
        place = min(max(edge - LOWEST, 0), BINS)
        below = int(self.histogram[:place].sum())
        return below + (int(self.powers[place]) if tie and 0 <= edge - LOWEST < BINS else 0)

    def overflowing(self, fmt: str | Format, scale: float = 1.0) -> tuple[int, int]:
        """Bounds of how many finite values round to nearest past the largest value of ``fmt``.

        The limit lies within a binade, so its binade's values are only in the upper bound. Both are equal if
        the largest magnitude stays below the limit.

        Args:
            fmt: Format, or its name.
            scale: A power of two to multiply the values by first.

        Returns:
            The least and the largest number that agree with what was counted.

        Raises:
            ValueError: ``scale`` is no power of two.
        """
        fmt = as_format(fmt)
        shift = log2_of(scale)
        limit = overflow_limit(fmt)
        # An infinite limit is that of binary64, which holds all of its highest binade.
        edge = math.frexp(limit)[1] - 1 if math.isfinite(limit) else fmt.emax + 1
        place = min(max(edge - shift - LOWEST, -1), BINS)
        above = int(self.histogram[place + 1 :].sum())
        if not 0 <= place < BINS:
            return above, above
        at = int(self.histogram[place])
        if not math.isfinite(limit) or math.frexp(limit)[0] == 0.5:  # all of the binade is past the limit
            return above + at, above + at
        if not above and math.frexp(self.amax)[0] < math.frexp(limit)[0]:
            return 0, 0
        return max(above, min(at, 1)), above + at - int(self.powers[place])

    def quantile(self, share: float) -> float:
        """The binade that a quantile of the nonzero finite magnitudes lies in, by its power of two.

        Args:
            share: 0 for the smallest, 0.5 for the median, 1 for the largest.

        Returns:
            A power of two: the quantile is at least that, and less than twice that. 0.0 without values.

        Raises:
            ValueError: ``share`` is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {share!r}")
        total = int(self.histogram.sum())
        if not total:
            return 0.0
        rank = min(int(share * total), total - 1)
        place = int(np.searchsorted(np.cumsum(self.histogram), rank, side="right"))
        return math.ldexp(1.0, place + LOWEST)

    def dynamic_range(self) -> int:
        """Binades from the smallest to the largest nonzero finite magnitude, both counted; 0 if none."""
        occupied = np.flatnonzero(self.histogram)
        return int(occupied[-1] - occupied[0] + 1) if occupied.size else 0

    def rms(self) -> float:
        """Root of the mean square of the finite values; 0.0 without any."""
        finite = self.count - self.nan - self.infinities
        return math.sqrt(float(self.sums[SQUARES]) / finite) if finite else 0.0

    def scaled(self, scale: float) -> Tally:
        """The tally of all values multiplied by a power of two, exact; without what rounding did.

        Raises:
            ValueError: ``scale`` is no power of two, or moves a value out of float64's range.
        """
        shift = log2_of(scale)
        moved = Tally()
        moved.counts[:HISTOGRAM] = self.counts[:HISTOGRAM]
        moved.counts[[FIELDS.index(name) for name in ("underflow", "subnormal", "overflow")]] = 0
        low, high = max(0, -shift), min(BINS, BINS - shift)
        if low < high:
            for bins, target in ((self.histogram, moved.histogram), (self.powers, moved.powers)):
                target[low + shift : high + shift] = bins[low:high]
        if moved.histogram.sum() != self.histogram.sum():
            raise ValueError(f"at scale {scale!r} values leave the range of float64")
        moved.sums[AMAX] = math.ldexp(self.amax, shift)
        with np.errstate(over="ignore", under="ignore"):
            moved.sums[SQUARES] = self.sums[SQUARES] * np.ldexp(1.0, shift) * np.ldexp(1.0, shift)
        return moved

    def sqnr(self) -> float:
        """Mean square of the values over that of the rounding errors, in dB; infinity without error.

        What became infinite or NaN has no error here; `overflow` counts it. NaN where float64 does not hold
        the squares, of values beyond 1e-150 or 1e150.
        """
        if not math.isfinite(self.sums[SQUARES]) or (self.amax > 0 and self.sums[SQUARES] == 0):
            return math.nan
        if self.sums[ERRORS] == 0:
            return math.inf
        return 10 * math.log10(self.sums[SQUARES] / self.sums[ERRORS]) if self.sums[SQUARES] else -math.inf


def tally(
    x: Any,
    fmt: str | Format | BlockFormat | None = None,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
) -> Tally:
    """What ``x`` holds and, with a format, what rounding to it does.

    Args:
        x: Array as for ``quantize``; nothing is written to it.
        fmt: Format or BlockFormat to round to, or its name; None for the counts of ``x`` alone. In blocks,
            subnormal and overflow are by the scale of an element's block.
        rounding: As for ``quantize``; any but ``"stochastic"``.
        overflow: As for ``quantize``.

    Returns:
        A Tally.

    Raises:
        TypeError, ValueError: as ``quantize``.

    Example:
        >>> import numpy as np
        >>> t = tally(np.float32([0, 2**-25, 2**-24, 1.5, 70000, np.inf]), "fp16")
        >>> t.zero, t.underflow, t.subnormal, t.overflow, t.amax
        (1, 1, 1, 1, 70000.0)
        >>> t.lost("fp16"), t.lost("fp16", scale=2)
        (0.25, 0.0)
    """
    x = as_array(x)
    carrier_of(x)
    if (blocks := found(fmt)) is not None:
        return _tally_blocks(x, blocks, rounding, overflow)
    fmt = None if fmt is None else as_format(fmt)
    rounded = x if fmt is None else quantize(x, fmt, rounding, overflow=overflow)
    if not is_tensor(x) or not x.is_cuda:
        result = Tally(fmt=fmt)
        add(result.counts, result.sums, x, rounded, fmt)
        return result
    import torch

    counts = torch.zeros(COUNTS, dtype=torch.int64, device=x.device)
    sums = torch.zeros(SUMS, dtype=torch.float64, device=x.device)
    add(counts, sums, x, rounded, fmt)
    return Tally(counts.cpu().numpy(), sums.cpu().numpy(), fmt)


def _tally_blocks(x: Any, fmt: BlockFormat, rounding: str, overflow: str) -> Tally:
    rounded = in_blocks(x, fmt, rounding, overflow)
    result = Tally(fmt=fmt)
    if is_tensor(x):
        x, rounded = x.detach().cpu(), replace(rounded, values=rounded.values.cpu())
    add(result.counts, result.sums, x, rounded.values, None)
    add_in_blocks(result.counts, x, rounded, fmt)
    return result


def add_in_blocks(counts: Any, x: Any, rounded: Rounded, fmt: BlockFormat) -> None:
    """Add how many elements became subnormals of their block's scale, and how many saturated."""
    words = tally_words(fmt.element, BINARY64).view(np.float64)
    subnormal, over = count_in_blocks(x, rounded, words)
    counts[SUBNORMAL] += subnormal
    counts[OVER] += over


def add(counts: Any, sums: Any, x: Any, rounded: Any, fmt: Format | None) -> None:
    """Add what ``x``, rounded to ``rounded``, comes to, to counts and sums that lie where ``x`` does."""
    carrier = BINARY64 if carrier_of(x) == BINARY64 else BINARY32
    if is_tensor(x):
        import torch

        wide = torch.float64 if carrier == BINARY64 else torch.float32
        if x.dtype != wide or not _same_order(x, rounded):
            x, rounded = (array.detach().to(wide).contiguous() for array in (x, rounded))
        if x.is_cuda:
            from .kernels import device

            device.tally_tensor(x.detach().contiguous(), rounded.contiguous(), fmt, carrier, counts, sums)
            return
        source, target, n = x.data_ptr(), rounded.data_ptr(), x.numel()
    else:
        x, rounded = (np.ascontiguousarray(array, f"f{carrier.bits // 8}") for array in (x, rounded))
        source, target, n = x.ctypes.data, rounded.ctypes.data, x.size
    at = (counts.data_ptr(), sums.data_ptr()) if is_tensor(counts) else (counts.ctypes.data, sums.ctypes.data)
    launch.tally_array(source, target, n, fmt, carrier, *at)


def _same_order(x: Any, rounded: Any) -> bool:
    """Whether two tensors lie in memory in one order and without gaps: counts ask for no other."""
    import torch

    if x.is_contiguous():
        return bool(rounded.is_contiguous())
    last = torch.channels_last
    return bool(
        x.dim() == 4 and x.is_contiguous(memory_format=last) and rounded.is_contiguous(memory_format=last)
    )
