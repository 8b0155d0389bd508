"""Runs in several processes, and the file that keeps what is finished."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path

from .. import __version__
from ..files import replace_whole
from .data import load_data
from .result import Result, Run, run_id
from .train import train


def finish(
    runs: list[Run],
    *,
    out: str | Path | None,
    workers: int,
    progress: Callable[[int, int], None],
    after: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """Train what is not finished, and keep each result as soon as it is there.

    Args:
        runs: What to train, each once.
        out: Directory of results.json; None: nothing is kept.
        workers: Processes, one thread each; 1 trains in this process.
        progress: Called with the number of finished runs and of all runs.
        after: Called with the results so far, in the order of the runs, at first and after each run.

    Returns:
        The results, in the order of the runs.

    Raises:
        ValueError: bad data or workers, or a results.json that is not ours.
        OSError: the directory cannot be written.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers!r}")
    finished = {} if out is None else check_directory(out)
    pending = [run for run in runs if run_id(run) not in finished]
    for spec in {settings.data for _, settings, _ in pending}:
        load_data(spec)  # a damaged file is told here, not by a worker

    def so_far() -> list[Result]:
        return [finished[key] for key in map(run_id, runs) if key in finished]

    progress(len(runs) - len(pending), len(runs))
    after(so_far())
    for done, result in enumerate(_train_all(pending, workers), len(runs) - len(pending) + 1):
        finished[run_id(result.run)] = result
        if out is not None:
            _write_results(Path(out), finished.values())
        after(so_far())
        progress(done, len(runs))
    return so_far()


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
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent says nothing to its workers, which would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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
    return {run_id(result.run): result for result in results}


def _write_results(directory: Path, results: Iterable[Result]) -> None:
    content = {"fpemu": __version__, "results": [result.as_dict() for result in results]}
    text = json.dumps(content, indent=1, allow_nan=False)
    replace_whole(directory / "results.json", lambda path: path.write_text(text, encoding="utf-8"))
