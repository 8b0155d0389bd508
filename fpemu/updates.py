"""What becomes of weight updates: how many a format loses, and how large they are beside the weight."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import stats
from .formats import Format
from .kernels.layout import COUNTS, SUMS
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
        self.fmt = fmt
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # an Updates, but for its tally
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
        moved = update != 0
        lost = moved & (after == before)
        seen, small = self._gradients(before, gradient)
        self.totals += torch.stack([moved.sum(), lost.sum(), seen, small])
        # In float64 a quotient of two float32 numbers never rounds up into the next binade.
        ratios = (before.double() / update.double()).abs()
        stats.add(self.counts, self.sums, ratios, ratios, None)

    def _gradients(self, weight: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        if gradient is None:
            return self.totals.new_zeros(()), self.totals.new_zeros(())
        magnitude = (gradient.to_dense() if gradient.is_sparse else gradient).abs()
        # A number over its significand, in [1/2, 1), is twice the power of two of its binade.
        size = weight.abs()
        half_ulp = size / torch.frexp(size).mantissa * 2.0 ** -(self.fmt.precision + 1)
        half_ulp = torch.where(size < self.fmt.smallest_normal, self.fmt.smallest_subnormal / 2, half_ulp)
        seen = magnitude != 0
        return seen.sum(), (seen & (magnitude < half_ulp)).sum()

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
