"""A run that trains, in a terminal: its last recorded step as a table."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .formats import as_format
from .records import load


def view(run: str, fmt: str) -> tuple[Any, bool]:
    """What to show of a run now, and whether it has ended.

    Args:
        run: The directory that a Recorder writes to; it may hold nothing yet.
        fmt: Signed format with a zero, whose losses are shown.
    """
    about = Path(run).absolute() / "run.json"
    finished = about.exists() and bool(json.loads(about.read_text(encoding="utf-8"))["finished"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of damaged files: `report` tells of them
            records = load(run)
    except FileNotFoundError:
        if finished:
            raise
        return Text(f"{about.parent.name}: nothing was recorded yet"), False
    last = records.select(steps=records.steps[-1])
    known = records.steps_table.to_pylist()
    scales = [row["scale"] for row in known if row["scale"] is not None]
    skipped = len({row["step"] for row in known if row["skipped"]})
    scale = f", loss scale {scales[-1]:g}, {skipped} steps left out" if scales else ""
    title = f"{about.parent.name}: {'ended' if finished else 'running'}, step {records.steps[-1]}{scale}"
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
