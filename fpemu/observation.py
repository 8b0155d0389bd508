"""`observe`: what a model's numbers are, in memory, for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from .formats import Format
from .parts import row_of
from .patterns import Pattern, as_patterns
from .record import as_formats
from .records import Records, records_of
from .watching import Step, Watch

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Observation:
    """What `observe` returns: a context manager, and what was counted.

    Without `step` all that happens is one step; weights and their gradients are counted as it ends.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._rows: list[dict[str, Any]] = []
        self._steps: list[Step] = []
        self._open = True
        watch.switch.on = True

    def step(self) -> None:
        """A step of training has ended; call it after the optimizer's.

        Raises:
            RuntimeError: the observation has ended.
        """
        if not self._open:
            raise RuntimeError("the observation has ended; observe the model again")
        number = len(self._steps)
        counted, known = self._watch.take(number)
        self._rows += [row_of(number, one) for one in counted]
        self._steps.append(known)

    def end(self) -> None:
        """Take the hooks off the model; what was counted stays. A second call does nothing."""
        if self._open:
            if self._watch.pending:
                self.step()
            self._open = False
            self._watch.switch.on = False
            self._watch.remove()

    def __enter__(self) -> Observation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def records(self) -> Records:
        """What was counted in the steps that ended."""
        return records_of(self._rows, self._steps)

    def report(self) -> Records:
        """The same, whose ``str()`` is a table."""
        return self.records

    def histogram(
        self,
        module: str | None = None,
        role: str | None = None,
        fmt: str | Format = "fp16",
        scale: float = 1.0,
        ax: Axes | None = None,
    ) -> Axes:
        """``fpemu.plot.histogram`` of these modules and roles."""
        from . import plot

        return plot.histogram(self.records, fmt, scale, ax, module=module, role=role)


def observe(
    model: nn.Module,
    optimizer: Any = None,
    scaler: Any = None,
    formats: Iterable[str | Format] = (),
    modules: Pattern | Iterable[Pattern] = "*",
) -> Observation:
    """Count a model's numbers for the time of a ``with`` block, in memory, every forward and backward pass.

    Args:
        model: As for ``Recorder.watch``, like ``optimizer`` and ``scaler``.
        optimizer: Any torch optimizer, for its updates and state.
        scaler: A torch.amp.GradScaler, or the number that the loss is multiplied by.
        formats: As for ``Recorder``, like ``modules``.
        modules: A pattern of modules, or several.

    Returns:
        An Observation: ``records``, ``report()``, ``histogram(module, role)``, ``step()``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: an unknown format, or a pattern that matches no module.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> with observe(model) as obs:
        ...     (model(torch.ones(5, 4)).sum() * 2.0**-26).backward()
        >>> obs.records.select(role="gradient").what_if("fp16").total.share
        1.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"observe needs a torch.nn.Module, got {type(model).__name__}")
    chosen = as_patterns(modules, "modules")
    return Observation(Watch(model, optimizer, scaler, as_formats(formats), chosen, inference=True))
