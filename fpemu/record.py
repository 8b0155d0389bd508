"""`Recorder`: what a model's numbers are while it trains, every few steps, in files."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .files import write_mapping
from .formats import Format, as_format
from .parts import row_of, steps_table, tallies_table, write_part
from .patterns import Pattern, as_patterns
from .watching import Step, Watch


class Recorder:
    """Writes tallies of a model's numbers to a directory, every few steps: counts only, no tensor is kept.

    Of each module that matches it counts what it returns and the gradients arriving there; of its parameters
    the weights, their gradients, the optimizer's updates and state. Under DistributedDataParallel rank 0
    counts the parameters, under FSDP2 each rank its shard: all ranks together count each number once.

    Args:
        directory: Made if need be; it must not hold records.
        every: Steps from one that is recorded to the next; the first is.
        formats: What rounding to these loses is counted too. Without any, records still tell what becomes
            zero in every format, and what overflows within bounds.
        modules: A pattern of modules, or several, as for ``Policy``.
        flush: Recorded steps from one file to the next: what a killed run loses at most.
        first_step: Number of the first step, of a run that goes on where another ended.

    Raises:
        ValueError: the directory holds records; an unknown format; a number out of range.
        OSError: the directory cannot be written.

    Example:
        >>> import tempfile, torch, fpemu
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Recorder(directory, every=1).watch(model, optimizer) as recorder:
        ...         for _ in range(3):
        ...             model(torch.ones(5, 4)).sum().backward()
        ...             optimizer.step()
        ...             recorder.step()
        ...     records = fpemu.load(directory)
        >>> records.steps, records.roles[:3], records.select(role="gradient").tally().count
        ([0, 1, 2], ['activation', 'gradient', 'weight'], 30)
    """

    def __init__(
        self,
        directory: str | Path,
        every: int = 10,
        formats: Iterable[str | Format] = (),
        modules: Pattern | Iterable[Pattern] = "*",
        *,
        flush: int = 10,
        first_step: int = 0,
    ) -> None:
        for name, value, least in (("every", every, 1), ("flush", flush, 1), ("first_step", first_step, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        self.directory, self.every, self.flush_every = Path(directory), every, flush
        self.formats = as_formats(formats)
        self.modules = as_patterns(modules, "modules")
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world = torch.distributed.get_world_size() if distributed else 1
        if any(self.directory.glob(f"*/rank={self.rank}/part-*.parquet")):
            raise ValueError(f"{self.directory} holds records already; choose another directory")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.at = self.first_step = first_step
        self._watch: Watch | None = None
        self._rows: list[dict[str, Any]] = []
        self._steps: list[Step] = []
        self._recorded, self._part, self._closed, self._began = 0, 0, False, time.time()

    def watch(self, model: nn.Module, optimizer: Any = None, scaler: Any = None) -> Recorder:
        """Begin to record; call it after ``emulate``, and with the model as it is wrapped.

        Args:
            model: Emulated or not. Counted is what modules return before an emulation rounds it, and
                gradients before it rounds them.
            optimizer: Any torch optimizer. With one, gradients of weights are counted as it gets them.
            scaler: A torch.amp.GradScaler, or the number that the loss is multiplied by; a number must be
                divided out again before the optimizer's step.

        Returns:
            The recorder.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: a pattern matches no module.
            RuntimeError: it watches a model already.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch needs a torch.nn.Module, got {type(model).__name__}")
        if self._watch is not None or self._closed:
            raise RuntimeError("this recorder watches a model already; make another for another run")
        self._watch = Watch(model, optimizer, scaler, self.formats, self.modules, inference=False)
        self._watch.switch.on = self._due()
        self._describe(finished=False)
        return self

    def _due(self) -> bool:
        return (self.at - self.first_step) % self.every == 0

    def step(self) -> None:
        """A step of training has ended; call it after the optimizer's and the scaler's.

        Where gradients of several batches accumulate, it is one step, and one call.

        Raises:
            RuntimeError: nothing is watched, or the recorder is closed.
        """
        if self._watch is None or self._closed:
            raise RuntimeError("nothing is recorded: call watch(model) first, and step() before close()")
        recorded = self._watch.switch.on
        counted, known = self._watch.take(self.at)
        self._rows += [row_of(self.at, one) for one in counted]
        self._steps.append(known)
        self.at += 1
        self._watch.switch.on = self._due()
        self._recorded += recorded
        if recorded and self._recorded % self.flush_every == 0:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._steps:
            tables = {"tallies": tallies_table(self._rows), "steps": steps_table(self._steps)}
            for kind, table in tables.items():
                write_part(self.directory / kind / f"rank={self.rank}", self._part, table)
            self._rows, self._steps = [], []
            self._part += 1

    def close(self) -> None:
        """Write the rest, and take the hooks off the model. A second call does nothing."""
        if self._watch is not None and not self._closed:
            self._watch.remove()
            self._watch.switch.on = False
            self.flush()
            self._describe(finished=True)
            self._closed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _describe(self, finished: bool) -> None:
        if self.rank != 0 or self._watch is None:
            return
        about = {
            "finished": finished,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "every": self.every,
            "first_step": self.first_step,
            "steps": self.at - self.first_step,
            "formats": [str(fmt) for fmt in self.formats],
            "ranks": self.world,
            "seed": torch.initial_seed(),
            "emulated": self._watch.emulated(),
            "left_alone": self._watch.left_alone(),
            "versions": {
                "fpemu": _version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "git": _commit(),
        }
        write_mapping(self.directory / "run.json", about)


def as_formats(formats: Iterable[str | Format]) -> tuple[Format, ...]:
    """Formats by name or as they are, each once."""
    several = [formats] if isinstance(formats, (str, Format)) else formats
    return tuple(dict.fromkeys(as_format(fmt) for fmt in several))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fpemu")
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """The commit of the working directory, marked if files differ from it; None outside a git tree."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
