"""One training run under one strategy, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from .. import Key, LowPrecision, Policy, Quantizer, Tally, emulate
from ..formats import as_format
from ..kernels.layout import FIELDS, HISTOGRAM, LOWEST, POWERS
from .data import Data, parse_data
from .models import mlp
from .strategies import Strategy

FIRST_SCALE = 2.0**16  # where torch's GradScaler starts


@dataclass(frozen=True)
class Settings:
    """What all strategies of a comparison share.

    Attributes:
        data: As for ``load_data``.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD, 0 up to but not 1.
        batch: Images a step.
        epochs: Passes over the training images.

    Raises:
        ValueError: a value out of range, unknown data, or a data directory that lacks files.
    """

    data: str = "digits"
    lr: float = 0.003
    momentum: float = 0.0
    batch: int = 32
    epochs: int = 200

    def __post_init__(self) -> None:
        parse_data(self.data)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number, got {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum!r}")
        for name in ("batch", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class Result:
    """What one run gave.

    Attributes:
        strategy: The strategy that was trained.
        settings: The settings.
        seed: Of the initial weights, the order of the images and the random rounding.
        accuracy: Share of the test images classified right.
        train_loss: Mean over the training images after the last step; only the weights are rounded.
        losses: Mean loss of the steps of each epoch.
        gradients: Tally of the activation gradients of one pass over the training images after the last step.
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """More threads sum in another order, which gives other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def train(strategy: Strategy, settings: Settings, seed: int, data: Data) -> Result:
    """Train the digits' network once, on one thread.

    Args:
        strategy: What is kept in which format.
        settings: Learning rate and so on.
        seed: Same seed, same result; initial weights and order of images are the same for all strategies.
        data: The images that ``settings.data`` names.

    Returns:
        The result. A run that diverges is a result too, with a loss of NaN.
    """
    model = mlp(data.inputs, data.classes, seed=seed)
    stepper = _Stepper(model, strategy, settings, seed)
    order = torch.Generator().manual_seed(seed)
    with emulation(model, strategy.policy, seed):
        losses = tuple(
            float(sum(stepper.step(x, y) for x, y in batches(data, settings.batch, order)))
            / math.ceil(len(data.train_y) / settings.batch)
            for _ in range(settings.epochs)
        )
    gradients = gradient_tally(model, strategy, stepper.scale, data, settings.batch)
    accuracy, train_loss = evaluate(model, strategy, data)
    kept = stepper.optimizer if isinstance(stepper.optimizer, LowPrecision) else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Result(
        strategy, settings, seed, accuracy, train_loss, losses, gradients,
        updates=None if kept is None else int(kept.updates),
        lost_updates=None if kept is None else int(kept.lost),
        steps=stepper.steps,
        skipped_steps=stepper.steps - stepper.taken,
        bytes=parameters * strategy.bits_per_parameter(settings.momentum > 0) // 8,
    )  # fmt: skip


class _Stepper:
    """Loss, backward pass and optimizer step, with loss scaling where the strategy asks for it."""

    def __init__(self, model: torch.nn.Module, strategy: Strategy, settings: Settings, seed: int) -> None:
        self.model, self.steps, self.taken = model, 0, 0
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=settings.lr, momentum=settings.momentum
        )
        if strategy.optimizer is not None:
            key = Key(seed).fold_in("optimizer")
            self.optimizer = LowPrecision(self.optimizer, **strategy.optimizer, key=key)
        self.dynamic = strategy.loss_scale == "dynamic"
        self.scale = (
            1.0
            if strategy.loss_scale is None
            else FIRST_SCALE
            if self.dynamic
            else float(strategy.loss_scale)
        )
        scaled = strategy.loss_scale is not None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, enabled=scaled)
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.taken += 1

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch; the loss comes back."""
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.steps += 1
        if not self.scaler.is_enabled():
            loss.backward()
            self.optimizer.step()
            return loss.detach()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.dynamic:
            self.scale = self.scaler.get_scale()
        else:
            self.scaler.update(self.scale)
        return loss.detach()


def emulation(model: torch.nn.Module, policy: Any, seed: int = 0) -> AbstractContextManager[Any]:
    """The emulation of a strategy's policy; without a role nothing is touched."""
    options = {name: _role(value) for name, value in policy.items() if value is not None}
    if not options.keys() - {"include", "exclude"}:
        return nullcontext()
    return emulate(model, Policy(**options), key=Key(seed).fold_in("emulation"))


def _role(value: Any) -> Any:
    return Quantizer(**value) if isinstance(value, dict) else value


def batches(
    data: Data, size: int, order: torch.Generator | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over the training images, shuffled by ``order``; the last batch may be smaller."""
    count = len(data.train_y)
    rows = torch.arange(count) if order is None else torch.randperm(count, generator=order)
    yield from zip(data.train_x[rows].split(size), data.train_y[rows].split(size), strict=True)


def gradient_tally(model: torch.nn.Module, strategy: Strategy, scale: float, data: Data, batch: int) -> Tally:
    """Tally of the activation gradients of one pass over the training images; no weight is changed.

    Args:
        model: The model, without emulation.
        strategy: Rounds as in training. Gradients that it leaves alone are tallied as FP32.
        scale: Factor of the loss.
        data: The images.
        batch: Images a backward pass: the loss is a mean, so gradients shrink as it grows.
    """
    policy = {"gradient": "fp32", **{k: v for k, v in strategy.policy.items() if v is not None}}
    with emulation(model, policy) as tapped:
        for x, y in batches(data, batch):
            model.zero_grad()
            (torch.nn.functional.cross_entropy(model(x), y) * scale).backward()
        tallies = [tally for (_, role), tally in tapped.tallies().items() if role == "gradient"]
    model.zero_grad()
    return sum(tallies, Tally())


@torch.no_grad()
def evaluate(model: torch.nn.Module, strategy: Strategy, data: Data) -> tuple[float, float]:
    """Test accuracy and mean training loss: weights as the strategy rounds them, all else FP32."""
    weights = {k: v for k, v in strategy.policy.items() if k in ("weight", "include", "exclude")}
    with emulation(model, weights):
        accuracy = (model(data.test_x).argmax(1) == data.test_y).float().mean()
        loss = torch.nn.functional.cross_entropy(model(data.train_x), data.train_y)
    return float(accuracy), float(loss)


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
