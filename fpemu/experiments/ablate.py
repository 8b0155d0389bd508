"""Strategies side by side: train each with several seeds, tabulate, draw, and keep what is finished."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from .. import Tally, plot
from ..files import replace_whole
from ..formats import as_format
from .models import build
from .result import Result, Run
from .runs import finish
from .settings import Settings
from .strategies import Strategy, check_names
from .train import check_model


def ablate(
    strategies: Iterable[Strategy],
    settings: Settings | None = None,
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Train every strategy with every seed.

    Args:
        strategies: What to compare.
        settings: What they share; by default a small learning rate, at which rounding loses weight updates.
        seeds: Seeds 0 to ``seeds - 1``.
        out: Directory for results.json, gradients.png and losses.png, made if need be. Runs that its
            results.json holds, by this version of fpemu, are not run again. ``None``: nothing is written.
        workers: Processes, one thread each; 1 trains in this process.
        progress: Called with the number of finished runs and of all runs.

    Returns:
        The results, by strategy, then seed.

    Raises:
        ValueError: bad strategies, data, seeds or workers, or a results.json that is not ours.
        OSError: the directory cannot be written.
    """
    settings = settings or Settings()
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds!r}")
    strategies = list(strategies)
    check_names(strategies)
    for strategy in strategies:
        check_model(strategy, build(settings.model, 64, 2, (8, 8)))
    runs: list[Run] = [(strategy, settings, seed) for strategy in strategies for seed in range(seeds)]
    results = finish(runs, out=out, workers=workers, progress=progress)
    if out is not None:
        _draw(Path(out), results)
    return results


def _draw(directory: Path, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    groups = by_strategy(results)
    first = next((name for name in groups if not groups[name][0].strategy.roles), next(iter(groups)))
    formats = [result.strategy.gradient_format for result in results]
    fmt = next((fmt for fmt in formats if fmt is not None and fmt.has_zero), as_format("fp16"))
    gradients = sum((run.gradients for run in groups[first]), Tally())
    curves = {
        name: [statistics.fmean(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
        for name, runs in groups.items()
    }
    for name in ("gradients", "losses"):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        if name == "losses":
            plot.losses(curves, ax=axes)
        elif gradients.histogram.any():
            plot.histogram(gradients, fmt, ax=axes)
            axes.set_xlabel(f"binade of |activation gradient| at the end of training in {first}")
        else:
            axes.set_title(f"no finite nonzero activation gradient at the end of training in {first}")
        replace_whole(directory / f"{name}.png", partial(figure.savefig, dpi=150))


def by_strategy(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each strategy, in the order they come."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.strategy.name, []).append(result)
    return groups


def table(results: Iterable[Result]) -> Table:
    """The results as a table of one line a strategy, 80 columns wide."""
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    grid.add_column("strategy", no_wrap=True)
    for heading in (
        "test\nacc. %", "train\nloss", "grad.\nto 0 %", "sub-\nnorm. %", "over-\nflow %", "updates\nlost %",
        "steps\nskipped", "kilo-\nbytes",
    ):  # fmt: skip
        grid.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for name, runs in by_strategy(results).items():
        grid.add_row(Text(name), *_cells(runs))  # as Text, [brackets] are no markup
    return grid


def _cells(runs: list[Result]) -> list[str]:
    accuracies = [100 * run.accuracy for run in runs]
    spread = f" ± {statistics.stdev(accuracies):.1f}" if len(runs) > 1 else ""
    gradients = sum((run.gradients for run in runs), Tally())
    nonzero = gradients.count - gradients.zero or 1
    updates = sum(run.updates or 0 for run in runs)
    return [
        f"{statistics.fmean(accuracies):.1f}{spread}",
        f"{statistics.fmean(run.train_loss for run in runs):.4g}",
        *(
            _percent(count / nonzero)
            for count in (gradients.underflow, gradients.subnormal, gradients.overflow)
        ),
        "-"
        if runs[0].updates is None
        else _percent(sum(run.lost_updates or 0 for run in runs) / (updates or 1)),
        f"{statistics.fmean(run.skipped_steps for run in runs):.0f}" if runs[0].strategy.loss_scale else "-",
        f"{runs[0].bytes / 1000:.0f}",
    ]


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    return f"{100 * share:.1f}" if share >= 0.0005 else "<0.1"
