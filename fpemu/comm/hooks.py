"""The reduction where torch reduces gradients: DistributedDataParallel's hook and FSDP2's reduce-scatter."""

# No postponed annotations: torch compares those of a hook with its own types.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from .reduction import AllReduce
from .sums import contribution


def hook(state: AllReduce, bucket: GradBucket) -> Future[Tensor]:
    """The gradients of a bucket, reduced: for ``ddp.register_comm_hook(state, hook)``.

    Args:
        state: How to reduce; it counts along.
        bucket: Gradients of this rank, of one floating-point dtype.

    Returns:
        A finished future of the bucket's buffer, which holds the mean.
    """
    buffer = bucket.buffer()
    if dist.get_world_size(state.group) > 1:
        buffer.copy_(_mean(state, bucket))
    elif state.then is not None:
        return state.then(bucket)
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def _mean(state: AllReduce, bucket: GradBucket) -> Tensor:
    buffer, world, me = bucket.buffer(), dist.get_world_size(state.group), dist.get_rank(state.group)
    n = buffer.numel()
    residual = state.residual_of(bucket.parameters(), buffer) if state.error_feedback else None
    gradients = {me: buffer}
    sums = state.arithmetic(world, divide=state.then is None)
    own = contribution(sums, gradients.__getitem__, {} if residual is None else {me: residual})
    if state.then is not None:
        buffer.copy_(own(me, 0, n))
        result: Any = state.then(bucket).wait()
        return sums.finish(result if isinstance(result, Tensor) else result[0], 0)
    if state.transport == "wire":
        return state.send(sums, own(me, 0, n), state.group, gather=True)
    mine = buffer if residual is None else buffer + residual
    gathered = list(mine.new_empty(world, n))
    dist.all_gather(gathered, mine, group=state.group)
    # This rank's own stays what it is in the buffer, so that its error is kept.
    gradients |= {rank: part for rank, part in enumerate(gathered) if rank != me}
    return state.emulate(sums, own, n)


class ReduceScatter:
    """An `AllReduce` for FSDP2's ``module.set_custom_reduce_scatter``, of each wrapped module.

    Each rank gets its slice of what the all-reduce of FSDP2's buffer would give.

    Args:
        reduction: Without error feedback and ``then``.

    Raises:
        ValueError: ``reduction`` has one of them.
    """

    def __init__(self, reduction: AllReduce) -> None:
        if reduction.error_feedback or reduction.then is not None:
            raise ValueError(
                "FSDP2's buffers do not say whose gradients they hold: leave out error_feedback= and then="
            )
        self.reduction = reduction

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` over the group, this rank's chunk to ``output_tensor``; done on return.

        Raises:
            ValueError: ``op`` is neither the average nor the sum.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                f"ReduceScatter averages or sums, got {op}; with a divide factor of your own also call "
                "set_force_sum_reduction_for_comms(True)"
            )
        reduction, world, me = self.reduction, group.size(), group.rank()
        if world == 1:
            output_tensor.copy_(input_tensor)
            return
        sums = reduction.arithmetic(world, divide=op == dist.ReduceOp.AVG)
        if reduction.transport == "wire":
            mean = reduction.send(sums, sums.contribution(input_tensor, me, 0), group, gather=False)
        else:
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
            own = contribution(sums, parts.view(world, -1).__getitem__, {}, me * output_tensor.numel())
            mean = reduction.emulate(sums, own, input_tensor.numel(), chunk=me)
        output_tensor.copy_(mean)
