"""A run's records as one HTML page that needs nothing else: a summary in words, tables that sort, figures."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import replace_whole
from .formats import Format, as_format
from .kernels.layout import LOWEST
from .records import Records
from .scaling import Window
from .stats import Tally
from .watching import GRADIENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 0.001  # a share that is no loss to speak of
MOST_LAYERS = 40  # that a figure shows


def summary(records: Records, fmt: str | Format = "fp16") -> list[str]:
    """What there is to say of a run, in sentences: what a format loses, which scale helps, what went wrong.

    Args:
        records: What was recorded.
        fmt: Signed format with a zero, or its name.

    Raises:
        ValueError: as ``Tally.lost``.
    """
    fmt = as_format(fmt)
    return [
        *_extent(records),
        *_gradients(records, fmt),
        *_others(records, fmt),
        *_updates(records, fmt),
        *_scaler(records),
        *_left_alone(records),
    ]


def _has(records: Records, roles: tuple[str, ...]) -> bool:
    return bool(set(roles) & set(records.roles))


def _extent(records: Records) -> Iterator[str]:
    steps, ranks = records.steps, len(set(records.table.column("rank").to_pylist()))
    values = sum(records.table.column("count").to_pylist())
    yield (
        f"{_count(len(steps), 'step')} recorded, {steps[0]} to {steps[-1]}, on {_count(ranks, 'rank')}: "
        f"{values:,} numbers of {_count(len(records.modules), 'module')}."
    )


def _gradients(records: Records, fmt: Format) -> Iterator[str]:
    if not _has(records, GRADIENTS):
        return
    gradients = records.select(role=GRADIENTS)
    losses = gradients.what_if(fmt)
    worst = sorted((one for one in losses.losses if one.share > FEW), key=lambda one: -one.share)
    windows = gradients.suggest_scale(fmt, FEW).layers
    if not worst:
        yield f"Without a loss scale no layer loses more than {FEW:.1%} of its gradients in {fmt.name}."
    for one in worst[:3]:
        what = "activation gradients" if one.role == "gradient" else "weight gradients"
        window = windows[one.module, one.role]
        loses = f"{one.module or 'The model'} loses {one.share:.1%} of its {what} in {fmt.name}"
        yield f"{loses}; {_helps(window)}."
    if len(worst) > 3:
        yield f"{_count(len(worst) - 3, 'other group')} of gradients lose more than {FEW:.1%}."


def _helps(window: Window) -> str:
    if window.lowest is None or window.highest is None:
        return "no loss scale helps"
    low, high = _power(window.lowest), _power(window.highest)
    if window.lowest > window.highest:
        return f"a loss scale of {low} would lose under {FEW:.1%}, but from above {high} some overflow"
    return f"a loss scale of {low} to {high} loses under {FEW:.1%}"


def _others(records: Records, fmt: Format) -> Iterator[str]:
    rest = [one for one in records.what_if(fmt).losses if one.role not in GRADIENTS]
    for role in ("activation", "weight"):
        over = [one for one in rest if one.role == role and one.overflow[0]]
        if over:
            worst = max(over, key=lambda one: one.overflow_share[0])
            yield (
                f"{_count(len(over), 'module')} of {len(records.modules)} with {role}s beyond the largest "
                f"value of {fmt.name}, {fmt.max:g}; {worst.module or 'the model'} has most."
            )
    event = records.first_overflow()
    yield f"The first infinity or NaN: {event}." if event else "There was no infinity and no NaN."


def _updates(records: Records, fmt: Format) -> Iterator[str]:
    if not _has(records, ("update_ratio",)):
        return
    ratios = records.select(role="update_ratio").tally()
    total = int(ratios.histogram.sum())
    if total:
        least, most = (
            int(ratios.histogram[fmt.precision + more - LOWEST :].sum()) / total for more in (1, 0)
        )
        yield (
            f"Of the weight updates that were not zero, {least:.1%} to {most:.1%} would leave a weight kept "
            f"in {fmt.name} as it was, rounded to nearest."
        )


def _scaler(records: Records) -> Iterator[str]:
    rows = [row for row in records.steps_table.to_pylist() if row["scale"] is not None]
    if rows:
        scales = [row["scale"] for row in rows]
        skipped = len({row["step"] for row in rows if row["skipped"]})
        first, last, most = map(_power, (scales[0], scales[-1], max(scales)))
        yield (
            f"The loss scale went from {first} to {last}, at most {most}; the scaler left out "
            f"{_count(skipped, 'step')} of {len({row['step'] for row in rows})}."
        )


def _left_alone(records: Records) -> Iterator[str]:
    for run in records.runs.values():
        for where, why in run.get("left_alone", {}).items():
            yield f"Not counted: {where}, {why}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _power(scale: float) -> str:
    mantissa, exponent = scale.hex().split("p")
    return f"2^{int(exponent)}" if mantissa.rstrip("0") == "0x1." else f"{scale:g}"


def write_report(records: Records, path: str | Path, fmt: str | Format = "fp16") -> None:
    """Write the page to a file, at once.

    Args:
        records: What was recorded.
        path: Of the HTML file.
        fmt: Signed format with a zero, or its name: what its losses would have been.

    Raises:
        ValueError: as ``Tally.lost``.
        OSError: the file cannot be written.
    """
    page = html(records, as_format(fmt))
    replace_whole(Path(path), lambda part: part.write_text(page, encoding="utf-8"))


def html(records: Records, fmt: Format) -> str:
    """The page's text."""
    names = ", ".join(name for name in records.runs if name) or "records"
    sentences = "".join(f"<li>{_marked(escape(line))}</li>" for line in summary(records, fmt))
    figures = "".join(_figure(title, text, draw, size) for title, text, draw, size in _figures(records, fmt))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(names)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(names)}</h1><p>What {escape(fmt.name)} would have made of the numbers of this run.</p>"
        f"<ul>{sentences}</ul>{figures}<h2>All numbers</h2><p>A click on a heading sorts.</p>"
        f"{_table(records, fmt)}<h2>The run</h2>{_runs(records)}<script>{SCRIPT}</script></body></html>\n"
    )


def _marked(text: str) -> str:
    """Powers with their exponents raised."""
    return re.sub(r"2\^(-?\d+)", r"2<sup>\1</sup>", text)


Draw = Callable[["Axes"], Any]


def _figures(records: Records, fmt: Format) -> Iterator[tuple[str, str, Draw, tuple[float, float]]]:
    from . import plot

    wide = (8.0, 4.0)
    if "gradient" in records.roles:
        gradients = records.select(role="gradient")
        shown = _worst_layers(gradients, fmt)
        tall = (8.0, max(2.5, 1.2 + 0.45 * len(shown.modules)))
        if gradients.tally().histogram.any():
            yield (
                "Activation gradients",
                "All layers together, divided by the loss scale.",
                lambda ax: plot.histogram(gradients, fmt, ax=ax),
                wide,
            )
            yield (
                "Which loss scale",
                "Small scales lose small gradients, large ones overflow.",
                lambda ax: plot.scale_curve(gradients, fmt, ax=ax),
                wide,
            )
            yield (
                "Layer by layer",
                f"The {MOST_LAYERS} layers that lose most." if shown is not gradients else "",
                lambda ax: plot.ridgeline(shown, fmt, ax=ax),
                tall,
            )
            if len(gradients.steps) > 1:
                yield (
                    "Step by step",
                    "Where the gradients lie in the course of training.",
                    lambda ax: plot.heatmap(gradients, fmt, by="step", ax=ax),
                    wide,
                )
                yield (
                    "Scale and losses",
                    "As seen in training, multiplied by the loss scale.",
                    lambda ax: plot.timeline(gradients, fmt, ax=ax),
                    (8.0, 4.6),
                )
    if "update_ratio" in records.roles and records.select(role="update_ratio").tally().histogram.any():
        yield (
            "Weight updates",
            "How many times larger than its update a weight is.",
            lambda ax: plot.updates(records, fmt, ax=ax),
            wide,
        )


def _worst_layers(records: Records, fmt: Format) -> Records:
    losses = records.what_if(fmt).losses
    if len(losses) <= MOST_LAYERS:
        return records
    chosen = {one.module for one in sorted(losses, key=lambda one: -one.share)[:MOST_LAYERS]}
    return records.select(module=sorted(chosen))


def _figure(title: str, text: str, draw: Draw, size: tuple[float, float]) -> str:
    from matplotlib.figure import Figure

    figure, buffer = Figure(figsize=size, layout="constrained"), io.BytesIO()
    draw(figure.subplots())
    figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None})
    source = base64.b64encode(buffer.getvalue()).decode()
    return (
        f"<h2>{escape(title)}</h2><p>{escape(text)}</p>"
        f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{source}">'
    )


HEADS = (
    "module",
    "role",
    "values",
    "zero",
    "becomes zero",
    "overflows, at most",
    "median",
    "largest",
    "inf, NaN",
)


def _table(records: Records, fmt: Format) -> str:
    heads = "".join(f'<th><button type="button">{escape(head)}</button></th>' for head in HEADS)
    rows = "".join(
        f"<tr>{_row(module, role, group.tally(), fmt)}</tr>"
        for module, role, group in records.groups()
        if role != "update_ratio"
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(module: str, role: str, t: Tally, fmt: Format) -> str:
    values = int(t.histogram.sum())
    lost, over = t.lost(fmt), t.overflowing(fmt)[1] / values if values else 0.0
    bad = t.infinities + t.nan
    cells: list[tuple[Any, str]] = [
        (t.count, f"{t.count:,}"),
        (t.share("zero"), f"{t.share('zero'):.2%}"),
        (lost, f"{lost:.2%}"),
        (over, f"{over:.2%}"),
        (t.quantile(0.5), f"{t.quantile(0.5):.2g}"),
        (t.amax, f"{t.amax:.3g}"),
        (bad, f"{bad:,}"),
    ]
    named = f"<td>{escape(module or '(model)')}</td><td>{escape(role)}</td>"
    return named + "".join(f'<td data-value="{value!r}">{text}</td>' for value, text in cells)


def _runs(records: Records) -> str:
    lines = [
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for about in records.runs.values()
        for name, value in about.items()
        if name not in ("left_alone", "emulated") and value not in ([], {})
    ]
    return f'<div class="wide"><table><tbody>{"".join(lines)}</tbody></table></div>'


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;
  color:#222;background:#fff}
h1{font-size:1.5rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin-top:2.2rem}
img{max-width:100%;height:auto}
table{border-collapse:collapse;font-size:.875rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:left}
td[data-value]{text-align:right;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
th button{font:inherit;font-weight:600;border:0;background:none;padding:0;cursor:pointer;text-align:left}
th[aria-sort=ascending] button::after{content:" \\2191"}
th[aria-sort=descending] button::after{content:" \\2193"}
"""

SCRIPT = """
document.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
  const down = head.getAttribute("aria-sort") !== "descending";
  document.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = head.closest("table").tBodies[0];
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = (a, b) => isNaN(a) || isNaN(b) ? String(a).localeCompare(String(b)) : a - b;
  [...body.rows].sort((a, b) => compare(key(a), key(b)) * (down ? -1 : 1)).forEach(row => body.append(row));
}));
"""
