"""The `fpemu` command."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Annotated, NoReturn

import typer

from .formats import ALIASES, NAMED, OVERFLOWS, ROUNDINGS, Format, as_format

app = typer.Typer(
    name="fpemu",
    help="Emulate floating-point formats and see what a network loses in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_WIDTH = 80

_FormatName = Annotated[str, typer.Argument(metavar="FORMAT", help="fp16, bf16, e4m3fn, e5m10 ...")]


def _fail(message: object) -> NoReturn:
    typer.echo(f"fpemu: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turn an error about what the user gave into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        _fail(error)


@app.command()
def ablate(
    data: Annotated[str, typer.Option(help="digits, or fashion-mnist:DIRECTORY of the four .gz files")] = "digits",
    strategies: Annotated[
        str, typer.Option(metavar="A,B,FILE", help="built-in names and .toml or .yaml files; default: all built in")
    ] = "",
    lr: Annotated[float, typer.Option(help="learning rate of SGD")] = 0.003,
    momentum: Annotated[float, typer.Option(help="momentum of SGD")] = 0.0,
    batch: Annotated[int, typer.Option(help="images a step")] = 32,
    epochs: Annotated[int, typer.Option(help="passes over the training images")] = 200,
    seeds: Annotated[int, typer.Option(help="runs of each strategy")] = 2,
    out: Annotated[str, typer.Option(metavar="DIR", help="where results and figures go")] = "fpemu-ablate",
    workers: Annotated[int, typer.Option(help="processes, one thread each")] = 2,
) -> None:
    """Train a small network under several strategies and show what each costs.

    Writes results.json, gradients.png and losses.png to DIR. Runs that DIR already holds are not run again.
    """
    from rich.console import Console

    from .experiments.ablate import ablate as compare
    from .experiments.ablate import check_directory, table
    from .experiments.strategies import STRATEGIES, load_strategies
    from .experiments.train import Settings

    with _bad_input():
        chosen = load_strategies(strategies or ",".join(STRATEGIES))
        settings = Settings(data, lr, momentum, batch, epochs)
        check_directory(out)
        if seeds < 1 or workers < 1:
            raise ValueError(f"--seeds and --workers must be at least 1, got {seeds} and {workers}")
    with _progress() as progress:
        results = compare(chosen, settings, seeds=seeds, out=out, workers=workers, progress=progress)
    console = Console()
    console.print(table(results))
    console.print(f"Mean of {seeds} seed(s), ± sample standard deviation; figures and results.json in {out}/",
                  soft_wrap=True, highlight=False)  # fmt: skip
