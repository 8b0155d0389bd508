"""Sums over ranks in a format: what is rounded where, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import stats
from ..formats import BINARY32, Format
from ..kernels.layout import COUNTS, SUMS
from ..quantizer import Quantizer
from ..random import Key
from ..stats import Tally

Contribution = Callable[[int, int, int], Tensor]  # of a rank, the elements from start to stop of its bucket
Place = str | int  # where something is rounded: a name below, or the number of a hop

PIECE = 1 << 20  # elements added at a time: what is added is still near when it is counted
_ORDER: dict[Any, Any] = {"input": -2, "division": -1, "result": math.inf}


class Counts:
    """Tallies by place, counted on the tensors' device without waiting for it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Place, Format, torch.device], tuple[Tensor, Tensor]] = {}

    def add(self, place: Place, fmt: Format, x: Tensor, rounded: Tensor) -> None:
        """Count ``x``, which was rounded to ``rounded``, of one dtype and shape."""
        where = place, fmt, x.device
        if where not in self._kept:
            counts = torch.zeros(COUNTS, dtype=torch.int64, device=x.device)
            self._kept[where] = counts, torch.zeros(SUMS, dtype=torch.float64, device=x.device)
        stats.add(*self._kept[where], x, rounded, fmt)

    def tallies(self) -> dict[Place, Tally]:
        """What was counted so far, in the order in which values come by."""
        found: dict[Place, Tally] = {}
        for (place, fmt, _), (counts, sums) in self._kept.items():
            tally = Tally(counts.cpu().numpy().copy(), sums.cpu().numpy().copy(), fmt)
            found[place] = found.get(place, Tally()) + tally
        return dict(sorted(found.items(), key=lambda item: _ORDER.get(item[0], item[0])))


@dataclass(frozen=True)
class Arithmetic:
    """How one bucket is summed: every rounding of it.

    Attributes:
        fmt: Rounds what a rank contributes, and the finished sum.
        partial: Rounds partial sums; None leaves them float32.
        divide: ``"before"``, ``"premultiply"`` or ``"after"``; None: a sum, no mean.
        world: Number of ranks.
        key: Random words of this bucket, the same on all ranks. Each rounding folds in its place, and the
            rank before the sum, or the first rank of a tree's pair; an element draws the word of its index.
        counts: Where to count what rounding does.
    """

    fmt: Quantizer
    partial: Quantizer | None
    divide: str | None
    world: int
    key: Key
    counts: Counts

    @property
    def partial_format(self) -> Format:
        """Of partial sums."""
        return BINARY32 if self.partial is None else self.partial.format

    @property
    def dtype(self) -> torch.dtype:
        """In which two values are added, such that the sum, rounded once more, is as if rounded once.

        float32 suffices for nearest_even and 11 significand bits: 24 >= 2 * 11 + 2.
        """
        partial = self.partial
        if partial is None or (partial.rounding == "nearest_even" and partial.format.precision <= 11):
            return torch.float32
        return torch.float64

    def contribution(self, x: Tensor, rank: int, start: int) -> Tensor:
        """What a rank puts into the sum: its values in the format, divided if that comes first.

        Args:
            x: 1-d tensor of a rank's gradient.
            rank: Which rank's.
            start: Index of its first element in the bucket.

        Returns:
            Tensor of ``x``'s shape, values of the format.
        """
        own = self._round("input", self.fmt, x, start, rank)
        if self.divide == "before":
            quotient = own.double() / self.world
        elif self.divide == "premultiply":
            quotient = own.double() * self._share(x.device)
        else:
            return own.to(self.dtype)
        return self._round("division", self.fmt, quotient, start, rank).to(self.dtype)

    def _share(self, device: torch.device) -> Tensor:
        one = torch.full((1,), 1 / self.world, dtype=torch.float64, device=device)
        return replace(self.fmt, rounding="nearest_even", random_bits=None)(one)

    def add(self, total: Tensor, own: Tensor, hop: int, start: int, node: int = 0) -> Tensor:
        """The next partial sum, rounded, in place of the last.

        Args:
            total: Partial sum that came by; the next one is written to it.
            own: What is added to it, of its shape.
            hop: Which addition in a row it is, from 1.
            start: Index of the first element in the bucket.
            node: Tells apart the additions of one hop that meet the same elements.
        """
        if self.partial is None:
            return total.add_(own)
        for a in range(0, total.numel(), PIECE):
            part = slice(a, a + PIECE)
            exact = total[part] + own[part]
            self._round(hop, self.partial, exact, start + a, node, out=total[part])
        return total

    def error(self, x: Tensor, values: Tensor) -> Tensor:
        """What a contribution misses of ``x``; zero where either is no finite number."""
        error = x - (values if self.divide in (None, "after") else values * self.world)
        return error.where(error.isfinite(), 0.0)

    def finish(self, total: Tensor, start: int) -> Tensor:
        """The complete sum in the format, float32."""
        if self.partial != self.fmt:
            total = self._round("result", self.fmt, total, start, 0)
        return total.float()

    def mean(self, total: Tensor) -> Tensor:
        """The finished sum over the number of ranks, if it has not been divided before."""
        return total / self.world if self.divide == "after" else total

    def _round(
        self, place: Place, quantizer: Quantizer, x: Tensor, start: int, node: int, out: Tensor | None = None
    ) -> Tensor:
        key = None
        if quantizer.stochastic:
            key = self.key.fold_in(f"{place}").fold_in(node)
            key = replace(key, offset=key.offset + start)
        rounded = quantizer(x, key=key, out=out)
        self.counts.add(place, quantizer.format, x, rounded)
        return rounded


def contribution(
    sums: Arithmetic, gradient: Callable[[int], Tensor], residuals: Mapping[int, Tensor], offset: int = 0
) -> Contribution:
    """What ranks contribute of gradients that begin with element ``offset``; errors are kept in place."""

    def own(rank: int, start: int, stop: int) -> Tensor:
        x = gradient(rank)[start - offset : stop - offset]
        if rank not in residuals:
            return sums.contribution(x, rank, start)
        kept = residuals[rank][start:stop]
        x = x + kept
        values = sums.contribution(x, rank, start)
        kept.copy_(sums.error(x, values))
        return values

    return own


def chunk_bounds(n: int, world: int) -> list[tuple[int, int]]:
    """Start and stop of the chunks of ``n`` elements: ``ceil(n / world)`` each, the last ones fewer or none.

    Example:
        >>> chunk_bounds(5, 4)
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-n // world)
    return [(min(n, c * size), min(n, (c + 1) * size)) for c in range(world)]


def ring(sums: Arithmetic, own: Contribution, bounds: list[tuple[int, int]], chunks: range) -> Tensor:
    """Sums of some chunks, each begun at the rank after its own number and complete at that rank.

    Chunk ``c`` is contributed to by ranks ``c + 1``, ``c + 2``, ... and, after ``world - 1`` hops, ``c``.
    Ranks are asked in order, twice around, for neighbouring elements: only running sums are kept.
    """
    world, (first, last) = sums.world, (bounds[chunks[0]][0], bounds[chunks[-1]][1])
    total: Any = None
    for turn in (0, 1):
        for rank in range(world):
            there = [c for c in chunks if (c < rank) == (turn == 0)]
            start, stop = (bounds[there[0]][0], bounds[there[-1]][1]) if there else (0, 0)
            if start == stop:
                continue
            part = own(rank, start, stop)
            if total is None:
                total = part.new_empty(last - first)
            for chunk in there:
                a, b = bounds[chunk]
                hop = (rank - chunk - 1) % world
                mine, sofar = part[a - start : b - start], total[a - first : b - first]
                if a < b:
                    sums.add(sofar, mine, hop, a) if hop else sofar.copy_(mine)
    return torch.empty(0) if total is None else total


def tree(sums: Arithmetic, own: Contribution, start: int, stop: int) -> Tensor:
    """The sum in pairs: ranks 0 and 1, 2 and 3, ..., then pairs of those; one left over waits for a partner.

    The level is the hop. As many sums are kept as there are levels.
    """
    waiting: list[tuple[int, int, Tensor]] = []  # hops so far, first rank, sum: fewer hops further right

    def pair() -> None:
        (left_hops, first, left), (right_hops, _, right) = waiting[-2:]
        hop = max(left_hops, right_hops) + 1
        waiting[-2:] = [(hop, first, sums.add(left, right, hop, start, first))]

    for rank in range(sums.world):
        waiting.append((0, rank, own(rank, start, stop)))
        while len(waiting) > 1 and waiting[-2][0] == waiting[-1][0]:
            pair()
    while len(waiting) > 1:
        pair()
    return waiting[0][2]


def in_rank_order(sums: Arithmetic, own: Contribution, start: int, stop: int) -> Tensor:
    """The sum of rank 0, then 1, and so on."""
    total = own(0, start, stop)
    for rank in range(1, sums.world):
        total = sums.add(total, own(rank, start, stop), rank, start)
    return total
