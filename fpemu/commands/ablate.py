"""`fpemu ablate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from .common import bad_input


def ablate(
    model: Annotated[
        str, typer.Option(help="mlp or resnet8 for images, gru or transformer for text")
    ] = "mlp",
    data: Annotated[
        str,
        typer.Option(help="digits, pydoc, or fashion-mnist:DIRECTORY; default: digits, or pydoc for text"),
    ] = "",
    data_dir: Annotated[
        str, typer.Option(metavar="DIR", help="of Fashion-MNIST's four files: fashion-mnist:DIR for short")
    ] = "",
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B,FILE", help="built-in names and .toml or .yaml files; default: all built in"
        ),
    ] = "",
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate; the mlp's default is 0.003")] = None,
    momentum: Annotated[float | None, typer.Option(help="momentum of SGD; the mlp's default is 0")] = None,
    batch: Annotated[int | None, typer.Option(help="images or texts a step; 32")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the training data; 200")] = None,
    steps: Annotated[int | None, typer.Option(help="most steps of a run")] = None,
    warmup: Annotated[
        int | None, typer.Option(help="steps in which the rate rises; with --grid, of the runs with warm-up")
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="each part of a step alone in low precision, then all of them")
    ] = False,
    formats: Annotated[str, typer.Option(metavar="A,B", help="of the grid; fp16,bf16")] = "",
    roundings: Annotated[str, typer.Option(metavar="A,B", help="of the grid; nearest,stochastic,kahan")] = "",
    scales: Annotated[
        str, typer.Option(metavar="A,B", help="loss scales of the grid; none,8,128,32768,dynamic")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="short runs of the grid: the mlp's take minutes")
    ] = False,
    seeds: Annotated[int, typer.Option(help="runs of each strategy")] = 1,
    out: Annotated[str, typer.Option(metavar="DIR", help="where results and figures go")] = "fpemu-ablate",
    workers: Annotated[int, typer.Option(help="processes, one thread each")] = 2,
) -> None:
    """Train a small network under several strategies and show what each costs.

    Writes results.json, gradients.png and losses.png to DIR; with --grid, results.json, results.parquet and
    grid.png. Runs that DIR already holds are not run again.
    """
    from ..experiments.grid import FORMATS, PRESETS, QUICK, ROUNDINGS, SCALES, ablate_grid, parse_scale
    from ..experiments.grid import grid as strategies_of
    from ..experiments.settings import Settings
    from ..experiments.strategies import STRATEGIES, load_strategies

    with bad_input():
        given: dict[str, Any] = {
            "data": _data(data, data_dir),
            "optimizer": optimizer,
            "lr": lr,
            "momentum": momentum,
            "batch": batch,
            "epochs": epochs,
            "steps": steps,
            "warmup": None if grid else warmup,
        }
        _refuse_without_grid(grid, strategies, formats, roundings, scales, quick)
        if model not in PRESETS:
            raise ValueError(f"unknown model {model!r}; choose from {', '.join(PRESETS)}")
        preset = (QUICK if quick else PRESETS)[model] if grid or model != "mlp" else Settings()
        if optimizer == "adam" and momentum is None:
            preset = replace(preset, momentum=0.0)
        settings = replace(preset, **{name: value for name, value in given.items() if value is not None})
        if grid:
            scales_of_grid = [parse_scale(text) for text in _words(scales)] or SCALES
            chosen = list(
                strategies_of(
                    settings, _words(formats) or FORMATS, _words(roundings) or ROUNDINGS, scales_of_grid
                )
            )
        else:
            chosen = load_strategies(strategies or ",".join(STRATEGIES))
    with bad_input(), _progress() as progress:
        if grid:
            warm = (100 if quick else 500) if warmup is None else warmup
            results = ablate_grid(
                settings, chosen, warmup=warm, seeds=seeds, out=out, workers=workers, progress=progress
            )
        else:
            from ..experiments.ablate import ablate as compare

            results = compare(chosen, settings, seeds=seeds, out=out, workers=workers, progress=progress)
    _report(results, grid, seeds, out)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the terminal; called with how many runs are done, and of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("")

    def show(done: int, total: int) -> None:
        bar.start()  # not before: bad input gives one line, without a bar
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _data(data: str, directory: str) -> str | None:
    if data and directory:
        raise ValueError(f"--data {data} and --data-dir {directory} both name data; give one")
    return f"fashion-mnist:{directory}" if directory else data or None


def _refuse_without_grid(
    grid: bool, strategies: str, formats: str, roundings: str, scales: str, quick: bool
) -> None:
    """Options that would be ignored."""
    if grid and strategies:
        raise ValueError("--grid has strategies of its own; leave out --strategies")
    for name, value in {
        "--formats": formats, "--roundings": roundings, "--scales": scales, "--quick": quick
    }.items():  # fmt: skip
        if value and not grid:
            raise ValueError(f"{name} is for --grid; add it")


def _report(results: list[Any], grid: bool, seeds: int, out: str) -> None:
    """What to look at."""
    from rich.console import Console

    from ..experiments.ablate import table

    console = Console()
    if grid:
        files = f"results.parquet, of {len(results)} runs, and grid.png are in {out}/."
    else:
        console.print(table(results))
        spread = "" if seeds == 1 else f" Means of {seeds} seeds, ± sample standard deviation."
        files = f"results.json, gradients.png and losses.png are in {out}/.{spread}"
    console.print(files, soft_wrap=True, highlight=False, markup=False)
    settings = results[0].settings
    # Without momentum, the rate at which weights move.
    if (
        settings.model == "mlp"
        and settings.optimizer == "sgd"
        and settings.lr / (1 - settings.momentum) < 0.011
    ):
        console.print(
            "The learning rate is low on purpose, so that updates fall below half an ulp of the weights; "
            "an ordinary one hides it: --lr 0.1 --momentum 0.9.",
            soft_wrap=True,
            highlight=False,
        )
