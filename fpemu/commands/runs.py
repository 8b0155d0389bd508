"""`fpemu report` and `fpemu watch`: what a Recorder wrote."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..formats import as_format
from .common import bad_input


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="directory of a Recorder, or a pattern of such")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="the HTML file")] = "report.html",
    fmt: Annotated[str, typer.Option("--format", help="whose losses are shown")] = "fp16",
) -> None:
    """Write what was recorded of a run to one HTML page that needs no network."""
    from ..records import load
    from ..report import summary, write_report

    with bad_input():
        records = load(run)
        lines = summary(records, fmt)
        write_report(records, out, fmt)
    for line in lines:
        typer.echo(line)
    typer.echo(f"The page is {out}.")


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="directory that a Recorder writes to")],
    fmt: Annotated[str, typer.Option("--format", help="whose losses are shown")] = "fp16",
    every: Annotated[float, typer.Option(min=0.1, help="seconds from one look to the next")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="look once")] = False,
) -> None:
    """Show a run in the terminal while it trains: the last recorded step, until the run ends or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from ..terminal import view

    with bad_input():
        as_format(fmt)
        shown, finished = view(run, fmt)
    console = Console()
    if once or finished:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False) as live:
        try:
            while not finished:
                time.sleep(every)
                shown, finished = view(run, fmt)
                live.update(shown, refresh=True)
        except KeyboardInterrupt:
            return
