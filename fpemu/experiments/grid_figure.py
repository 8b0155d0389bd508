"""The figure of a grid: what each axis costs alone, and what everything costs at each loss scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
_SERIES = {  # how the lines of the right panels look
    "gradients nearest": (COLOURS[7], "s"),
    "all nearest": (COLOURS[1], "o"),
    "all stochastic": (COLOURS[2], "^"),
    "all kahan": (COLOURS[3], "D"),
}
_ROUNDING = {name.split()[1]: look for name, look in _SERIES.items() if name.startswith("all")}


def draw(figure: Figure, rows: Rows) -> None:
    """Draw the rows of a grid's table.

    Args:
        figure: An empty one.
        rows: As ``grid.row`` gives them; several seeds are several points.
    """
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.1))[0]
    formats = list(dict.fromkeys(fmt for row in rows if (fmt := _format(row)) != "fp32"))
    top = _top(rows)
    _one_at_a_time(left.subplots(), rows, top)
    panels = right.subplots(len(formats), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, fmt in zip(panels, formats, strict=True):
        _by_scale(ax, rows, fmt, top)
    panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    panels[-1].set_xlabel("loss scale")
    first = rows[0]
    figure.suptitle(
        f"{first['model']} on {first['data'].split(':')[0]}: training loss after {_longest(rows)} steps; "
        "dashed: FP32, dotted: with warm-up"
    )


def _longest(rows: Rows) -> int:
    return max(row["steps"] for row in rows)


def _format(row: dict[str, Any]) -> str:
    words = row["strategy"].split()
    return words[1] if len(words) > 1 else "fp32"


def _top(rows: Rows) -> float:
    """Where runs that diverged, or are ten times as bad as any network that says nothing, are drawn."""
    finite = [row["train_loss"] for row in rows if math.isfinite(row["train_loss"])]
    return min(max(finite, default=1.0), 10.0) * 1.3


def _shown(row: dict[str, Any], top: float) -> float:
    loss: float = row["train_loss"]
    return loss if math.isfinite(loss) and loss < top else top


def _one_at_a_time(ax: Axes, rows: Rows, top: float) -> None:
    alone = [
        row for row in rows if row["loss_scale"] == "none" and not row["strategy"].startswith(("all", "fp32"))
    ]
    names = list(dict.fromkeys(row["strategy"] for row in alone))
    for row in alone:
        colour, marker = _ROUNDING[row["strategy"].split()[2]]
        beyond = _shown(row, top) == top
        ax.plot(
            _shown(row, top),
            names.index(row["strategy"]),
            color=colour,
            marker="x" if beyond else marker,
            linestyle="none",
        )
    _mark_fp32(ax.axvline, rows, top)
    ax.set(
        yticks=range(len(names)), yticklabels=names, xscale="log", title="one part at a time, no loss scale"
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("training loss")
    ax.grid(alpha=0.3, which="both")
    _plain_numbers(ax.xaxis)


def _by_scale(ax: Axes, rows: Rows, fmt: str, top: float) -> None:
    here = [row for row in rows if _format(row) == fmt]
    scales = list(dict.fromkeys(row["loss_scale"] for row in here if row["strategy"].startswith("all")))
    for i, (series, (colour, marker)) in enumerate(_SERIES.items()):
        axis, rounding = series.split()
        chosen = [row for row in here if row["strategy"].split()[::2][:2] == [axis, rounding]]
        for warm in (False, True):
            some = [r for r in chosen if bool(r["warmup"]) == warm and r["loss_scale"] in scales]
            ax.plot(
                # Side by side, as most lie on each other.
                [scales.index(row["loss_scale"]) + 0.16 * (i - 1.5) + 0.07 * warm for row in some],
                [_shown(row, top) for row in some],
                color=colour,
                marker=marker,
                markerfacecolor="none" if warm else colour,
                linestyle="none",
                label=f"{series}{', warm-up' if warm else ''}" if some else None,
            )
        diverged = [r for r in chosen if r["loss_scale"] in scales and _shown(r, top) == top]
        ax.plot(
            [
                scales.index(row["loss_scale"]) + 0.16 * (i - 1.5) + 0.07 * bool(row["warmup"])
                for row in diverged
            ],
            [top] * len(diverged),
            color="black",
            marker="x",
            markersize=9,
            linestyle="none",
        )
    _mark_fp32(ax.axhline, rows, top)
    ax.set(xticks=range(len(scales)), xticklabels=scales, yscale="log", title=fmt, ylabel="training loss")
    ax.grid(alpha=0.3, which="both", axis="y")
    _plain_numbers(ax.yaxis)


def _mark_fp32(line: Any, rows: Rows, top: float) -> None:
    for row in rows:
        if row["strategy"] == "fp32":
            style = ":" if row["warmup"] else "--"
            line(_shown(row, top), color="black", linestyle=style, linewidth=1, zorder=0)


def _plain_numbers(axis: Any) -> None:
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:.4g}")
