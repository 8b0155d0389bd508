"""Records: the tallies of runs, merged exactly over steps, ranks and modules, and questions to them."""

from __future__ import annotations

import glob
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .answers import Comparison, Event, Loss, Suggestion, WhatIf, pandas_of
from .columns import aligned
from .formats import Format, as_format
from .kernels.layout import FIELDS, SQUARES
from .parts import LOSSES, NUMBERS, STEPS, TALLIES, merged, read_part, shares_lost, steps_table, tallies_table
from .scaling import window
from .stats import Tally, overflow_limit
from .watching import GRADIENTS, Step

ORIGIN = [("run", pa.string()), ("rank", pa.int32())]


class Records:
    """Tallies by run, step, rank, module and role; ``str()`` is a table.

    Attributes:
        table: A pyarrow Table, one row for each tally.
        steps_table: One row for each step and rank: loss scale, skipped or not, lost updates.
        runs: By name, the content of each run's run.json.
    """

    def __init__(self, table: pa.Table, steps_table: pa.Table, runs: dict[str, dict[str, Any]]) -> None:
        self.table, self.steps_table, self.runs = table, steps_table, runs

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _distinct(self, name: str) -> list[Any]:
        return list(pc.unique(self.table.column(name)).to_pylist())

    @property
    def modules(self) -> list[str]:
        """Names of modules, in the order of the model."""
        return self._distinct("module")

    @property
    def roles(self) -> list[str]:
        """What the numbers are: activation, gradient, weight and so on."""
        return self._distinct("role")

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that were recorded."""
        return sorted(self._distinct("step"))

    def select(
        self,
        module: str | Iterable[str] | None = None,
        role: str | Iterable[str] | None = None,
        steps: int | slice | range | None = None,
        rank: int | None = None,
        run: str | None = None,
    ) -> Records:
        """The records of some modules, roles and steps.

        Args:
            module: A name, or an fnmatch pattern, or several; what is in a module that matches matches too.
            role: The same, of roles.
            steps: One number, a range, or a slice of numbers: ``slice(1000, None)``.
            rank: One process's.
            run: One run's.

        Returns:
            Records; the steps' own table stays whole but for ``steps``, ``rank`` and ``run``.

        Raises:
            ValueError: nothing matches.
        """
        masks = []
        if module is not None:
            names = {name for name in self.modules for p in _several(module) if _within(name, p)}
            masks.append(("module", _isin(names, pa.string())))
        if role is not None:
            roles = {name for name in self.roles for p in _several(role) if fnmatchcase(name, p)}
            masks.append(("role", _isin(roles, pa.string())))
        shared = []
        if steps is not None:
            known = self._distinct("step") + self.steps_table.column("step").to_pylist()
            shared.append(("step", _isin({s for s in known if _among(s, steps)}, pa.int64())))
        if rank is not None:
            shared.append(("rank", _isin({rank}, pa.int32())))
        if run is not None:
            shared.append(("run", _isin({run}, pa.string())))
        table = _filtered(self.table, masks + shared)
        if not table.num_rows:
            asked = {"module": module, "role": role, "steps": steps, "rank": rank, "run": run}
            raise ValueError(
                f"nothing was recorded for {_said(asked)}; there are modules {_some(self.modules)}, roles "
                f"{_some(self.roles)}, steps {_some(self.steps)}"
            )
        return Records(table, _filtered(self.steps_table, shared), self.runs)

    def groups(self) -> Iterator[tuple[str, str, Records]]:
        """Modules and roles, in the order of the model, each with its records."""
        keys = self.table.select(["module", "role"])
        for module in self.modules:
            here = pc.equal(keys.column("module"), module)
            for role in pc.unique(keys.filter(here).column("role")).to_pylist():
                mask = pc.and_(here, pc.equal(keys.column("role"), role))
                yield module, role, Records(self.table.filter(mask), self.steps_table, self.runs)

    def _numbers(self) -> Records:
        """Without the ratios of weights to updates, which no format holds; unless there is nothing else."""
        others = pc.not_equal(self.table.column("role"), "update_ratio")
        table = self.table.filter(others)
        return Records(table, self.steps_table, self.runs) if table.num_rows else self

    def tally(self) -> Tally:
        """All numbers in one tally, divided by the loss scale that they were recorded with; exact.

        Raises:
            ValueError: a loss scale was no power of two.
        """
        total = Tally()
        for scale in self._distinct("scale"):
            rows = self.table.filter(pc.equal(self.table.column("scale"), scale))
            if math.frexp(scale)[0] != 0.5:
                raise ValueError(
                    f"these numbers were recorded under a loss scale that is no power of two, {scale:g}: "
                    "bins cannot be divided by it; seen() gives them as they were"
                )
            part = merged(rows)
            total = total + (part if scale == 1 else part.scaled(1 / scale))
        return total

    def seen(self, fmt: str | Format | None = None) -> Tally:
        """All numbers in one tally as they were seen, multiplied by the loss scale.

        Args:
            fmt: One of the formats that were recorded: the tally counts what it lost. None: it does not.

        Raises:
            ValueError: the format was not recorded.
        """
        total = merged(self.table)
        if fmt is None:
            return total
        fmt = as_format(fmt)
        lost = pc.list_flatten(self.table.column("rounded"))
        lost = pa.chunked_array([lost]) if isinstance(lost, pa.Array) else lost
        rows = pa.Table.from_struct_array(lost)
        rows = rows.filter(pc.equal(rows.column("format"), str(fmt)))
        if rows.num_rows != self.table.num_rows:
            known = sorted({one["format"] for row in self.table.column("rounded").to_pylist() for one in row})
            raise ValueError(f"{fmt} was not counted in all records; they have {', '.join(known) or 'none'}")
        for name in LOSSES:
            total.counts[FIELDS.index(name)] = rows.column(name).to_numpy().sum()
        total.sums[SQUARES + 1] = rows.column("errors").to_numpy().sum()
        return Tally(total.counts, total.sums, fmt)

    def what_if(self, fmt: str | Format, scale: float = 1.0, rounding: str = "nearest_even") -> WhatIf:
        """What these numbers would have lost in a format, had they been multiplied by a scale.

        Args:
            fmt: Signed format with a zero, or its name; recorded or not.
            scale: A power of two. Numbers recorded under a loss scale are divided by that first.
            rounding: nearest_even, nearest_away, toward_zero or to_odd.

        Returns:
            A WhatIf: what becomes zero is exact, what overflows has bounds.

        Raises:
            ValueError: as ``Tally.lost``.
        """
        fmt = as_format(fmt)
        losses, total = [], Tally()
        for module, role, group in self._numbers().groups():
            tally = group.tally()
            total = total + tally
            losses.append(_loss(module, role, tally, fmt, scale, rounding))
        return WhatIf(fmt, scale, rounding, tuple(losses), _loss("total", "", total, fmt, scale, rounding))

    def suggest_scale(self, fmt: str | Format, tolerance: float = 0.001) -> Suggestion:
        """Loss scales at which the recorded gradients neither vanish nor overflow in a format.

        Args:
            fmt: Signed format with a zero, or its name.
            tolerance: Share of the nonzero gradients that may become zero.

        Raises:
            ValueError: no gradients are among these records; or as ``fpemu.scaling.window``.
        """
        gradients = self.select(role=GRADIENTS)
        layers = {(m, role): window(g.tally(), fmt, tolerance) for m, role, g in gradients.groups()}
        return Suggestion(as_format(fmt), window(gradients.tally(), fmt, tolerance), layers)

    def first_overflow(self, fmt: str | Format | None = None) -> Event | None:
        """The first infinity or NaN, or with a format the first number that it cannot hold; as scaled.

        Args:
            fmt: Any format, recorded or not; numbers recorded under a loss scale are taken with it.

        Returns:
            The Event with the lowest step, and within that the first in the order of the model; None if there
            is none.
        """
        limit = np.inf if fmt is None else overflow_limit(as_format(fmt))
        records = self._numbers()
        columns = {name: records.table.column(name).to_numpy() for name in (*NUMBERS, "amax")}
        infinite = columns["positive_infinity"] + columns["negative_infinity"]
        large = columns["amax"] >= limit
        found = np.flatnonzero((infinite + columns["nan"] > 0) | large)
        if not found.size:
            return None
        place = records._earliest(found)
        counts = f"{infinite[place]} infinities and {columns['nan'][place]} NaNs"
        amax = f"a largest finite magnitude of {columns['amax'][place]:.4g}"
        return records._event(place, f"has {counts}" + ("" if not large[place] else f" and {amax}"))

    def first_underflow(self, threshold: float = 0.01, fmt: str | Format = "fp16") -> Event | None:
        """The first tally of which a format makes more than a share zero; as scaled.

        Args:
            threshold: Share of the nonzero finite numbers, 0 to 1.
            fmt: Signed format with a zero.

        Raises:
            ValueError: ``threshold`` is no share, or as ``Tally.lost``.
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be a share from 0 to 1, got {threshold!r}")
        records = self._numbers()
        shares = shares_lost(records.table, fmt)
        found = np.flatnonzero(shares > threshold)
        if not found.size:
            return None
        place = records._earliest(found)
        return records._event(place, f"loses {shares[place]:.1%} of its nonzero values in {as_format(fmt)}")

    def _earliest(self, places: Any) -> int:
        steps = self.table.column("step").to_numpy()[places]
        return int(places[np.argmin(steps)])  # the first of the lowest

    def _event(self, place: int, what: str) -> Event:
        names = ("run", "step", "rank", "module", "role")
        run, step, rank, module, role = (self.table.column(name)[place].as_py() for name in names)
        return Event(run, step, rank, module, role, what)

    def compare(self, other: Records, fmt: str | Format = "fp16") -> Comparison:
        """What a format loses here and in other records, by module and role; without loss scales."""
        fmt = as_format(fmt)
        mine, theirs = (
            {(one.module, one.role): one for one in records.what_if(fmt).losses} for records in (self, other)
        )
        keys = dict.fromkeys((*mine, *theirs))
        return Comparison(fmt, tuple((*key, mine.get(key), theirs.get(key)) for key in keys))

    def to_arrow(self) -> pa.Table:
        """The pyarrow Table of all tallies."""
        return self.table

    def to_pandas(self) -> Any:
        """A pandas DataFrame, one row for each tally and recorded format; needs pandas.

        Returns:
            Columns run, rank, step, module, role, scale, reduced, the counts of a Tally, amax, squares,
            lowest, histogram and powers (the counts of binades ``lowest`` and up), then format, underflow,
            subnormal, overflow and errors, empty if no format was recorded.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        pandas_of("to_pandas")
        rows = self.table.column("rounded").to_pylist()
        repeats = np.repeat(np.arange(len(rows)), [max(1, len(row)) for row in rows])
        table = self.table.drop_columns(["rounded"]).take(repeats)
        empty: dict[str, Any] = {"format": None} | dict.fromkeys((*LOSSES, "errors"))
        lost = [one for row in rows for one in (row or [empty])]
        fields = [("format", pa.string()), *((n, pa.int64()) for n in LOSSES), ("errors", pa.float64())]
        for name, kind in fields:
            table = table.append_column(name, pa.array([one[name] for one in lost], kind))
        return table.to_pandas()

    def __str__(self) -> str:
        rows = [("module", "role", "tallies", "values", "zero", "median", "largest", "inf and NaN")]
        for module, role, group in self.groups():
            t = group.tally()
            bad = t.nan + t.infinities
            shares = (f"{t.share('zero'):.2%}", f"{t.quantile(0.5):.2g}", f"{t.amax:.3g}", str(bad))
            rows.append((module or "(model)", role, str(len(group)), str(t.count), *shares))
        return "\n".join(aligned(rows, right=range(2, 8)))

    __repr__ = __str__


def _loss(module: str, role: str, t: Tally, fmt: Format, scale: float, rounding: str) -> Loss:
    lost = t.vanishing(fmt, scale, rounding)
    return Loss(module, role, int(t.histogram.sum()), lost, t.overflowing(fmt, scale))


def _several(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _within(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _among(step: int, steps: int | slice | range) -> bool:
    if isinstance(steps, slice):
        if steps.step not in (None, 1):
            raise ValueError(f"a slice of steps has no step of its own, got {steps!r}; give a range")
        return (steps.start is None or step >= steps.start) and (steps.stop is None or step < steps.stop)
    return step in steps if isinstance(steps, range) else step == steps


def _isin(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.array(sorted(values), kind)


def _filtered(table: pa.Table, masks: Sequence[tuple[str, pa.Array]]) -> pa.Table:
    for name, values in masks:
        table = table.filter(pc.is_in(table.column(name), values))
    return table


def _said(asked: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None) or "anything"


def _some(values: list[Any]) -> str:
    return ", ".join(map(str, values[:8])) + (f" and {len(values) - 8} more" if len(values) > 8 else "")


def records_of(rows: list[dict[str, Any]], steps: Iterable[Step]) -> Records:
    """Records of one process, from rows that ``row_of`` made and steps."""
    tallies, known = (_with_origin(table, "", 0) for table in (tallies_table(rows), steps_table(steps)))
    return Records(tallies, known, {"": {}})


def _with_origin(table: pa.Table, run: str, rank: int) -> pa.Table:
    for (name, kind), value in zip(ORIGIN, (run, rank), strict=True):
        table = table.append_column(name, pa.array([value] * table.num_rows, kind))
    return table


def load(path: str | Path | Iterable[str | Path]) -> Records:
    """The records of a run, or of several.

    Args:
        path: The directory that a Recorder wrote, a pattern of such directories as for the shell, or several.

    Returns:
        Records. Files that are damaged, or cut off, are skipped with a warning.

    Raises:
        FileNotFoundError: there is no such directory, or it holds no records.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    directories = [found for one in paths for found in _directories(Path(one))]
    tallies: list[pa.Table] = []
    steps: list[pa.Table] = []
    runs = {}
    for directory in directories:
        name = str(directory)
        runs[name] = about_run(directory)
        for kind, schema, tables in (("tallies", TALLIES, tallies), ("steps", STEPS, steps)):
            for part in sorted(directory.glob(f"{kind}/rank=*/part-*.parquet"), key=_by_rank):
                table = read_part(part, schema)
                if table is not None:
                    tables.append(_with_origin(table, name, _rank(part)))
    if not tallies:
        raise FileNotFoundError(f"no records in {', '.join(map(str, paths))}; give a directory of a Recorder")
    whole = pa.concat_tables(tallies).combine_chunks()
    empty = _with_origin(STEPS.empty_table(), "", 0)
    return Records(whole, pa.concat_tables([empty, *steps]).combine_chunks(), runs)


def about_run(directory: Path) -> dict[str, Any]:
    """The content of a run's run.json; nothing, with a warning if it is damaged, without one."""
    path = directory / "run.json"
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        warnings.warn(f"{path} is skipped, it is damaged: {error}", RuntimeWarning, stacklevel=3)
        return {}


def _directories(path: Path) -> list[Path]:
    if path.is_dir():
        return [path]
    found = [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_dir()]
    if not found:
        raise FileNotFoundError(f"no directory {path}; give a directory of a Recorder, or a pattern of such")
    return found


def _rank(part: Path) -> int:
    match = re.fullmatch(r"rank=(\d+)", part.parent.name)
    return int(match[1]) if match else 0


def _by_rank(part: Path) -> tuple[int, str]:
    return _rank(part), part.name
