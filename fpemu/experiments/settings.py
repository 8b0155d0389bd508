"""What the runs of a comparison share: model, data, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .data import parse_data
from .models import MODELS, TEXT_MODELS

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Settings:
    """What all strategies of a comparison share.

    Attributes:
        data: As for ``load_data``.
        lr: Learning rate of the optimizer.
        momentum: Momentum of SGD, 0 up to but not 1.
        batch: Images, or texts, a step.
        epochs: Passes over the training data.
        model: ``"mlp"`` or ``"resnet8"`` for images, ``"gru"`` or ``"transformer"`` for text.
        optimizer: ``"sgd"`` or ``"adam"``, the latter with torch's betas and eps.
        warmup: Steps in which the learning rate rises in a line: ``lr / warmup`` in the first, ``lr`` in the
            last of them and from then on.
        steps: Steps after which training ends, if the epochs do not end before.

    Raises:
        ValueError: a value out of range or unknown, data that the model does not take, or a data directory
            that lacks files.
    """

    data: str = "digits"
    lr: float = 0.003
    momentum: float = 0.0
    batch: int = 32
    epochs: int = 200
    model: str = "mlp"
    optimizer: str = "sgd"
    warmup: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        name, _ = parse_data(self.data)
        for what, known in (("model", MODELS), ("optimizer", OPTIMIZERS)):
            if getattr(self, what) not in known:
                raise ValueError(f"unknown {what} {getattr(self, what)!r}; choose from {', '.join(known)}")
        if (name == "pydoc") != (self.model in TEXT_MODELS):
            takes = (
                "text: pydoc" if self.model in TEXT_MODELS else "images: digits or fashion-mnist:DIRECTORY"
            )
            raise ValueError(f"model {self.model} takes {takes}; got data {self.data!r}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number, got {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum!r}")
        if self.momentum and self.optimizer == "adam":
            raise ValueError(
                f"momentum is for sgd, adam has betas of its own; got momentum={self.momentum!r}"
            )
        for what, least in (("batch", 1), ("epochs", 1), ("warmup", 0), ("steps", 1)):
            value = getattr(self, what)
            if value is not None and value < least:
                raise ValueError(f"{what} must be at least {least}, got {value!r}")

    @property
    def states(self) -> int:
        """Values that the optimizer keeps for each parameter."""
        return 2 if self.optimizer == "adam" else int(self.momentum > 0)
