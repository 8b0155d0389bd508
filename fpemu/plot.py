"""Figures: each function draws on the matplotlib Axes that it is given, or on a new one, and returns it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from .formats import Format, as_format
from .stats import Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with any kind of colour blindness; black first.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_RANGES = {"becomes zero": "#D55E00", "subnormal": "#E69F00", "normal": "#0072B2", "overflow": "#CC79A7"}
_MARGIN = 2  # binades shown on either side of the values


def histogram(tally: Tally, fmt: str | Format, scale: float = 1.0, ax: Axes | None = None) -> Axes:
    """One bar a binade of the nonzero values, with the ranges of a format marked.

    Args:
        tally: What was counted; of any format or none.
        fmt: Format with a zero, or its name: what the values would become in it, rounded to nearest.
        scale: A power of two that the values are multiplied by first, as by loss scaling.
        ax: Where to draw; ``None``: a new figure.

    Returns:
        The Axes. Its title holds the share that becomes zero.

    Raises:
        ValueError: the tally holds no nonzero finite value, or as ``Tally.lost``.
    """
    fmt = as_format(fmt)
    lost = tally.lost(fmt, scale)
    occupied = np.flatnonzero(tally.histogram)
    if not occupied.size:
        raise ValueError(
            "histogram needs a tally with a nonzero finite value, got one without; nothing to draw"
        )
    bins = np.arange(occupied[0], occupied[-1] + 1)
    left = tally.exponents[bins] + math.frexp(scale)[1] - 1
    height = 100 * tally.histogram[bins] / tally.histogram.sum()

    ax = _axes(ax)
    limits = (min(left[0], _zero_edge(fmt)) - _MARGIN, max(left[-1] + 1, fmt.emin + 1) + _MARGIN)
    _mark_ranges(ax, fmt, *limits)
    ax.bar(left, height, width=1, align="edge", color="#333333", edgecolor="white", linewidth=0.5, zorder=2)
    scaled = "" if scale == 1 else f" at scale {_power(math.frexp(scale)[1] - 1)}"
    ax.set(
        xlim=limits,
        xlabel="binade of |value|",
        ylabel="share of nonzero values, %",
        title=f"{100 * lost:.1f} % of nonzero values become zero in {fmt.name}{scaled}",
    )
    ax.xaxis.set_major_formatter(lambda x, _: _power(round(x)))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 10]))
    return ax


def _zero_edge(fmt: Format) -> int:
    """Exponent of the largest power of two that is rounded to zero: the tie below the smallest value."""
    return math.frexp(fmt.smallest_subnormal)[1] - 2


def _mark_ranges(ax: Axes, fmt: Format, low: float, high: float) -> None:
    normal = fmt.emin if fmt.subnormal else _zero_edge(fmt)
    edges = (-math.inf, _zero_edge(fmt), normal, math.log2(fmt.max), math.inf)
    for (name, colour), start, end in zip(_RANGES.items(), edges, edges[1:], strict=False):
        start, end = max(start, low), min(end, high)
        if start < end:
            ax.axvspan(start, end, color=colour, alpha=0.3, linewidth=0, zorder=0, label=name)
            if start > low:
                ax.axvline(start, color=colour, linewidth=1.5, zorder=1)
    ax.legend(title=fmt.name, framealpha=0.9)


def losses(curves: Mapping[str, Sequence[float]], ax: Axes | None = None) -> Axes:
    """One line a strategy: its training loss by epoch.

    Args:
        curves: Loss of each epoch, the first one first, by name. NaN and infinity leave a gap.
        ax: Where to draw; ``None``: a new figure.

    Returns:
        The Axes, its loss axis logarithmic.

    Raises:
        ValueError: no curve.
    """
    if not curves:
        raise ValueError("losses needs at least one curve, got none; give a mapping of names to losses")
    ax = _axes(ax)
    for i, (name, values) in enumerate(curves.items()):
        finite = [value if math.isfinite(value) else math.nan for value in values]
        # Curves that lie on each other stay visible: dashes over wider lines.
        ax.plot(
            range(1, len(finite) + 1),
            finite,
            label=name,
            color=COLOURS[i % len(COLOURS)],
            linestyle=("-", (0, (5, 3)), (0, (1, 2)), (3, (5, 3, 1, 3)))[i % 4],
            linewidth=max(1.5, 3.5 - 0.4 * i),
            marker="o" if len(finite) == 1 else None,
        )
    ax.set(xlabel="epoch", ylabel="training loss, mean of the epoch's steps", yscale="log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    ax.grid(alpha=0.3)
    return ax


def _power(exponent: int) -> str:
    return f"$2^{{{exponent}}}$"


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]
