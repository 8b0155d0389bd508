"""What the subcommands share: one line for bad input, and how a format is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

FormatName = Annotated[str, typer.Argument(metavar="FORMAT", help="fp16, bf16, e4m3fn, e5m10 ...")]


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn an error about what the user gave into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"fpemu: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
