"""The `fpemu` command."""

from __future__ import annotations

import typer

from .commands.ablate import ablate
from .commands.bench import bench
from .commands.check import check, doctor
from .commands.numbers import formats, round_, show
from .commands.runs import report, watch

app = typer.Typer(
    name="fpemu",
    help="Emulate floating-point formats and see what a network loses in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (ablate, doctor, bench, check, report, watch, formats, show):
    app.command()(command)
# A negative number is a value, no option.
app.command(name="round", context_settings={"ignore_unknown_options": True})(round_)


if __name__ == "__main__":
    app()
