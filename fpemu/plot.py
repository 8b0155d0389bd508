"""Figures: each function draws on the matplotlib Axes that it is given, or on a new one, and returns it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib import rcParams
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from .formats import Format, as_format
from .kernels.layout import LOWEST
from .stats import Tally, log2_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from .records import Records

# Okabe and Ito's colours, told apart with any kind of colour blindness; black first.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_RANGES = {"becomes zero": "#D55E00", "subnormal": "#E69F00", "normal": "#0072B2", "overflow": "#CC79A7"}
_BARS: dict[str, Any] = {
    "width": 1, "align": "edge", "color": "#333333", "edgecolor": "white", "linewidth": 0.5, "zorder": 2
}  # fmt: skip
_MARGIN = 2  # binades shown on either side of the values


def histogram(
    counted: Tally | Records,
    fmt: str | Format = "fp16",
    scale: float = 1.0,
    ax: Axes | None = None,
    *,
    module: str | None = None,
    role: str | None = None,
    zeros: bool = False,
) -> Axes:
    """One bar a binade of the nonzero values, with the ranges of a format marked.

    The smallest 0.1 % of the values may lie outside the picture.

    Args:
        counted: A Tally, of any format or none, or Records, whose loss scale is divided out.
        fmt: Format with a zero, or its name: what the values would become in it, rounded to nearest.
        scale: A power of two that the values are multiplied by first, as by loss scaling. The outline of the
            bars before it, and an arrow, show what it does.
        ax: Where to draw; ``None``: a new figure.
        module: Which of the Records, as for ``Records.select``.
        role: The same.
        zeros: Also a bar of the values that are zero already, at the left, and shares of all finite values on
            a logarithmic axis, as in figure 3 of "Mixed Precision Training" (arXiv 1710.03740).

    Returns:
        The Axes. Its title holds the share that becomes zero.

    Raises:
        ValueError: nothing was counted that is nonzero and finite, or as ``Tally.lost``.
    """
    fmt, tally = as_format(fmt), _tally_of(counted, module, role)
    lost = tally.lost(fmt, scale)
    edges, height = _shares(tally, "histogram")
    if zeros:
        height = height * tally.histogram.sum() / (tally.histogram.sum() + tally.zero)
    shift = log2_of(scale)
    left = edges[:-1] + shift

    ax = _axes(ax)
    ends = (_lowest(tally), edges[-1], _lowest(tally) + shift, left[-1] + 1)
    limits = (min(*ends, _zero_edge(fmt)) - _MARGIN, max(*ends, fmt.emin + 1) + _MARGIN)
    _mark_ranges(ax, fmt, *limits)
    shown = left >= limits[0]
    ax.bar(left[shown], height[shown], **_BARS)
    if shift and not zeros:
        _show_shift(ax, edges, height, shift)
    scaled = "" if scale == 1 else f" at scale {_power(shift)}"
    ax.set(
        xlim=limits,
        ylim=(0, height.max() * (1.18 if shift else 1.08)),
        xlabel="binade of |value|",
        ylabel="share of nonzero values, %",
    )
    _title(ax, f"{100 * lost:.1f} % of nonzero values become zero in {fmt.name}{scaled}")
    _label_binades(ax.xaxis)
    if zeros:
        _show_zeros(ax, tally, limits)
    return ax


def _show_zeros(ax: Axes, tally: Tally, limits: tuple[float, float]) -> None:
    """A bar of the values that are zero, left of all others, and the axes for it."""
    finite = int(tally.histogram.sum()) + tally.zero
    share, place = 100 * tally.zero / finite, limits[0] - 3
    ax.bar([place], [share], **_BARS)
    ax.text(place + 0.5, -0.03, "0", transform=ax.get_xaxis_transform(), ha="center", va="top")
    ax.axvline(limits[0], color="#333333", linewidth=1)
    ax.set(
        xlim=(place - 2, limits[1]),
        ylim=(0.8 * min(100 / finite, 0.01), 200),
        yscale="log",
        ylabel="share of finite values, %",
    )
    ax.yaxis.set_major_formatter("{x:g}")


def _show_shift(ax: Axes, edges: npt.NDArray[np.int64], height: npt.NDArray[np.float64], shift: int) -> None:
    """The outline of the bars where they were, and an arrow from there."""
    ax.stairs(height, edges, color="#333333", linewidth=1, linestyle=(0, (3, 2)), zorder=2)
    peak, top = edges[int(height.argmax())] + 0.5, height.max()
    look = {"arrowstyle": "->", "color": "#333333", "linewidth": 1.5}
    ax.annotate("", xy=(peak + shift, 1.06 * top), xytext=(peak, 1.06 * top), arrowprops=look, zorder=3)
    ax.text(
        peak + shift / 2,
        1.08 * top,
        f"\u00d7 {_power(shift)}",
        ha="center",
        va="bottom",
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
        zorder=3,
    )


def ridgeline(
    records: Records,
    fmt: str | Format = "fp16",
    scale: float = 1.0,
    ax: Axes | None = None,
    *,
    role: str = "gradient",
) -> Axes:
    """One histogram for each module, one above the other, the first module at the top.

    Args:
        records: What was recorded; its loss scale is divided out.
        fmt: Format with a zero, or its name: its limits are lines, and at the right stands what becomes zero.
        scale: A power of two that the values are multiplied by first.
        ax: Where to draw; ``None``: a new figure.
        role: What to draw.

    Returns:
        The Axes.

    Raises:
        ValueError: no such role, no nonzero finite value, or as ``Tally.lost``.
    """
    fmt, shift = as_format(fmt), log2_of(scale)
    tallies = {name: group.tally() for name, _, group in records.select(role=role).groups()}
    tallies = {name: tally for name, tally in tallies.items() if tally.histogram.any()}
    edges, _ = _shares(sum(tallies.values(), Tally()), "ridgeline")
    ax = _axes(ax)
    low = min(min(map(_lowest, tallies.values())) + shift, _zero_edge(fmt)) - _MARGIN
    high = max(edges[-1] + shift, fmt.emin + 1) + _MARGIN
    ax.axvspan(low, _zero_edge(fmt), color=_RANGES["becomes zero"], alpha=0.25, linewidth=0, zorder=0)
    for place, tally in enumerate(reversed(tallies.values())):
        own, height = _shares(tally, "ridgeline")
        ax.stairs(
            place + 0.85 * height / height.max(),
            own + shift,
            baseline=place,
            fill=True,
            facecolor=COLOURS[2],
            alpha=0.75,
            zorder=2,
        )
        ax.axhline(place, color="#333333", linewidth=0.6, zorder=3)
        ax.text(
            1.02,
            place + 0.1,
            f"{100 * tally.lost(fmt, scale):.1f} %",
            transform=ax.get_yaxis_transform(),
            va="bottom",
        )
    ax.text(1.02, 1.0, "to zero", transform=ax.transAxes, va="bottom")
    _mark_limits(ax.axvline, fmt, low, high)
    scaled = "" if scale == 1 else f", at scale {_power(shift)}"
    ax.set(
        xlim=(low, high),
        ylim=(0, len(tallies)),
        xlabel=f"binade of |{role.replace('_', ' ')}|",
        title=f"{fmt.name}{scaled}",
    )
    ax.set_yticks(
        [place + 0.3 for place in range(len(tallies))], [name or "(model)" for name in tallies][::-1]
    )
    ax.tick_params(axis="y", length=0)
    _label_binades(ax.xaxis)
    return ax


def heatmap(
    records: Records,
    fmt: str | Format = "fp16",
    ax: Axes | None = None,
    *,
    by: str = "module",
    module: str | None = None,
    role: str = "gradient",
) -> Axes:
    """Where the nonzero values lie, as colour: a row of binades for each module, or a column for each step.

    Args:
        records: What was recorded; its loss scale is divided out.
        fmt: Format whose limits are lines.
        ax: Where to draw; ``None``: a new figure.
        by: ``"module"`` or ``"step"``.
        module: Which modules, as for ``Records.select``.
        role: What to draw.

    Returns:
        The Axes; a colour bar stands beside it.

    Raises:
        ValueError: another ``by``, no such records, or no nonzero finite value.
    """
    if by not in ("module", "step"):
        raise ValueError(f"by must be 'module' or 'step', got {by!r}")
    fmt, chosen = as_format(fmt), records.select(module, role)
    if by == "module":
        names: list[Any] = chosen.modules
        tallies = [group.tally() for _, _, group in chosen.groups()]
    else:
        names = chosen.steps
        tallies = [chosen.select(steps=step).tally() for step in names]
    edges, _ = _shares(sum(tallies, Tally()), "heatmap")
    lowest = min(_lowest(tally) for tally in tallies if tally.histogram.any())
    low, high = min(lowest, _zero_edge(fmt) - 1), max(edges[-1], fmt.emin + 1)
    shares = np.full((len(tallies), int(high - low)), np.nan)
    for row, tally in zip(shares, tallies, strict=True):
        bins = tally.histogram[low - LOWEST : high - LOWEST]
        row[:] = np.where(bins, 100 * bins / max(1, int(tally.histogram.sum())), np.nan)
    # A binade with nearly all values, as gradients have at the start, would leave no colours to the rest.
    colours: dict[str, Any] = {"cmap": "cividis", "vmin": 0, "vmax": float(np.nanpercentile(shares, 98))}
    colours["rasterized"] = True  # cells side by side in a vector file show seams
    ax = _axes(ax)
    grid = np.arange(low, high + 1)
    if by == "module":
        mesh = ax.pcolormesh(grid, np.arange(len(names) + 1), shares, **colours)
        ax.set_yticks(np.arange(len(names)) + 0.5, [name or "(model)" for name in names])
        ax.invert_yaxis()
        ax.set_xlabel(f"binade of |{role.replace('_', ' ')}|")
        _label_binades(ax.xaxis)
        _mark_limits(ax.axvline, fmt, low, high)
    else:
        ends = np.append(names, 2 * names[-1] - names[-2] if len(names) > 1 else names[-1] + 1)
        mesh = ax.pcolormesh(ends, grid, shares.T, **colours)
        ax.set(xlabel="step", ylabel=f"binade of |{role.replace('_', ' ')}|")
        _label_binades(ax.yaxis)
        _mark_limits(ax.axhline, fmt, low, high)
    ax.figure.colorbar(mesh, ax=ax, label="share of nonzero values, %", extend="max")
    side = "left of" if by == "module" else "below"
    _title(ax, f"{fmt.name}: zero {side} the solid line, subnormal {side} the dashed one")
    return ax


def scale_curve(
    counted: Tally | Records,
    fmts: str | Format | Sequence[str | Format] = "fp16",
    ax: Axes | None = None,
    *,
    exponents: range = range(-10, 31),
) -> Axes:
    """What is lost at every loss scale: small values at the left, large ones at the right.

    Args:
        counted: A Tally, or Records, whose loss scale is divided out.
        fmts: A format, or several, each a line; with one, the scales that lose under 0.1 % are marked.
        ax: Where to draw; ``None``: a new figure.
        exponents: Of the scales.

    Returns:
        The Axes, of the share that becomes zero, solid, and of the largest share that may overflow, dashed.

    Raises:
        ValueError: no nonzero finite value, or as ``Tally.lost``.
    """
    tally = _tally_of(counted, None, None)
    _shares(tally, "scale_curve")
    several = [fmts] if isinstance(fmts, (str, Format)) else list(fmts)
    total = int(tally.histogram.sum())
    ax = _axes(ax)
    for i, fmt in enumerate(map(as_format, several)):
        lost = np.array([100 * tally.lost(fmt, 2.0**e) for e in exponents])
        over = np.array([100 * tally.overflowing(fmt, 2.0**e)[1] / total for e in exponents])
        colour = COLOURS[(0, 2, 1, 3, 4, 5, 6, 7)[i % 8]]
        ax.plot(exponents, lost, color=colour, label=f"{fmt.name} becomes zero")
        ax.plot(exponents, over, color=colour, linestyle="--", label=f"{fmt.name} overflows, at most")
        good = [e for e, a, b in zip(exponents, lost, over, strict=True) if a < 0.1 and b == 0]
        if len(several) == 1 and good:
            label = f"{_power(good[0])} to {_power(good[-1])}: under 0.1 %"
            ax.axvspan(good[0], good[-1], color=COLOURS[3], alpha=0.25, linewidth=0, label=label, zorder=0)
    ax.set(
        xlabel="loss scale",
        ylabel="share of nonzero values, %",
        xlim=(exponents[0], exponents[-1]),
        ylim=(0, None),
    )
    _label_binades(ax.xaxis)
    ax.grid(alpha=0.3)
    ax.legend(framealpha=0.9)
    return ax


def timeline(
    records: Records,
    fmt: str | Format = "fp16",
    ax: Axes | None = None,
    *,
    module: str | None = None,
    role: str = "gradient",
) -> Axes:
    """The largest magnitude and the share that becomes zero over the steps, as seen, with scale and skips.

    Args:
        records: What was recorded.
        fmt: Format with a zero, or its name.
        ax: Where to draw; ``None``: a new figure. The share gets an axis of its own at the right.
        module: Which modules, as for ``Records.select``.
        role: What to draw.

    Returns:
        The Axes of magnitudes, in powers of two. A step with infinities or NaNs, and a step that the loss
        scaler left out, have marks.

    Raises:
        ValueError: no such records, or as ``Tally.lost``.
    """
    fmt, chosen = as_format(fmt), records.select(module, role)
    steps = chosen.steps
    tallies = [chosen.select(steps=step).seen() for step in steps]
    lost = [100 * tally.lost(fmt) for tally in tallies]
    amax = [math.log2(t.amax) if t.amax else math.nan for t in tallies]
    bad = [
        s for s, t in zip(steps, tallies, strict=True) if t.nan + t.positive_infinity + t.negative_infinity
    ]
    ax = _axes(ax)
    marker = "o" if len(steps) == 1 else None
    ax.plot(steps, amax, color=COLOURS[2], marker=marker, label="largest magnitude")
    ax.axhline(math.log2(fmt.max), color=COLOURS[4], linestyle=":", label=f"largest of {fmt.name}")
    scales = {
        row["step"]: row["scale"] for row in records.steps_table.to_pylist() if row["scale"] is not None
    }
    if scales:
        # The step after each change, too, so that a scale reads as a staircase.
        ax.step(
            list(scales),
            [math.log2(scale) for scale in scales.values()],
            where="post",
            color=COLOURS[3],
            label="loss scale",
        )
    skipped = sorted({row["step"] for row in records.steps_table.to_pylist() if row["skipped"]})
    for label, where, shape in (("step left out", skipped, "v"), ("infinity or NaN", bad, "x")):
        if where:
            ax.plot(
                where,
                [0.97] * len(where),
                transform=ax.get_xaxis_transform(),
                linestyle="none",
                marker=shape,
                color=COLOURS[1],
                label=label,
            )
    right = ax.twinx()
    right.plot(steps, lost, color=COLOURS[0], linestyle="--", marker=marker, label=f"to zero in {fmt.name}")
    right.set(ylabel="share that becomes zero, %", ylim=(0, max(1.0, 1.15 * max(lost))))
    ax.set(xlabel="step", ylabel="magnitude, loss scale" if scales else "magnitude")
    _label_binades(ax.yaxis)
    handles = [*ax.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    columns = 3 if _inches(ax) > 5 else 2
    ax.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        frameon=False,
        fontsize="small",
    )
    return ax


def updates(
    counted: Tally | Records, fmt: str | Format = "fp16", ax: Axes | None = None, *, module: str | None = None
) -> Axes:
    """How much larger weights are than their updates, and from where a format loses the update.

    A weight ``m * 2**e`` moves to the next value, rounded to nearest, only if the ratio is below
    ``m * 2**precision``: below ``2**precision`` no update is lost, above twice that all are.

    Args:
        counted: A Tally of ratios, or Records with the role ``update_ratio``.
        fmt: Format of weights, or its name.
        ax: Where to draw; ``None``: a new figure.
        module: Which modules, as for ``Records.select``.

    Returns:
        The Axes. Its title has bounds of the share that is lost.

    Raises:
        ValueError: no such records, or no update that is not zero.
    """
    fmt = as_format(fmt)
    tally = _tally_of(counted, module, None if isinstance(counted, Tally) else "update_ratio")
    edges, height = _shares(tally, "updates")
    ax = _axes(ax)
    limit = fmt.precision
    low, high = min(edges[0], limit - 2) - 1, max(edges[-1], limit + 3) + 1
    ax.axvspan(limit + 1, high, color=COLOURS[1], alpha=0.3, linewidth=0, zorder=0, label="lost")
    ax.axvspan(limit, limit + 1, color=COLOURS[5], alpha=0.3, linewidth=0, zorder=0, label="some lost")
    ax.axvspan(low, limit, color=COLOURS[2], alpha=0.3, linewidth=0, zorder=0, label="kept")
    ax.bar(
        edges[:-1], height, width=1, align="edge", color="#333333", edgecolor="white", linewidth=0.5, zorder=2
    )
    least, most = (float(height[edges[:-1] >= edge].sum()) for edge in (limit + 1, limit))
    ax.set(
        xlim=(low, high),
        xlabel="binade of |weight| / |update|",
        ylabel="share of nonzero updates, %",
    )
    _title(ax, f"{least:.1f} to {most:.1f} % of updates are lost in {fmt.name} weights")
    ax.legend(title=fmt.name, framealpha=0.9)
    _label_binades(ax.xaxis)
    return ax


def _tally_of(counted: Tally | Records, module: str | None, role: str | None) -> Tally:
    if isinstance(counted, Tally):
        if module is not None or role is not None:
            raise ValueError("module= and role= choose among Records; a Tally has neither")
        return counted
    return counted.select(module, role).tally()


def _shares(tally: Tally, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The edges of the occupied binades, and how many percent of the nonzero values lie in each."""
    occupied = np.flatnonzero(tally.histogram)
    if not occupied.size:
        raise ValueError(
            f"{name} needs a tally with a nonzero finite value, got one without; nothing to draw"
        )
    edges = np.arange(occupied[0], occupied[-1] + 2) + LOWEST
    bins = tally.histogram[occupied[0] : occupied[-1] + 1]
    return edges, 100 * bins / bins.sum()


def _inches(ax: Axes) -> float:
    """The width of Axes."""
    figure: Any = ax.get_figure(root=True)
    return float(ax.get_position().width * figure.get_size_inches()[0])


def _title(ax: Axes, text: str) -> None:
    """A title that breaks into lines about as wide as the Axes, at 0.085 inches a letter of 12 points."""
    size = FontProperties(size=rcParams["axes.titlesize"]).get_size_in_points()
    letters = max(20, int(1.15 * _inches(ax) / (0.085 * size / 12)))  # a little wider does no harm
    short = re.sub(r"\$2\^\{(-?\d+)\}\$", r"2^\1", text)
    lines = "\n".join(textwrap.wrap(short, letters, break_long_words=False))
    ax.set_title(re.sub(r"2\^(-?\d+)", r"$2^{\1}$", lines))


def _lowest(tally: Tally) -> int:
    """The binade where pictures begin: they leave out the smallest 0.1 % of the values."""
    return log2_of(tally.quantile(0.001))


def _mark_limits(line: Any, fmt: Format, low: float, high: float) -> None:
    """Lines where values become zero, where they become subnormal, and where they overflow."""
    for edge, style in ((_zero_edge(fmt), "-"), (fmt.emin, "--"), (math.log2(fmt.max), "-")):
        if low < edge < high:
            line(edge, color=COLOURS[1], linewidth=1.8, linestyle=style, zorder=4)


def _label_binades(axis: Axis) -> None:
    axis.set_major_formatter(lambda x, _: _power(round(x)))
    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 10]))


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
