"""What questions to records are answered with: tables of layers, scales and first events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .columns import aligned
from .formats import Format
from .scaling import Window


@dataclass(frozen=True)
class Loss:
    """What a format makes of the numbers of a module and role.

    Attributes:
        module: Its name.
        role: What the numbers are.
        values: Nonzero finite numbers.
        lost: Those that become zero; exact.
        overflow: Bounds of those that round past the format's largest value.
    """

    module: str
    role: str
    values: int
    lost: int
    overflow: tuple[int, int]

    @property
    def share(self) -> float:
        """Share of the values that become zero."""
        return self.lost / self.values if self.values else 0.0

    @property
    def overflow_share(self) -> tuple[float, float]:
        """Bounds of the share that overflows."""
        low, high = (count / self.values if self.values else 0.0 for count in self.overflow)
        return low, high


@dataclass(frozen=True)
class WhatIf:
    """What another format, scale or rounding would have lost; ``str()`` is a table.

    Attributes:
        fmt: The format.
        scale: By which all numbers were multiplied.
        rounding: How they were rounded.
        losses: By module and role, in the order of the model.
        total: All of them together.
    """

    fmt: Format
    scale: float
    rounding: str
    losses: tuple[Loss, ...]
    total: Loss

    def __str__(self) -> str:
        head = ("module", "role", "values", f"to zero in {self.fmt}", "overflow")
        return "\n".join(aligned([head, *map(_cells, (*self.losses, self.total))], right=(2, 3, 4)))

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """A pandas DataFrame, one row for each module and role; needs pandas."""
        rows = [
            {"module": one.module, "role": one.role, "values": one.values, "lost": one.lost}
            | {"share": one.share, "overflow_least": one.overflow[0], "overflow_most": one.overflow[1]}
            for one in self.losses
        ]
        return pandas_of("to_pandas").DataFrame(rows)


def _cells(one: Loss) -> tuple[str, ...]:
    return one.module or "(model)", one.role, str(one.values), f"{one.share:.2%}", _bounds(one)


def _bounds(one: Loss) -> str:
    low, high = one.overflow_share
    return f"{low:.2%}" if low == high else f"{low:.2%} to {high:.2%}"


def pandas_of(caller: str) -> Any:
    """The pandas module.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{caller}() needs pandas: pip install pandas") from None
    return pandas


@dataclass(frozen=True)
class Suggestion:
    """The loss scales that keep recorded gradients in a format; ``str()`` is a table.

    Attributes:
        fmt: The format.
        overall: The window of all gradients together.
        layers: By module and role, the window of each.
    """

    fmt: Format
    overall: Window
    layers: Mapping[tuple[str, str], Window]

    @property
    def scale(self) -> float | None:
        """A scale in the window, two binades below its upper end if there is room; None if it is empty."""
        if self.overall.lowest is None or self.overall.highest is None or self.overall.empty:
            return None
        return max(self.overall.lowest, self.overall.highest / 4)

    def __str__(self) -> str:
        rows = [(name or "(model)", role, str(window)) for (name, role), window in self.layers.items()]
        return "\n".join(aligned([*rows, ("all", "", str(self.overall))]))

    __repr__ = __str__


@dataclass(frozen=True)
class Event:
    """Where and when something happened first.

    Attributes:
        run, step, rank, module, role: Of the tally.
        what: What happened, in words.
    """

    run: str
    step: int
    rank: int
    module: str
    role: str
    what: str

    def __str__(self) -> str:
        where = f"step {self.step}, rank {self.rank}: the {self.role} of {self.module or '(model)'}"
        return f"{where} {self.what}"


@dataclass(frozen=True)
class Comparison:
    """What a format loses of two runs, side by side; ``str()`` is a table.

    Attributes:
        fmt: The format.
        rows: Module, role, and what was lost in each run; None where a run has no such numbers.
    """

    fmt: Format
    rows: tuple[tuple[str, str, Loss | None, Loss | None], ...]

    def __str__(self) -> str:
        head = ("module", "role", f"to zero in {self.fmt}", "in the other", "difference")
        return "\n".join(aligned([head, *map(_compared, self.rows)], right=(2, 3, 4)))

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """A pandas DataFrame, one row for each module and role; needs pandas."""
        rows = [
            {"module": module, "role": role, "share": a and a.share, "other": b and b.share}
            for module, role, a, b in self.rows
        ]
        return pandas_of("to_pandas").DataFrame(rows)


def _compared(row: tuple[str, str, Loss | None, Loss | None]) -> tuple[str, ...]:
    module, role, a, b = row
    shares = ("-" if one is None else f"{one.share:.2%}" for one in (a, b))
    difference = "-" if a is None or b is None else f"{b.share - a.share:+.2%}"
    return module or "(model)", role, *shares, difference
