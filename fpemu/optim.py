"""Weights and optimizer state kept in a low-precision format, around any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arrays import carrier_of
from .formats import BINARY32, Format
from .quantize import quantize
from .quantizer import Quantizer
from .random import Key

ROUNDINGS = ("nearest_even", "stochastic")


class LowPrecision(Optimizer):
    """A torch optimizer whose weights, and state if asked, are values of a format, stored as float32.

    Each step lets the optimizer make its update in float32 and rounds the new weight once. Without a master
    copy an update below half the distance to the next value is lost under nearest_even; ``updates`` and
    ``lost`` count.

    Args:
        optimizer: Any torch optimizer over float32 parameters, on the CPU or CUDA devices. It must not be
            stepped by itself.
        weight: Format of the weights, its name, or a Quantizer with a rounding of its own; None leaves them
            float32.
        state: Format of floating-point optimizer state (momentum, exp_avg ...); None leaves it float32.
        rounding: ``"nearest_even"`` or ``"stochastic"``, of the weights and the state.
        master: Keep a float32 copy that updates accumulate in; the weights are that copy, rounded.
        kahan: Keep what rounding the weight lost, itself in the format, and add it to the next update.
        key: Random words of stochastic rounding. Each parameter draws its own, by its name if the optimizer
            was made from ``named_parameters()``, else by its place; new ones each step.

    The parameters are rounded at once, to nearest even.

    Raises:
        TypeError: ``optimizer`` is no torch optimizer, or a parameter is not float32.
        ValueError: an unknown format or rounding; ``kahan`` with ``master`` or without ``weight``; ``master``
            without ``weight``; neither ``weight`` nor ``state``.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = LowPrecision(torch.optim.SGD([w], lr=1.0), weight="bf16")
        >>> w.grad = torch.tensor([-0.001])
        >>> optimizer.step()
        >>> w.item(), optimizer.updates, optimizer.lost
        (1.0, 1, 1)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weight: str | Format | Quantizer | None = None,
        state: str | Format | Quantizer | None = None,
        rounding: str = "nearest_even",
        master: bool = False,
        kahan: bool = False,
        key: Key | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LowPrecision goes around a torch optimizer, got {type(optimizer).__name__}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {rounding!r}; choose from {', '.join(ROUNDINGS)}")
        if weight is None and state is None:
            raise ValueError("LowPrecision needs weight= or state=, a format; both are None")
        if weight is None and (master or kahan):
            raise ValueError(
                f"{'master' if master else 'kahan'}=True needs weight=, the format of the weights"
            )
        if master and kahan:
            raise ValueError("master=True keeps what kahan=True would make up for; choose one")
        self.weight = _quantizer(weight, rounding)
        self.kept_state = _quantizer(state, rounding)
        self.master, self.kahan = master, kahan
        self.key = Key(0) if key is None else key
        self.optimizer = optimizer
        self._updates: dict[torch.device, Tensor] = {}  # on each device: a count that is not waited for
        self._lost: dict[torch.device, Tensor] = {}
        self._step = 0
        self._keys: dict[tuple[int, str], Key] = {}
        self._hidden: dict[Tensor, Tensor] = {}  # the master copy or the compensation of each parameter
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        for parameter in self._parameters():
            self._start(parameter)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _start(self, parameter: Tensor) -> None:
        if carrier_of(parameter, "a parameter") != BINARY32:
            raise TypeError(f"LowPrecision keeps weights as float32, got a parameter of {parameter.dtype}")
        if self.weight is None:
            return
        before = parameter.detach().clone()
        self._nearest(parameter.detach())
        if self.master:
            self._hidden[parameter] = before
        elif self.kahan:
            self._hidden[parameter] = torch.zeros_like(before)

    def _key(self, index: int, role: str) -> Key:
        if (index, role) not in self._keys:
            names = [name for group in self.param_groups for name in group.get("param_names", [])]
            owner = self.key.fold_in(names[index] if index < len(names) else index)
            self._keys[index, role] = owner.fold_in(role)
        return self._keys[index, role].at(self._step)

    @property
    def _kept_name(self) -> str:
        """What is kept for each weight."""
        return "master" if self.master else "compensation" if self.kahan else "nothing"

    @property
    def updates(self) -> int:
        """Weight updates so far that were not zero."""
        return sum(int(count) for count in self._updates.values())

    @property
    def lost(self) -> int:
        """Those of `updates` that left their weight as it was."""
        return sum(int(count) for count in self._lost.values())

    @property
    def lost_share(self) -> float:
        """Share of the nonzero updates so far that left their weight unchanged; 0.0 before the first."""
        return self.lost / self.updates if self.updates else 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, then rounding.

        Args:
            closure: As the optimizer takes it: computes the loss again, at the rounded weights.

        Returns:
            What the optimizer's step returns.
        """
        parameters = self._parameters()
        if closure is not None and self.master:
            raise ValueError(
                "a closure computes gradients at the rounded weights; master=True cannot give it those"
            )
        before = {
            parameter: parameter.detach().clone()
            for parameter in parameters
            if closure is not None or parameter.grad is not None
        }
        if self.master:
            for parameter in before:
                parameter.copy_(self._hidden[parameter])
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        for index, parameter in enumerate(parameters):
            if parameter in before:
                self._round_weight(index, parameter, before[parameter])
                self._round_state(index, parameter)
        self._step += 1
        return result

    def _round_weight(self, index: int, parameter: Tensor, before: Tensor) -> None:
        if self.weight is None:
            return
        target = parameter.detach()
        exact = target.clone()  # where the update would have gone in float32
        old = self._hidden[parameter].clone() if self.master else before
        update = exact - old
        if self.master:
            self._hidden[parameter].copy_(exact)
        elif self.kahan:
            # Kahan's compensated sum (1965), every operation rounded in the format: what earlier steps lost
            # is added now, what this one loses is kept.
            update = self._nearest(self._nearest(update) - self._hidden[parameter])
            target.copy_(before + update)
        self._quantize(target, self.weight, index, "weight")
        if self.kahan:
            self._hidden[parameter].copy_(self._nearest(self._nearest(target - before) - update))
        moved = update != 0
        for counts, counted in ((self._updates, moved), (self._lost, moved & (target == before))):
            counts[target.device] = counted.sum() + counts.get(target.device, 0)

    def _nearest(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return quantize(x, self.weight.format, overflow=self.weight.overflow, out=x)

    def _round_state(self, index: int, parameter: Tensor) -> None:
        if self.kept_state is None:
            return
        for name, value in self.state[parameter].items():
            # A count of steps is no number to round.
            if name == "step" or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.shape == parameter.shape:
                self._quantize(value, self.kept_state, index, name)

    def _quantize(self, x: Tensor, quantizer: Quantizer, index: int, role: str) -> None:
        key = self._key(index, role) if quantizer.stochastic else None
        quantizer(x, key=key, out=x)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer; its parameters are rounded at once."""
        super().add_param_group(param_group)
        if hasattr(self, "_hidden") and self.param_groups is self.optimizer.param_groups:
            for parameter in self.param_groups[-1]["params"]:
                self._start(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and what rounding needs to go on with the same bits."""
        parameters = self._parameters()
        return {
            "optimizer": self.optimizer.state_dict(),
            "step": self._step,
            "updates": self.updates,
            "lost": self.lost,
            "kept": self._kept_name,
            "hidden": {i: self._hidden[p] for i, p in enumerate(parameters) if p in self._hidden},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it is none of a LowPrecision with the same parameters and copies.
        """
        parameters = self._parameters()
        hidden, kept = state_dict.get("hidden"), state_dict.get("kept")
        expected = [i for i, parameter in enumerate(parameters) if parameter in self._hidden]
        if hidden is None or kept != self._kept_name or sorted(hidden) != expected:
            raise ValueError(
                "load_state_dict needs the state_dict of a LowPrecision with the same parameters, master= "
                f"and kahan=; got keys {sorted(state_dict)}"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._step = state_dict["step"]
        host = torch.device("cpu")
        self._updates = {host: torch.tensor(state_dict["updates"])}
        self._lost = {host: torch.tensor(state_dict["lost"])}
        for index, value in hidden.items():
            self._hidden[parameters[index]].copy_(value)


def _quantizer(fmt: str | Format | Quantizer | None, rounding: str) -> Quantizer | None:
    quantizer = fmt if fmt is None or isinstance(fmt, Quantizer) else Quantizer(fmt, rounding)
    if quantizer is not None and quantizer.scaling is not None:
        raise ValueError(
            f"LowPrecision keeps numbers unscaled, got {quantizer}; give the Quantizer scaling=None"
        )
    return quantizer
