"""One training run under one strategy, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .. import Key, LowPrecision, Policy, Tally, emulate
from ..quantizer import as_quantizer
from .checkpoint import read_checkpoint, write_checkpoint
from .data import Data
from .models import build
from .normalization import RoundedStatistics, running_statistics
from .result import Result, run_id
from .settings import Settings
from .strategies import Strategy, as_role

FIRST_SCALE = 2.0**16  # where torch's GradScaler starts
SAMPLE = 2048  # images or texts that are looked at after training, of the training set
_AT_ONCE = 2048  # images or texts in a forward without a backward


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
def train(
    strategy: Strategy,
    settings: Settings,
    seed: int,
    data: Data,
    *,
    checkpoint: str | Path | None = None,
    every: int = 100,
) -> Result:
    """Train a network once, on one thread.

    Args:
        strategy: What is kept in which format.
        settings: Model, learning rate and so on.
        seed: Same seed, same result; initial weights and order of batches are the same for all strategies.
        data: What ``settings.data`` names.
        checkpoint: File to write the state of the run to, whole or not at all. If it is there, the run goes
            on from it, and gives the result of an unbroken one, bit for bit. It stays when the run ends.
        every: Steps from one checkpoint to the next.

    Returns:
        The result. A run that diverges is a result too, with a loss of NaN.

    Raises:
        ValueError: the strategy rounds statistics that the model does not have; ``every`` is below 1; or the
            file is no checkpoint of this run.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every!r}")
    model = build(settings.model, data.inputs, data.classes, data.shape, seed=seed)
    check_model(strategy, model)
    run = _Run(model, strategy, settings, seed)
    with emulation(model, strategy.policy, seed, count=False) as run.emulation:
        path = None if checkpoint is None else Path(checkpoint)
        name = run_id((strategy, settings, seed))
        if path is not None and path.exists():
            run.load_state_dict(read_checkpoint(path, name))
        for _ in run.steps(data):
            if path is not None and run.stepper.steps % every == 0:
                write_checkpoint(path, name, run.state_dict())
    accuracy, train_loss = evaluate(model, strategy, data)
    gradients = gradient_tally(model, strategy, run.stepper.scale, data, settings.batch)
    stepper = run.stepper
    kept = stepper.optimizer if isinstance(stepper.optimizer, LowPrecision) else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Result(
        strategy, settings, seed, accuracy, train_loss, tuple(run.losses), gradients,
        updates=None if kept is None else int(kept.updates),
        lost_updates=None if kept is None else int(kept.lost),
        steps=stepper.steps,
        skipped_steps=stepper.steps - stepper.taken,
        bytes=parameters * strategy.bits_per_parameter(settings.states) // 8,
    )  # fmt: skip


def check_model(strategy: Strategy, model: torch.nn.Module) -> None:
    """Refuse a strategy that names what a model does not have, before anything is trained.

    Raises:
        ValueError: a pattern of its policy matches no module, or there are no statistics to round.
    """
    with emulation(model, strategy.policy):
        pass
    if strategy.statistics is not None and not running_statistics(model):
        raise ValueError(
            f"strategy {strategy.name!r} rounds statistics, but the model has no batch normalization that "
            "keeps them; leave statistics out or choose resnet8"
        )


class _Run:
    """Where a run stands: all that it needs to go on."""

    def __init__(self, model: torch.nn.Module, strategy: Strategy, settings: Settings, seed: int) -> None:
        self.model, self.settings = model, settings
        self.stepper = _Stepper(model, strategy, settings, seed)
        self.emulation: Any = None
        self.order = torch.Generator().manual_seed(seed)
        self.epoch_order = self.order.get_state()  # as it was before it shuffled this epoch
        self.losses: list[float] = []  # of the epochs that are over
        self.in_epoch = 0  # steps
        self.total: torch.Tensor | int = 0  # loss of those steps

    def steps(self, data: Data) -> Iterator[None]:
        """Train to the end, step by step."""
        limit = self.settings.steps
        for _ in range(len(self.losses), self.settings.epochs):
            done, self.epoch_order = self.in_epoch, self.order.get_state()
            for i, (x, y) in enumerate(batches(data, self.settings.batch, self.order)):
                if self.stepper.steps == limit:
                    break
                if i < done:
                    continue  # it came before the checkpoint
                self.total = self.total + self.stepper.step(x, y)
                self.in_epoch += 1
                yield
            self.losses.append(float(self.total) / self.in_epoch)
            self.in_epoch, self.total = 0, 0
            if self.stepper.steps == limit:
                return

    def state_dict(self) -> dict[str, Any]:
        """All that steps change."""
        return {
            "model": self.model.state_dict(),
            "stepper": self.stepper.state_dict(),
            "emulation": None if self.emulation is None else self.emulation.state_dict(),
            "order": self.epoch_order,
            "losses": self.losses,
            "in_epoch": self.in_epoch,
            "total": self.total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self.stepper.load_state_dict(state["stepper"])
        if self.emulation is not None:
            self.emulation.load_state_dict(state["emulation"])
        self.order.set_state(state["order"])
        self.losses, self.in_epoch, self.total = state["losses"], state["in_epoch"], state["total"]


class _Stepper:
    """Loss, backward pass and optimizer step, with loss scaling where the strategy asks for it."""

    def __init__(self, model: torch.nn.Module, strategy: Strategy, settings: Settings, seed: int) -> None:
        self.model, self.settings, self.steps, self.taken = model, settings, 0, 0
        self.optimizer = strategy.around(_optimizer(model, settings), Key(seed).fold_in("optimizer"))
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
        self.statistics = None
        if (quantizer := as_quantizer(as_role(strategy.statistics))) is not None:
            self.statistics = RoundedStatistics(model, quantizer, Key(seed).fold_in("statistics"))
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.taken += 1

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch; the loss comes back."""
        if self.settings.warmup:
            rise = min(1.0, (self.steps + 1) / self.settings.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * rise
        self.optimizer.zero_grad()
        loss = _loss(self.model, x, y)
        self.steps += 1
        if self.scaler.is_enabled():
            self._scaled_step(loss)
        else:
            loss.backward()
            self.optimizer.step()
        if self.statistics is not None:
            self.statistics.round_running(self.steps)
        return loss.detach()

    def _scaled_step(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.dynamic:
            self.scale = self.scaler.get_scale()
        else:
            self.scaler.update(self.scale)

    def state_dict(self) -> dict[str, Any]:
        """All that steps change, but the model."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "taken": self.taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.taken = state["steps"], state["taken"]
        if self.statistics is not None:
            self.statistics.step = self.steps
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.dynamic:
            self.scale = self.scaler.get_scale()


def _optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=settings.lr)
    return torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)


def _loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of an image, or of a character."""
    return torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def emulation(
    model: torch.nn.Module, policy: Any, seed: int = 0, count: bool = True
) -> AbstractContextManager[Any]:
    """The emulation of a strategy's policy; without a role nothing is touched."""
    options = {name: value for name, value in policy.items() if value is not None}
    if not options.keys() - {"include", "exclude"}:
        return nullcontext()
    return emulate(model, Policy.from_dict(options), key=Key(seed).fold_in("emulation"), count=count)


def batches(
    data: Data, size: int, order: torch.Generator | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over the training set, shuffled by ``order``; the last batch may be smaller."""
    count = len(data.train_y)
    rows = torch.arange(count) if order is None else torch.randperm(count, generator=order)
    yield from zip(data.train_x[rows].split(size), data.train_y[rows].split(size), strict=True)


def gradient_tally(model: torch.nn.Module, strategy: Strategy, scale: float, data: Data, batch: int) -> Tally:
    """Tally of the activation gradients of a pass over the first ``SAMPLE`` of the training set.

    Weights and statistics stay as they are.

    Args:
        model: The model, without emulation.
        strategy: Rounds as in training. Gradients that it leaves alone are tallied as FP32.
        scale: Factor of the loss.
        data: The images or texts.
        batch: Images or texts a backward pass: the loss is a mean, so gradients shrink as it grows.
    """
    policy = {"gradient": "fp32", **{k: v for k, v in strategy.policy.items() if v is not None}}
    kept = [buffer.clone() for buffer in model.buffers()]
    with emulation(model, policy) as tapped:
        for x, y in _parts(data.train_x[:SAMPLE], data.train_y[:SAMPLE], batch):
            model.zero_grad()
            (_loss(model, x, y) * scale).backward()
        tallies = [tally for (_, role), tally in tapped.tallies().items() if role == "gradient"]
    model.zero_grad()
    for buffer, before in zip(model.buffers(), kept, strict=True):
        buffer.copy_(before)
    return sum(tallies, Tally())


def _parts(x: torch.Tensor, y: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(x.split(size), y.split(size), strict=True)


@torch.no_grad()
def evaluate(model: torch.nn.Module, strategy: Strategy, data: Data) -> tuple[float, float]:
    """Test accuracy, and mean loss of the first ``SAMPLE`` of the training set.

    Weights and statistics are as the strategy rounds them, all else FP32.
    """
    weights = {k: v for k, v in strategy.policy.items() if k in ("weight", "include", "exclude")}
    model.eval()
    with emulation(model, weights):
        accuracy = _mean(_accuracy, model, data.test_x, data.test_y)
        loss = _mean(_loss, model, data.train_x[:SAMPLE], data.train_y[:SAMPLE])
    model.train()
    return accuracy, loss


def _mean(of: Callable[..., torch.Tensor], model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """A mean over a set, in parts that fit into memory; of a single part it keeps the bits."""
    parts = [(float(of(model, *part)), len(part[1]) / len(y)) for part in _parts(x, y, _AT_ONCE)]
    return sum(value * share for value, share in parts)


def _accuracy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).argmax(-1) == y).float().mean()
