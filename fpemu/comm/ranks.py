"""Many ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arrays import carrier_of
from .reduction import AllReduce
from .sums import contribution

Gradient = Tensor | Sequence[Tensor]


def emulate_ranks(
    grads: Tensor | Sequence[Gradient] | Callable[[int], Gradient],
    reduction: AllReduce,
    world: int | None = None,
) -> Any:
    """The mean of many ranks' gradients, in one process: what `hook` gives on as many.

    Args:
        grads: Tensor whose first dimension is ranks; or for each rank a tensor, or a list of tensors that
            make up one bucket; or a function of the rank that returns either, which is called up to twice a
            rank, while only running sums are kept. Floating-point, on any device.
        reduction: How to reduce; it counts along. ``transport`` makes no difference here.
        world: Number of ranks, for a function only.

    Returns:
        A tensor, or list of tensors, of a rank's shapes and dtypes.

    Raises:
        TypeError: as ``quantize`` of gradients.
        ValueError: ranks of different shapes; ``world`` missing or not to be given; ``then=`` in the
            reduction.

    Example:
        >>> from fpemu.comm import AllReduce
        >>> reduction = AllReduce("e5m2", order="tree", rounding="stochastic")
        >>> emulate_ranks([torch.full((2,), 1.0), torch.full((2,), 1.5)], reduction)
        tensor([1.2500, 1.2500])
        >>> ring = AllReduce("fp16")
        >>> emulate_ranks(lambda rank: torch.tensor([2048.0 * (rank == 2) + 1]), ring, world=128)
        tensor([16.])
    """
    if reduction.then is not None:
        raise ValueError("then= reduces between processes; emulate_ranks needs a reduction without it")
    if callable(grads):
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"a function of the rank needs world=, the number of ranks, got {world!r}")
        of_rank = grads
    elif world is not None or len(grads) == 0:
        raise ValueError(f"grads has {len(grads)} ranks; give at least one, and world= with a function only")
    else:
        of_rank, world = grads.__getitem__, len(grads)
    first = of_rank(0)
    shapes = _shapes(first)

    def flat(rank: int) -> Tensor:
        gradient = of_rank(rank)
        if _shapes(gradient) != shapes:
            raise ValueError(f"all ranks need gradients of rank 0's shapes {shapes}, got {_shapes(gradient)}")
        return _flat(gradient)

    result = _flat(first)
    if world == 1:
        return _unflat(result.clone(), first)
    residuals: dict[int, Tensor] = {}
    if reduction.error_feedback:
        for rank in range(world):
            wide = torch.promote_types(result.dtype, torch.float32)
            kept = reduction.residuals.setdefault(rank, torch.zeros_like(result, dtype=wide))
            residuals[rank] = kept
    sums = reduction.arithmetic(world)
    mean = reduction.emulate(sums, contribution(sums, flat, residuals), result.numel())
    return _unflat(mean.to(result.dtype), first)


def _shapes(gradient: Gradient) -> list[torch.Size]:
    return [part.shape for part in ([gradient] if isinstance(gradient, Tensor) else gradient)]


def _flat(gradient: Gradient) -> Tensor:
    parts = [gradient] if isinstance(gradient, Tensor) else list(gradient)
    for part in parts:
        carrier_of(part.detach(), "a gradient")
    flat = [part.detach().reshape(-1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _unflat(whole: Tensor, like: Gradient) -> Gradient:
    if isinstance(like, Tensor):
        return whole.view(like.shape)
    parts = whole.split([part.numel() for part in like])
    return [part.view(old.shape).to(old.dtype) for part, old in zip(parts, like, strict=True)]
