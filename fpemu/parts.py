"""Tallies in Parquet files: one row for each step, module and role, each file written whole or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .files import replace_whole
from .formats import Format
from .kernels.layout import AMAX, ERRORS, FIELDS, HISTOGRAM, LOWEST, POWERS, SQUARES
from .stats import Tally, zero_edge
from .watching import Counted, Step

NUMBERS = FIELDS[: FIELDS.index("underflow")]  # what does not depend on a format
LOSSES = FIELDS[FIELDS.index("underflow") :]
_COUNTS = pa.list_(pa.int64())
TALLIES = pa.schema(
    [
        ("step", pa.int64()),
        ("module", pa.string()),
        ("role", pa.string()),
        ("scale", pa.float64()),
        ("reduced", pa.bool_()),
        *((name, pa.int64()) for name in NUMBERS),
        ("amax", pa.float64()),
        ("squares", pa.float64()),
        ("lowest", pa.int32()),  # the binade of the first bin of both lists
        ("histogram", _COUNTS),
        ("powers", _COUNTS),
        (
            "rounded",
            pa.list_(
                pa.struct(
                    [("format", pa.string()), *((n, pa.int64()) for n in LOSSES), ("errors", pa.float64())]
                )
            ),
        ),
    ]
)
STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("scale", pa.float64()),
        ("skipped", pa.bool_()),
        ("updates", pa.int64()),
        ("lost", pa.int64()),
    ]
)


def tallies_table(rows: list[dict[str, Any]]) -> pa.Table:
    """The table of rows that `row_of` made."""
    return pa.Table.from_pylist(rows, TALLIES)


def steps_table(steps: Iterable[Step]) -> pa.Table:
    """Rows of steps."""
    return pa.Table.from_pylist([asdict(step) for step in steps], STEPS)


def row_of(step: int, counted: Counted) -> dict[str, Any]:
    """What was counted in a step as one row: a kilobyte or two, where a tally takes thirty."""
    first = counted.tallies[0]
    occupied = np.flatnonzero(first.histogram)
    start, stop = (int(occupied[0]), int(occupied[-1]) + 1) if occupied.size else (0, 0)
    return {
        "step": step,
        "module": counted.module,
        "role": counted.role,
        "scale": counted.scale,
        "reduced": counted.reduced,
        **{name: int(first.counts[FIELDS.index(name)]) for name in NUMBERS},
        "amax": first.amax,
        "squares": float(first.sums[SQUARES]),
        "lowest": start + LOWEST,
        "histogram": first.histogram[start:stop].copy(),
        "powers": first.powers[start:stop].copy(),
        "rounded": [_rounded(t) for t in counted.tallies if t.fmt is not None],
    }


def _rounded(t: Tally) -> dict[str, Any]:
    losses = {name: int(t.counts[FIELDS.index(name)]) for name in LOSSES}
    return {"format": str(t.fmt), **losses, "errors": float(t.sums[ERRORS])}


def merged(rows: pa.Table) -> Tally:
    """The tally of all rows together, of no format."""
    total = Tally()
    for name in NUMBERS:
        total.counts[FIELDS.index(name)] = rows.column(name).to_numpy().sum()
    for name, start in (("histogram", HISTOGRAM), ("powers", POWERS)):
        _, binades, values = _bins(rows, name)
        np.add.at(total.counts, start + binades - LOWEST, values)
    total.sums[AMAX] = max(rows.column("amax").to_numpy(), default=0.0)
    total.sums[SQUARES] = rows.column("squares").to_numpy().sum()
    return total


def shares_lost(rows: pa.Table, fmt: str | Format) -> npt.NDArray[np.float64]:
    """``Tally.lost`` of each row, as it was seen."""
    edge, tie = zero_edge(fmt)
    lost, total = (np.zeros(rows.num_rows, np.int64) for _ in range(2))
    places, binades, values = _bins(rows, "histogram")
    np.add.at(total, places, values)
    np.add.at(lost, places[binades < edge], values[binades < edge])
    if tie:
        places, binades, values = _bins(rows, "powers")
        np.add.at(lost, places[binades == edge], values[binades == edge])
    return lost / np.maximum(total, 1)


def _bins(rows: pa.Table, name: str) -> tuple[Any, Any, Any]:
    """Row, binade and count of all bins of a column of lists."""
    column, lowest = rows.column(name), rows.column("lowest").to_numpy()
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    values = pc.list_flatten(column).to_numpy()
    starts = np.cumsum(lengths) - lengths
    binades = np.arange(values.size) + np.repeat(lowest - starts, lengths)
    return np.repeat(np.arange(len(lengths)), lengths), binades, values


def write_part(directory: Path, number: int, table: pa.Table) -> Path:
    """Write a table to a file of a directory, at once."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"part-{number:08d}.parquet"
    replace_whole(
        path, lambda part: pq.write_table(table, part, compression="zstd", write_page_checksum=True)
    )
    return path


def read_part(path: Path, schema: pa.Schema) -> pa.Table | None:
    """The table in a file; None, with a warning, if it is damaged or another's."""
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        return table.cast(schema)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        warnings.warn(f"{path} is skipped, it does not hold records: {why}", RuntimeWarning, stacklevel=2)
        return None
