"""What a check of a quantizer found."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from ..columns import aligned
from ..formats import Format

REGIONS = ("underflow", "subnormal", "normal", "tie", "overflow", "special")
SIGNS = ("+", "-")


class Example(NamedTuple):
    """One wrong result: what went in (None: no single number did), what came and what was right."""

    input: float | None
    got: float
    wanted: float


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of input fared.

    Attributes:
        region: One of ``REGIONS``; of stochastic rounding, the property that was checked.
        sign: ``"+"`` or ``"-"``, of the input; empty where both were checked together.
        tried: Inputs, or for a statistical property positions.
        wrong: How many of them had a wrong result.
        example: The wrong result that is furthest off, None if there is none.
    """

    region: str
    sign: str
    tried: int
    wrong: int
    example: Example | None


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found; printed, a table.

    Attributes:
        fmt: The format.
        rounding: The rounding that was asked for.
        overflow: The overflow policy that was asked for.
        rows: One `Row` a region or property, and sign.
    """

    fmt: Format
    rounding: str
    overflow: str
    rows: tuple[Row, ...]

    @property
    def tried(self) -> int:
        """Number of checks made."""
        return sum(row.tried for row in self.rows)

    @property
    def wrong(self) -> int:
        """Number of checks failed."""
        return sum(row.wrong for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.wrong == 0

    def row(self, region: str, sign: str = "+") -> Row:
        """The row of a region or property and sign.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if (row.region, row.sign) == (region, sign):
                return row
        known = ", ".join(f"{row.region} {row.sign}".strip() for row in self.rows)
        raise KeyError(f"no row {region!r} with sign {sign!r}; choose from {known}")

    def __str__(self) -> str:
        table = [("region", "sign", "tried", "wrong", "worst: input", "got", "wanted")]
        for row in self.rows:
            table.append((row.region, row.sign, str(row.tried), str(row.wrong), *_written(row)))
        lines = aligned(table, right=(2, 3))
        asked = f"{self.fmt.name}, {self.rounding}, {self.overflow}"
        return "\n".join([*lines, f"{asked}: {self.wrong} of {self.tried} wrong"])


def _written(row: Row) -> tuple[str, str, str]:
    """Input, result and right result of a row's example."""
    if row.example is None:
        return "", "", ""
    x, got, wanted = row.example
    first = "" if x is None else _with_hex(x)
    if row.region in ("probability", "bias"):  # shares, no values of the format
        return first, f"{got:.5f}", f"{wanted:.5f}"
    return first, _with_hex(got), _with_hex(wanted)


def _with_hex(x: float) -> str:
    return f"{x!r} = {re.sub(r'[.]?0*p', 'p', x.hex())}" if math.isfinite(x) and x != 0 else repr(x)
