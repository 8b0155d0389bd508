"""A run that trains, in a terminal: its last recorded step as a table."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .formats import as_format
from .records import about_run, load


def view(run: str, fmt: str) -> tuple[Any, bool]:
    """What to show of a run now, and whether it has ended.

    Args:
        run: The directory that a Recorder writes to; it may hold nothing yet.
        fmt: Signed format with a zero, whose losses are shown.
    """
    directory = Path(run).absolute()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of damaged files: `report` tells of them
            finished = bool(about_run(directory).get("finished"))
            records = load(run)
    except FileNotFoundError:
        if finished:
            raise
        return Text(f"{directory.name}: nothing was recorded yet"), False
    last = records.select(steps=records.steps[-1])
    known = records.steps_table.to_pylist()
    scales = [row["scale"] for row in known if row["scale"] is not None]
    skipped = len({row["step"] for row in known if row["skipped"]})
    scale = f", loss scale {scales[-1]:g}, {skipped} steps left out" if scales else ""
    title = f"{directory.name}: {'ended' if finished else 'running'}, step {records.steps[-1]}{scale}"
    table = Table(title=Text(title), title_justify="left", box=None, header_style="bold")
    for head in ("module", "role"):
        table.add_column(head)
    for head in ("largest", f"to zero in {as_format(fmt)}", "inf, NaN"):
        table.add_column(head, justify="right")
    for module, role, group in last.groups():
        if role != "update_ratio":
            t = group.seen()
            bad = str(t.infinities + t.nan)
            row = (module or "(model)", role, f"{t.amax:.3g}", f"{t.lost(fmt):.1%}", bad)
            table.add_row(*map(Text, row))
    return table, finished
