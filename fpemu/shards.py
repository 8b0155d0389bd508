"""Parameters that are split between ranks: this rank's part, and where it lies in the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .autograd import amax_of
from .random import Key


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    return x.detach().to_local() if _split(x) else x.detach()  # type: ignore[attr-defined]


def largest(x: Tensor) -> float:
    """Largest finite magnitude of the whole tensor; every rank that holds a part must ask."""
    amax = amax_of(local(x))
    if not _split(x):
        return amax
    found = torch.tensor(amax, device=x.device)
    mesh: Any = x.device_mesh  # type: ignore[attr-defined]
    for dimension in range(mesh.ndim):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return float(found)


def round_part(x: Tensor, key: Key | None, round_in_place: Callable[[Tensor, Key | None], object]) -> None:
    """Round this rank's part with the random words of its place in the whole.

    Args:
        x: The tensor, whole or a DTensor; the result goes there.
        key: Of the whole tensor; None where no words are drawn.
        round_in_place: Rounds a plain tensor, whose elements draw their words row by row from a key.
    """
    part = local(x)
    if key is None or not _split(x):
        round_in_place(part, key)
    elif part.numel():
        # Whole rows, so that their words follow each other, from the first to the last with a part of ours.
        start = _start(x)
        rows = part.new_zeros(part.shape[:1] + x.shape[1:])
        columns = (slice(s, s + n) for s, n in zip(start[1:], part.shape[1:], strict=True))
        mine = rows[(slice(None), *columns)]
        mine.copy_(part)
        round_in_place(rows, replace(key, offset=key.offset + start[0] * rows[0].numel()))
        part.copy_(mine)


def _split(x: Tensor) -> bool:
    return type(x).__name__ == "DTensor"


def _start(x: Any) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1])
