"""What an emulation counted, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..columns import aligned
from ..stats import Tally

if TYPE_CHECKING:
    from rich.table import Table

HEAD = (
    "module",
    "role",
    "format",
    "elements",
    "to zero",
    "subnormal",
    "overflow",
    "NaN",
    "largest",
    "SQNR dB",
)


@dataclass(frozen=True)
class Report:
    """What an emulation counted; ``str()`` is a table, and rich prints one.

    Attributes:
        tallies: By module name and role.
        skipped: By module, and output or parameter, why it was left alone.
    """

    tallies: dict[tuple[str, str], Tally]
    skipped: dict[str, str]

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells: a row for each tally that counted something, and the total of each format."""
        counted = {where: tally for where, tally in self.tallies.items() if tally.count}
        rows = [(name or "(model)", role, *_cells(t)) for (name, role), t in counted.items()]
        totals: dict[Any, Tally] = {}
        for tally in counted.values():
            totals[tally.fmt] = totals.get(tally.fmt, Tally()) + tally
        return rows + [("total", "", *_cells(tally)) for tally in totals.values()]

    def __str__(self) -> str:
        rows = self.rows()
        if not rows:
            lines = ["nothing was counted yet: run the model forward, and backward for gradients"]
        else:
            lines = aligned([HEAD, *rows], right=range(3, len(HEAD)))
        return "\n".join(lines + [f"left alone: {what}: {why}" for what, why in self.skipped.items()])

    __repr__ = __str__

    def __rich__(self) -> Table:
        from rich.table import Table

        left_alone = "\n".join(f"left alone: {what}: {why}" for what, why in self.skipped.items())
        table = Table(caption=left_alone or None, caption_justify="left")
        for number, head in enumerate(HEAD):
            table.add_column(head, justify="right" if number >= 3 else "left")
        for row in self.rows():
            table.add_row(*row)
        return table

    def to_pandas(self) -> Any:
        """A pandas DataFrame, one row for each module and role; needs pandas.

        Returns:
            Columns module, role, format, then the counts of a Tally, amax and sqnr (dB).

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError("to_pandas() needs pandas: pip install pandas") from None
        counts = ("count", "zero", "underflow", "subnormal", "overflow", "nan", "amax")
        return pandas.DataFrame(
            [
                {"module": name, "role": role, "format": str(t.fmt)}
                | {count: getattr(t, count) for count in counts}
                | {"sqnr": t.sqnr()}
                for (name, role), t in self.tallies.items()
            ]
        )


def _cells(t: Tally) -> tuple[str, ...]:
    shares = (f"{t.share(what):.2%}" for what in ("underflow", "subnormal", "overflow", "nan"))
    return str(t.fmt), str(t.count), *shares, f"{t.amax:.3g}", f"{t.sqnr():.1f}"
