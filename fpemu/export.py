"""Records for other people's dashboards: plain dicts of scalars, and TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .formats import Format, as_format
from .records import Records


def scalars(records: Records, fmt: str | Format = "fp16") -> Iterator[tuple[int, dict[str, float]]]:
    """Each recorded step and what there is to log: ``for step, row in ...: wandb.log(row, step=step)``.

    Args:
        records: Of one run.
        fmt: Signed format with a zero, or its name.

    Yields:
        The step, and by ``module/role/name`` the largest magnitude, the share of zeros, the share of nonzero
        values that become zero in the format, and the infinities and NaNs; all as seen, multiplied by the
        loss scale. ``loss_scale`` where there is one.

    Raises:
        ValueError: as ``Tally.lost``.
    """
    fmt = as_format(fmt)
    scales = {row["step"]: row["scale"] for row in records.steps_table.to_pylist()}
    for step in records.steps:
        row: dict[str, float] = {}
        for module, role, group in records.select(steps=step).groups():
            t, name = group.seen(), f"{module or 'model'}/{role}"
            row |= {
                f"{name}/largest": t.amax,
                f"{name}/zero": t.share("zero"),
                f"{name}/to_zero_in_{fmt.name}": t.lost(fmt),
                f"{name}/infinities_and_nans": float(t.infinities + t.nan),
            }
        if scales.get(step) is not None:
            row["loss_scale"] = scales[step]
        yield step, row


def tensorboard(records: Records, directory: str | Path, fmt: str | Format = "fp16") -> None:
    """Write the scalars, and histograms of binades, as TensorBoard reads them; needs the tensorboard package.

    Args:
        records: Of one run.
        directory: The log directory.
        fmt: As for `scalars`.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise ModuleNotFoundError("export needs tensorboard: pip install tensorboard") from None
    with SummaryWriter(str(directory)) as writer:
        for step, row in scalars(records, fmt):
            for name, value in row.items():
                writer.add_scalar(name, value, step)
            for module, role, group in records.select(steps=step).groups():
                t = group.seen()
                places = np.flatnonzero(t.histogram)
                if places.size:
                    bins = slice(places[0], places[-1] + 1)
                    binades, counts = t.exponents[bins], t.histogram[bins]
                    writer.add_histogram_raw(
                        f"{module or 'model'}/{role}/binade",
                        min=float(binades[0]),
                        max=float(binades[-1] + 1),
                        num=int(counts.sum()),
                        sum=float((binades * counts).sum()),
                        sum_squares=float((binades**2 * counts).sum()),
                        bucket_limits=(binades + 1).tolist(),
                        bucket_counts=counts.tolist(),
                        global_step=step,
                    )
