"""What becomes of weight updates: how many a format loses, and how large they are beside the weight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from . import stats
from .formats import Format
from .kernels.layout import COUNTS, SUMS
from .kernels.updates import TOTALS, updates_loop
from .stats import Tally


@dataclass(frozen=True)
class Updates:
    """Counts of weight updates. ``a + b`` is that of both together.

    Attributes:
        count: Updates that were not zero.
        lost: Those that left their weight as it was.
        ratios: Tally of |weight / update|, by all updates: a weight of zero counts as a zero, an update of
            zero as an infinity, or a NaN where both are.
        gradients: Gradients that were not zero.
        below_half_ulp: Those smaller than half the distance between the values next to their weight.
    """

    count: int = 0
    lost: int = 0
    ratios: Tally = field(default_factory=Tally)
    gradients: int = 0
    below_half_ulp: int = 0

    def __add__(self, other: Updates) -> Updates:
        if not isinstance(other, Updates):
            return NotImplemented
        return Updates(
            self.count + other.count,
            self.lost + other.lost,
            self.ratios + other.ratios,
            self.gradients + other.gradients,
            self.below_half_ulp + other.below_half_ulp,
        )

    @property
    def lost_share(self) -> float:
        """Share of the nonzero updates that left their weight unchanged; 0.0 without any."""
        return self.lost / self.count if self.count else 0.0

    @property
    def below_half_ulp_share(self) -> float:
        """Share of the nonzero gradients below half an ulp of their weight; 0.0 without any."""
        return self.below_half_ulp / self.gradients if self.gradients else 0.0


class Meter:
    """Counts the updates of one parameter on its device, without waiting for it."""

    def __init__(self, fmt: Format, device: torch.device) -> None:
        # The smallest normal value, half the distance between values below it, and half the last place of 1.
        self.limits = np.array([fmt.smallest_normal, fmt.smallest_subnormal / 2, 2.0**-fmt.precision])
        self.totals = torch.zeros(TOTALS, dtype=torch.int64, device=device)  # an Updates, but for its tally
        self.counts = torch.zeros(COUNTS, dtype=torch.int64, device=device)
        self.sums = torch.zeros(SUMS, dtype=torch.float64, device=device)

    def add(self, before: Tensor, update: Tensor, after: Tensor, gradient: Tensor | None) -> None:
        """Count one step.

        Args:
            before: The weight, float32.
            update: What was to be added to it, of its shape, like the next two.
            after: The weight then.
            gradient: Its gradient; None if it had none.
        """
        if gradient is None:
            gradient = torch.zeros_like(before)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        if before.is_cuda:
            self._add_by_torch(before, update, after, gradient)
            return
        # Named, for the loop reads memory that must not be let go of before.
        arrays = [x.float().contiguous() for x in (before, update, after, gradient)]
        targets = (x.data_ptr() for x in (self.totals, self.counts, self.sums))
        updates_loop(*(x.data_ptr() for x in arrays), before.numel(), self.limits, *targets)

    def _add_by_torch(self, before: Tensor, update: Tensor, after: Tensor, gradient: Tensor) -> None:
        moved = update != 0
        lost = moved & (after == before)
        seen = gradient != 0
        smallest_normal, below_normal, half_ulp_of_one = self.limits.tolist()
        size = before.double().abs()
        # A number over its significand, in [1/2, 1), is twice the power of two of its binade.
        half_ulp = size / torch.frexp(size).mantissa / 2 * half_ulp_of_one
        half_ulp = torch.where(size < smallest_normal, below_normal, half_ulp)
        small = seen & (gradient.abs() < half_ulp)
        self.totals += torch.stack([part.sum() for part in (moved, lost, seen, small)])
        # In float64 a quotient of two float32 numbers never rounds up into the next binade.
        ratios = (size / update.double()).abs()
        stats.add(self.counts, self.sums, ratios, ratios, None)

    def read(self) -> Updates:
        """The counts so far."""
        count, lost, gradients, small = self.totals.tolist()
        tally = Tally(self.counts.cpu().numpy().copy(), self.sums.cpu().numpy().copy())
        return Updates(count, lost, tally, gradients, small)

    def state(self) -> list[Tensor]:
        """Copies of what it holds."""
        return [part.clone() for part in (self.totals, self.counts, self.sums)]

    def load(self, state: list[Tensor]) -> None:
        """Go on from copies that `state` gave."""
        for part, saved in zip((self.totals, self.counts, self.sums), state, strict=True):
            part.copy_(saved)
