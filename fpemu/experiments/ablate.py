"""Strategies side by side: train each with several seeds, tabulate, draw, and keep what is finished."""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import Tally, __version__, plot
from ..formats import as_format
from .data import load_data
from .models import mlp
from .strategies import Strategy, check_names
from .train import Result, Settings, emulation, train

Run = tuple[Strategy, Settings, int]


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
    for name, value in (("seeds", seeds), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    strategies = list(strategies)
    check_names(strategies)
    for strategy in strategies:
        with emulation(mlp(1, 1, 1), strategy.policy):
            pass  # a pattern that matches no module is told here, not after hours
    runs: list[Run] = [(strategy, settings, seed) for strategy in strategies for seed in range(seeds)]
    finished = {} if out is None else check_directory(out)
    pending = [run for run in runs if _run_id(run) not in finished]
    if pending:
        load_data(settings.data)  # a damaged file is told here, not by a worker
    progress(len(runs) - len(pending), len(runs))
    for done, result in enumerate(_train_all(pending, workers), len(runs) - len(pending) + 1):
        finished[_run_id((result.strategy, result.settings, result.seed))] = result
        if out is not None:
            _write_results(Path(out), finished.values())
        progress(done, len(runs))
    results = [finished[_run_id(run)] for run in runs]
    if out is not None:
        _draw(Path(out), results)
    return results


def _run_id(run: Run) -> str:
    strategy, settings, seed = run
    return json.dumps([strategy.as_dict(), asdict(settings), seed], sort_keys=True)


def _train_all(runs: list[Run], workers: int) -> Iterator[Result]:
    if min(workers, len(runs)) <= 1:
        yield from map(_train_one, runs)
        return
    # spawn: a forked child would die in OpenMP, which torch and numba have started here.
    pool = ProcessPoolExecutor(min(workers, len(runs)), get_context("spawn"), _start_worker)
    try:
        for future in as_completed([pool.submit(_train_one, run) for run in runs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _train_one(run: Run) -> Result:
    strategy, settings, seed = run
    return train(strategy, settings, seed, _data(settings.data))


_data = cache(load_data)


def check_directory(directory: str | Path) -> dict[str, Result]:
    """Make a directory for results if need be, and read the finished runs that its results.json holds.

    Returns:
        Results by run; none if there is no such file, or if another version of fpemu wrote it.

    Raises:
        ValueError: the file cannot be read as results.
        OSError: the directory cannot be made or written.
    """
    path = Path(directory) / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"cannot write to {directory}; choose another directory")
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["fpemu"] != __version__:
            return {}  # the same run may give other bits
        results = [Result.from_dict(entry) for entry in content["results"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} does not hold results of ablate ({type(error).__name__}: {error}); "
            "move it away or choose another directory"
        ) from None
    return {_run_id((result.strategy, result.settings, result.seed)): result for result in results}


def _write_results(directory: Path, results: Iterable[Result]) -> None:
    content = {"fpemu": __version__, "results": [result.as_dict() for result in results]}
    text = json.dumps(content, indent=1, allow_nan=False)
    _replace(directory / "results.json", lambda path: path.write_text(text, encoding="utf-8"))


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    path = Path(name)
    try:
        write(path)
        path.chmod(0o644)
        path.replace(target)
    finally:
        path.unlink(missing_ok=True)


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
        _replace(directory / f"{name}.png", partial(figure.savefig, dpi=150))


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
