"""The mean of gradients over ranks, summed in a format: the settings, and what was done so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from ..formats import BINARY32, Format
from ..kernels.rules import carried
from ..patterns import bare_name
from ..quantizer import Quantizer
from ..random import Key
from ..stats import Tally
from . import wire
from .sums import Arithmetic, Contribution, Counts, Place, chunk_bounds, in_rank_order, ring, tree

ORDERS = ("ring", "tree", "fp32")
DIVISIONS = ("before", "after", "premultiply")
TRANSPORTS = ("emulate", "wire")
Role = str | Format | Quantizer


class AllReduce:
    """The mean of all ranks' gradients, summed in a format: how, and what it did so far.

    One object serves as state of `hook` under DistributedDataParallel, in `ReduceScatter` under FSDP2, and in
    `emulate_ranks` in one process; the bits are the same. What a rank contributes is rounded to the format,
    then added in the named order, each partial sum rounded. With one rank nothing is sent or rounded.

    Args:
        fmt: Format of what ranks send, its name, or a Quantizer with a rounding and overflow of its own.
        order: ``"ring"`` (None): the bucket is cut into a chunk for each rank, ``ceil(n / ranks)`` elements;
            chunk ``c`` starts at rank ``c + 1`` and goes around to ``c``, each rank adding its own.
            ``"tree"``: ranks in pairs, then pairs of pairs. ``"fp32"``: float32 sums in the order of
            ranks, the last one rounded.
        accumulate: Format of partial sums, which holds all values of ``fmt``; None is ``fmt``. The complete
            sum is then rounded to ``fmt``.
        divide: By the number of ranks. ``"after"`` (None): the complete sum, in float32. ``"before"``: each
            contribution once it is rounded, and rounded again, as torch's fp16_compress_hook does.
            ``"premultiply"``: each is multiplied with the reciprocal in the format, and rounded, as NCCL's
            average does.
        rounding: As for ``quantize``, of all that is rounded.
        error_feedback: Add to a rank's gradient what the rounding of its last contribution lost.
        key: Random words of stochastic rounding, the same on all ranks; each bucket takes the next step.
        transport: ``"emulate"``: every rank gets all gradients and adds them up in the named order.
            ``"wire"``: the codes go around a ring of processes; same bits.
        then: A hook of one argument, the bucket, that does the reduction in place of all this, on rounded
            gradients; its result is rounded. Without order, accumulate, divide and transport.
        group: Process group of the hook; None is the whole world.

    Attributes:
        bytes: That a rank sends, so far: on the wire what this one sent, in emulation the mean over ranks of
            what the named order would send.
        calls: Buckets reduced so far.

    Raises:
        ValueError: an unknown name; arguments that do not go together, as said above or in the message.

    Example:
        >>> from fpemu.comm import emulate_ranks
        >>> reduction = AllReduce("fp16", order="ring")
        >>> emulate_ranks(torch.tensor([[40000.0, 1e-8], [40000.0, 1.0]]), reduction)
        tensor([   inf, 0.5000])
        >>> tallies = reduction.tallies()
        >>> tallies["input"].underflow, tallies[1].overflow, reduction.bytes
        (1, 1, 4.0)
    """

    def __init__(
        self,
        fmt: Role,
        order: str | None = None,
        accumulate: Role | None = None,
        divide: str | None = None,
        rounding: str = "nearest_even",
        error_feedback: bool = False,
        key: Key | None = None,
        transport: str = "emulate",
        then: Callable[[GradBucket], Future[Tensor]] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_names(order=(order, ORDERS), divide=(divide, DIVISIONS), transport=(transport, TRANSPORTS))
        if then is not None and (order, accumulate, divide, transport) != (None, None, None, "emulate"):
            raise ValueError("then= reduces by itself: leave out order=, accumulate=, divide= and transport=")
        self.fmt = _quantizer(fmt, rounding)
        self.order, self.divide = order or "ring", divide or "after"
        self.partial = None if then else _partial(self.fmt, self.order, accumulate, rounding)
        if transport == "wire":
            _check_wire(self.order, self.fmt, self.partial)
        stochastic = self.fmt.stochastic or (self.partial is not None and self.partial.stochastic)
        if key is not None and not stochastic:
            raise ValueError("key= is read by rounding='stochastic' only; leave it out")
        self.key = Key(0) if key is None else key
        self.error_feedback, self.transport, self.then, self.group = error_feedback, transport, then, group
        self.bytes, self.calls = 0.0, 0
        self._counts = Counts()
        self.residuals: dict[Tensor | int, Tensor] = {}  # of each parameter, or rank in one process

    def tallies(self) -> dict[Place, Tally]:
        """What rounding did, by place: ``"input"``, ``"division"``, the numbers of hops from 1, ``"result"``.

        On the wire they are of this rank's roundings alone; in emulation of all, and equal on all ranks; of
        a `ReduceScatter` those of this rank's slice. Sums kept in float32 have no hops.
        """
        return self._counts.tallies()

    def state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """What going on with the same bits needs: the number of calls, and this rank's error feedback.

        Args:
            model: Whose parameters the hook saw, with error feedback; it gives them names.

        Raises:
            ValueError: there is error feedback of parameters that ``model`` lacks.
        """
        names = _names(model)
        unknown = [of for of in self.residuals if not isinstance(of, int) and of not in names]
        if unknown:
            raise ValueError(
                f"state_dict needs model=, the one that was reduced: error feedback of {len(unknown)} "
                "parameters has no name"
            )
        residuals = {of if isinstance(of, int) else names[of]: e.clone() for of, e in self.residuals.items()}
        return {"calls": self.calls, "residuals": residuals}

    def load_state_dict(self, state_dict: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Go on where `state_dict` was taken, on the same rank.

        Raises:
            ValueError: it has error feedback of parameters that ``model`` lacks, or of another size.
        """
        parameters = {name: parameter for parameter, name in _names(model).items()}
        residuals: dict[Tensor | int, Tensor] = {}
        for name, residual in state_dict["residuals"].items():
            of = name if isinstance(name, int) else parameters.get(name)
            if of is None or (isinstance(of, Tensor) and of.numel() != residual.numel()):
                raise ValueError(
                    f"load_state_dict needs model= with a parameter {name!r} of {residual.numel()} elements"
                )
            residuals[of] = residual.to(of.device, copy=True) if isinstance(of, Tensor) else residual.clone()
        self.calls, self.residuals = state_dict["calls"], residuals

    def arithmetic(self, world: int, divide: bool = True) -> Arithmetic:
        """Of the next bucket."""
        key = replace(self.key, step=self.key.step + self.calls)
        self.calls += 1
        return Arithmetic(self.fmt, self.partial, self.divide if divide else None, world, key, self._counts)

    def emulate(self, sums: Arithmetic, own: Contribution, n: int, chunk: int | None = None) -> Tensor:
        """The mean of all ``n`` elements, or of one rank's chunk."""
        bounds = chunk_bounds(n, sums.world)
        chunks = range(sums.world) if chunk is None else range(chunk, chunk + 1)
        start, stop = bounds[chunks[0]][0], bounds[chunks[-1]][1]
        if self.order == "ring":
            total = ring(sums, own, bounds, chunks)
        elif self.order == "tree":
            total = tree(sums, own, start, stop)
        else:
            total = in_rank_order(sums, own, start, stop)
        travels = self.fmt.format if self.order == "fp32" else sums.partial_format
        pieces = [(0, n)] if self.order == "tree" and chunk is None else bounds
        for a, b in pieces:
            sent = wire.nbytes(b - a, travels) + (wire.nbytes(b - a, self.fmt.format) if chunk is None else 0)
            self.bytes += sent * (sums.world - 1) / sums.world
        return sums.mean(sums.finish(total, start))

    def send(self, sums: Arithmetic, own: Tensor, group: Any, gather: bool) -> Tensor:
        """The mean of what all ranks contribute, sent around the group's ring; else this rank's chunk."""
        bounds, peers = chunk_bounds(own.numel(), sums.world), wire.Ring(group)
        total = wire.reduce_scatter(sums, own, bounds, peers)
        total = sums.finish(total, bounds[peers.rank][0])
        if gather:
            total = wire.all_gather(total, self.fmt.format, bounds, peers)
        self.bytes += peers.sent
        return sums.mean(total)

    def residual_of(self, parameters: Sequence[Tensor], like: Tensor) -> Tensor:
        """Error feedback of a bucket's parameters in one piece, kept as views of it: buckets may change."""
        wide = torch.promote_types(like.dtype, torch.float32)
        kept = [
            self.residuals[p] if p in self.residuals else like.new_zeros(p.numel(), dtype=wide)
            for p in parameters
        ]
        whole = torch.cat(kept)
        self.residuals.update(zip(parameters, whole.split([p.numel() for p in parameters]), strict=True))
        return whole


def _names(model: nn.Module | None) -> dict[Tensor | int, str]:
    return {} if model is None else {p: bare_name(name) for name, p in model.named_parameters()}


def _check_names(**given: tuple[str | None, tuple[str, ...]]) -> None:
    for name, (value, known) in given.items():
        if value is not None and value not in known:
            raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(known)}")


def _quantizer(fmt: Role, rounding: str) -> Quantizer:
    quantizer = fmt if isinstance(fmt, Quantizer) else Quantizer(fmt, rounding)
    fmt = quantizer.format
    if quantizer.scaling is not None or not isinstance(fmt, Format) or not fmt.signed:
        raise ValueError(
            f"AllReduce needs a signed format without scaling or blocks, got {quantizer}; scale the loss "
            "instead"
        )
    return quantizer


def _partial(fmt: Quantizer, order: str, accumulate: Role | None, rounding: str) -> Quantizer | None:
    """What rounds partial sums; None: nothing does, they are float32."""
    if order == "fp32":
        if accumulate is not None:
            raise ValueError(f"order='fp32' adds in float32, got accumulate={accumulate!r}; leave it out")
        return None
    if accumulate is None:
        return fmt
    partial = _quantizer(accumulate, rounding)
    if carried(fmt.format, partial.format) != fmt.format:
        raise ValueError(f"accumulate= must hold all values of {fmt.format}, got {partial.format}")
    return None if partial == Quantizer(BINARY32) else partial


def _check_wire(order: str, *quantizers: Quantizer | None) -> None:
    if order != "ring":
        raise ValueError(f"transport='wire' sends around a ring, got order={order!r}; emulate that one")
    for quantizer in quantizers:
        if quantizer is not None and not quantizer.format.has_nan:
            raise ValueError(
                f"transport='wire' sends codes, and {quantizer.format} has none for NaN, which all ranks "
                "must see; emulate it"
            )
