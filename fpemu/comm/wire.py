"""A ring of processes that send each other codes: a format's bits, nothing wider."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..codes import decode, encode, pack, unpack
from ..formats import Format
from .sums import Arithmetic


def nbytes(count: int, fmt: Format) -> int:
    """Bytes of ``count`` codes on the wire: without gaps up to 8 bits, else in 2 or 4 bytes each.

    Example:
        >>> from fpemu import as_format
        >>> nbytes(3, as_format("e2m1")), nbytes(3, as_format("fp16")), nbytes(3, as_format("tf32"))
        (2, 6, 12)
    """
    bits = fmt.bits if fmt.bits <= 8 else 16 if fmt.bits <= 16 else 32
    return -(-count * bits // 8)


def to_bytes(x: Tensor, fmt: Format) -> Tensor:
    """The codes of a 1-d tensor of values of a format, as uint8."""
    codes = encode(x, fmt)
    if fmt.bits < 8:
        return pack(codes.cpu(), fmt.bits).to(x.device)
    return codes.view(torch.uint8)


def from_bytes(data: Tensor, fmt: Format, count: int) -> Tensor:
    """The values that `to_bytes` took, as float32."""
    if fmt.bits < 8:
        return decode(unpack(data.cpu(), fmt.bits, count), fmt).to(data.device)
    return decode(data.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[nbytes(1, fmt)]), fmt)


class Ring:
    """This process's place between its two neighbours in a process group.

    Attributes:
        rank, world: Its number, and how many there are.
        sent: Bytes that it has sent.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0

    def exchange(self, data: Tensor, count: int) -> Tensor:
        """Send bytes to the next rank while ``count`` bytes come from the one before."""
        received = data.new_empty(count)
        operations = []
        for act, message, peer in (
            (dist.isend, data, (self.rank + 1) % self.world),
            (dist.irecv, received, (self.rank - 1) % self.world),
        ):
            if message.numel():
                operations.append(dist.P2POp(act, message, group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.sent += data.numel()
        return received


def reduce_scatter(sums: Arithmetic, own: Tensor, bounds: list[tuple[int, int]], peers: Ring) -> Tensor:
    """The complete sum of this rank's chunk: `reductions.ring`, each partial sum sent as codes.

    Args:
        sums: The arithmetic; its partial sums are of ``sums.partial``'s format, or float32.
        own: What this rank contributes, the whole bucket.
        bounds: Of the chunks.
        peers: The ring.
    """
    total = own[slice(*bounds[peers.rank - 1])]
    for hop in range(1, peers.world):
        start, stop = bounds[(peers.rank - hop - 1) % peers.world]
        data = peers.exchange(to_bytes(total, sums.partial_format), nbytes(stop - start, sums.partial_format))
        received = from_bytes(data, sums.partial_format, stop - start).to(own.dtype)
        total = sums.add(received, own[start:stop], hop, start)
    return total


def all_gather(mine: Tensor, fmt: Format, bounds: list[tuple[int, int]], peers: Ring) -> Tensor:
    """All ranks' chunks, each sent on around the ring as codes of ``fmt``.

    Args:
        mine: This rank's chunk, float32 values of the format.
        fmt: The format.
        bounds: Of the chunks.
        peers: The ring.
    """
    result = mine.new_empty(bounds[-1][1])
    result[slice(*bounds[peers.rank])] = mine
    data = to_bytes(mine, fmt)
    for step in range(1, peers.world):
        start, stop = bounds[(peers.rank - step) % peers.world]
        data = peers.exchange(data, nbytes(stop - start, fmt))
        result[start:stop] = from_bytes(data, fmt, stop - start)
    return result
