"""What one training run gave, and the same as JSON holds it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import Tally
from ..formats import as_format
from ..kernels.layout import FIELDS, HISTOGRAM, LOWEST, POWERS
from .settings import Settings
from .strategies import Strategy

Run = tuple[Strategy, Settings, int]  # and the seed


def run_id(run: Run) -> str:
    """All that decides a run's result, in one string."""
    strategy, settings, seed = run
    return json.dumps([strategy.as_dict(), asdict(settings), seed], sort_keys=True)


@dataclass(frozen=True, eq=False)
class Result:
    """What one run gave.

    Attributes:
        strategy: The strategy that was trained.
        settings: The settings.
        seed: Of the initial weights, the order of the batches and the random rounding.
        accuracy: Share of the test images classified, or of the test texts' characters foretold, right.
        train_loss: Mean over the first 2048 images or texts of the training set after the last step, for each
            image or character; only the weights are rounded.
        losses: Mean loss of the steps of each epoch.
        gradients: Tally of the activation gradients of one pass over the same after the last step.
        updates: Weight updates that were not zero; ``None`` where the weights are FP32.
        lost_updates: Those of ``updates`` that left the weight as it was.
        steps: Optimizer steps, the skipped ones included.
        skipped_steps: Steps that the loss scaling left out because a gradient overflowed.
        bytes: Of weights, their copies, optimizer state and weight gradients, in the strategy's formats.
    """

    strategy: Strategy
    settings: Settings
    seed: int
    accuracy: float
    train_loss: float
    losses: tuple[float, ...]
    gradients: Tally
    updates: int | None
    lost_updates: int | None
    steps: int
    skipped_steps: int
    bytes: int

    @property
    def run(self) -> Run:
        """What was run."""
        return self.strategy, self.settings, self.seed

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it: NaN and infinity as text, counts by binade."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return plain | {
            "strategy": self.strategy.as_dict(),
            "settings": asdict(self.settings),
            "train_loss": _number(self.train_loss),
            "losses": [_number(loss) for loss in self.losses],
            "gradients": _tally_as_dict(self.gradients),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Result:
        """The result that ``as_dict`` wrote."""
        return cls(
            **{name: content[name] for name in _PLAIN},
            strategy=Strategy(**content["strategy"]),
            settings=Settings(**content["settings"]),
            train_loss=float(content["train_loss"]),
            losses=tuple(map(float, content["losses"])),
            gradients=_tally_from_dict(content["gradients"]),
        )


_PLAIN = ("seed", "accuracy", "updates", "lost_updates", "steps", "skipped_steps", "bytes")


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)  # JSON has no NaN


def _tally_as_dict(tally: Tally) -> dict[str, Any]:
    counts = {name: int(tally.counts[i]) for i, name in enumerate(FIELDS)}
    binades = {
        name: {str(i + LOWEST): int(bins[i]) for i in np.flatnonzero(bins)}
        for name, bins in (("histogram", tally.histogram), ("powers", tally.powers))
    }
    return {"format": tally.fmt.name if tally.fmt else None, **counts, **binades, "sums": tally.sums.tolist()}


def _tally_from_dict(content: dict[str, Any]) -> Tally:
    tally = Tally(
        sums=np.array(content["sums"]), fmt=as_format(content["format"]) if content["format"] else None
    )
    for i, name in enumerate(FIELDS):
        tally.counts[i] = content[name]
    for name, start in (("histogram", HISTOGRAM), ("powers", POWERS)):
        for binade, count in content[name].items():
            tally.counts[start + int(binade) - LOWEST] = count
    return tally
