"""Weights, gradients and optimizer state kept in low-precision formats, around any torch optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arrays import carrier_of
from .autograd import round_by
from .formats import BINARY32, Format
from .patterns import bare_name
from .quantize import quantize
from .quantizer import Quantizer
from .random import Key
from .shards import largest, local, round_part
from .updates import Meter, Updates

ROUNDINGS = ("nearest_even", "stochastic")
EVERY = "*"  # in a mapping of state to formats: all the rest
Role = str | Format | Quantizer | None


class LowPrecision(Optimizer):
    """A torch optimizer whose weights, and state if asked, are values of a format, stored as float32.

    Each step lets the optimizer make its update in float32 and rounds the new weight once. Without a master
    copy an update below half the distance to the next value is lost under nearest_even; ``updates`` and
    ``lost`` count, and ``measured`` tells of each parameter how large updates are beside it.

    Args:
        optimizer: Any torch optimizer over float32 parameters, on the CPU or CUDA devices, whole or sharded
            by FSDP2. It must not be stepped by itself.
        weight: Format of the weights, its name, or a Quantizer with a rounding of its own; None leaves them
            float32.
        state: Format of floating-point optimizer state (momentum, exp_avg ...), or a mapping from names of
            state to formats, ``"*"`` for the rest; None leaves it float32. A Quantizer may have
            ``scaling="tensor"``: each tensor is kept with a power of two of its own, and small second moments
            outlive a narrow format.
        rounding: ``"nearest_even"`` or ``"stochastic"``, of all that is rounded.
        master: Keep a float32 copy that updates accumulate in; the weights are that copy, rounded.
        kahan: Keep what rounding the weight lost, itself in the format, and add it to the next update.
        key: Random words of stochastic rounding. Each parameter draws its own, by its name if the optimizer
            was made from ``named_parameters()``, else by its place; new ones each step. A shard draws those
            of its place in the whole.
        gradient: Format that backward passes accumulate gradients in; None leaves them float32. A scaled
            gradient is rounded as it is, scaled; unscaling it is part of the update, in float32. Under DDP it
            is a rank's own, before they are averaged.
        measure_every: Steps from one whose updates are counted to the next; 0: none is.

    The parameters are rounded at once, to nearest even.

    Raises:
        TypeError: ``optimizer`` is no torch optimizer, or a parameter is not float32.
        ValueError: an unknown format or rounding; ``kahan`` with ``master`` or without ``weight``; ``master``
            without ``weight``; nothing to round; a scaling other than of state by tensor.

    Warns:
        UserWarning: the optimizer's eps is zero in a format of the state.

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
        weight: Role = None,
        state: Role | Mapping[str, Role] = None,
        rounding: str = "nearest_even",
        master: bool = False,
        kahan: bool = False,
        key: Key | None = None,
        gradient: Role = None,
        measure_every: int = 1,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LowPrecision goes around a torch optimizer, got {type(optimizer).__name__}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {rounding!r}; choose from {', '.join(ROUNDINGS)}")
        if weight is None and not state and gradient is None:
            raise ValueError("LowPrecision needs weight=, state= or gradient=, a format; all are None")
        if weight is None and (master or kahan):
            raise ValueError(
                f"{'master' if master else 'kahan'}=True needs weight=, the format of the weights"
            )
        if master and kahan:
            raise ValueError("master=True keeps what kahan=True would make up for; choose one")
        if not isinstance(measure_every, int) or measure_every < 0:
            raise ValueError(f"measure_every must be a number of steps, or 0 for none, got {measure_every!r}")
        self.weight = _quantizer(weight, rounding)
        if self.weight is not None and self.weight.in_blocks:
            raise ValueError(
                f"weights are kept in formats of single numbers, and {self.weight.format} has blocks; keep "
                "them in float32 and round where they are read: Policy(weight=...)"
            )
        self.gradient = _quantizer(gradient, rounding)
        self.kept_state = _state_quantizers(state, rounding)
        self.master, self.kahan = master, kahan
        self.measure_every = measure_every
        self.key = Key(0) if key is None else key
        self.optimizer = optimizer
        self._step = 0
        self._keys: dict[tuple[int, str], Key] = {}
        self._hidden: dict[Tensor, Tensor] = {}  # the master copy or the compensation of each parameter
        self._meters: dict[Tensor, Meter] = {}
        self._accumulated: dict[int, int] = {}  # backward passes since the last step
        self._unchecked = isinstance(state, Mapping)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        for index, parameter in enumerate(self._parameters()):
            self._start(index, parameter)
        self._check_eps()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _start(self, index: int, parameter: Tensor) -> None:
        if carrier_of(local(parameter), "a parameter") != BINARY32:
            raise TypeError(f"LowPrecision keeps weights as float32, got a parameter of {parameter.dtype}")
        if self.gradient is not None and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_GradientHook(self, index))
        if self.weight is None:
            return
        before = parameter.detach().clone()
        self._nearest(local(parameter))
        if self.master:
            self._hidden[parameter] = before
        elif self.kahan:
            self._hidden[parameter] = torch.zeros_like(before)
        self._meters[parameter] = Meter(self.weight.format, local(parameter).device)

    def _check_eps(self) -> None:
        for group in self.param_groups:
            eps = group.get("eps")
            for name, quantizer in self.kept_state.items():
                if not isinstance(eps, float) or quantizer is None or quantizer.scaling is not None:
                    continue
                fmt = quantizer.format
                if eps > 0 and quantizer(torch.tensor([eps]), key=_any_key(quantizer)) == 0:
                    warnings.warn(
                        f"eps={eps:g} of {type(self.optimizer).__name__} is zero in {fmt}, the format of "
                        f"{'its state' if name == EVERY else name}: where a second moment becomes zero too, "
                        "a step in that format divides by zero, and the float32 step here by eps alone. Give "
                        f"an eps of at least {fmt.smallest_subnormal:g}, or a Quantizer with "
                        "scaling='tensor'",
                        stacklevel=3,
                    )
                    return

    def _name(self, index: int) -> str | int:
        names = [name for group in self.param_groups for name in group.get("param_names", [])]
        return bare_name(names[index]) if index < len(names) else index

    def _key(self, index: int, role: str) -> Key:
        if (index, role) not in self._keys:
            self._keys[index, role] = self.key.fold_in(self._name(index)).fold_in(role)
        return self._keys[index, role].at(self._step)

    @property
    def _kept_name(self) -> str:
        """What is kept for each weight."""
        return "master" if self.master else "compensation" if self.kahan else "nothing"

    @property
    def measured(self) -> dict[str | int, Updates]:
        """What became of each parameter's updates, by its name or place; of a shard, those of this rank."""
        return {
            self._name(index): self._meters[parameter].read()
            for index, parameter in enumerate(self._parameters())
            if parameter in self._meters
        }

    @property
    def updates(self) -> int:
        """Weight updates so far that were not zero, of the steps that were measured."""
        return self._count(0)

    @property
    def lost(self) -> int:
        """Those of `updates` that left their weight as it was."""
        return self._count(1)

    def _count(self, place: int) -> int:
        return sum(int(meter.totals[place]) for meter in self._meters.values())

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
            parameter: local(parameter).clone()
            for parameter in parameters
            if closure is not None or parameter.grad is not None
        }
        if self.master:
            for parameter in before:
                parameter.copy_(self._hidden[parameter])
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if self._unchecked and before:
            self._check_names(before)
        for index, parameter in enumerate(parameters):
            if parameter in before:
                self._round_weight(index, parameter, before[parameter])
                self._round_state(index, parameter)
        self._step += 1
        self._accumulated.clear()
        return result

    def _check_names(self, stepped: Mapping[Tensor, Tensor]) -> None:
        there = {name for parameter in stepped for name, _ in self._states(parameter)}
        unknown = self.kept_state.keys() - there - {EVERY}
        if unknown:
            raise ValueError(
                f"state= names {', '.join(sorted(unknown))}, which {type(self.optimizer).__name__} does not "
                f"keep; it keeps {', '.join(sorted(there)) or 'nothing that could be rounded'}"
            )
        self._unchecked = False

    def _round_weight(self, index: int, parameter: Tensor, before: Tensor) -> None:
        if self.weight is None:
            return
        measured = self.measure_every > 0 and self._step % self.measure_every == 0
        target = local(parameter)
        update = before
        if self.master:
            hidden = local(self._hidden[parameter])
            update = target - hidden
            hidden.copy_(target)
        elif self.kahan or measured:
            update = target - before
        if self.kahan:
            # Kahan's compensated sum (1965), every operation rounded in the format: what earlier steps lost
            # is added now, what this one loses is kept.
            compensation = local(self._hidden[parameter])
            update = self._nearest(self._nearest(update) - compensation)
            target.copy_(before + update)
        self._quantize(parameter, self.weight, index, "weight")
        if self.kahan:
            compensation.copy_(self._nearest(self._nearest(target - before) - update))
        if measured:
            gradient = None if parameter.grad is None else local(parameter.grad)
            self._meters[parameter].add(before, update, target, gradient)

    def _nearest(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return quantize(x, self.weight.format, overflow=self.weight.overflow, out=x)

    def _states(self, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """What the optimizer keeps of a parameter that can be rounded."""
        return [
            (name, value)
            for name, value in self.state[parameter].items()
            # A count of steps is no number to round.
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point()
            if value.shape == parameter.shape
        ]

    def _round_state(self, index: int, parameter: Tensor) -> None:
        for name, value in self._states(parameter):
            quantizer = self.kept_state.get(name, self.kept_state.get(EVERY))
            if quantizer is not None:
                self._quantize(value, quantizer, index, name)

    def _round_gradient(self, index: int, parameter: Tensor) -> None:
        assert self.gradient is not None and parameter.grad is not None
        if parameter.grad.is_sparse:
            raise TypeError(
                f"gradient= rounds dense gradients, got a sparse one of parameter {self._name(index)}; make "
                "its module with sparse=False"
            )
        # A sum that is rounded again must not draw the words that its last summand drew.
        passes = self._accumulated[index] = self._accumulated.get(index, 0) + 1
        self._quantize(parameter.grad, self.gradient, index, f"gradient {passes}")

    def _quantize(self, x: Tensor, quantizer: Quantizer, index: int, role: str) -> None:
        key = self._key(index, role) if quantizer.stochastic else None
        if quantizer.scaling is None:
            round_part(x, key, lambda part, words: quantizer(part, key=words, out=part))
            return
        amax = largest(x)
        round_part(x, key, lambda part, words: part.copy_(round_by(amax, part, quantizer, words)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer; its parameters are rounded at once."""
        super().add_param_group(param_group)
        if hasattr(self, "_hidden") and self.param_groups is self.optimizer.param_groups:
            first = len(self._parameters()) - len(self.param_groups[-1]["params"])
            for index, parameter in enumerate(self.param_groups[-1]["params"], first):
                self._start(index, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and what rounding needs to go on with the same bits."""
        parameters = self._parameters()
        return {
            "optimizer": self.optimizer.state_dict(),
            "step": self._step,
            "kept": self._kept_name,
            "hidden": {i: self._hidden[p] for i, p in enumerate(parameters) if p in self._hidden},
            "measured": {i: self._meters[p].state() for i, p in enumerate(parameters) if p in self._meters},
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
        for index, meter in state_dict["measured"].items():
            self._meters[parameters[index]].load(meter)
        for index, value in hidden.items():
            self._hidden[parameters[index]].copy_(value)


class _GradientHook:
    """Rounds a gradient where a backward pass has accumulated it, as long as its optimizer lives."""

    def __init__(self, optimizer: LowPrecision, index: int) -> None:
        self.optimizer, self.index = weakref.ref(optimizer), index

    def __call__(self, parameter: Tensor) -> None:
        optimizer = self.optimizer()
        if optimizer is not None and parameter.grad is not None:
            optimizer._round_gradient(self.index, parameter)


def _quantizer(fmt: Role, rounding: str, scalings: tuple[str | None, ...] = (None,)) -> Quantizer | None:
    quantizer = fmt if fmt is None or isinstance(fmt, Quantizer) else Quantizer(fmt, rounding)
    if quantizer is not None and quantizer.scaling not in scalings:
        raise ValueError(
            "LowPrecision keeps weights and gradients unscaled, and state so or with scaling='tensor'; got "
            f"{quantizer}"
        )
    return quantizer


def _state_quantizers(state: Role | Mapping[str, Role], rounding: str) -> dict[str, Quantizer | None]:
    """By name of state, its Quantizer; EVERY is all names that are not there."""
    formats = state if isinstance(state, Mapping) else {} if state is None else {EVERY: state}
    return {name: _quantizer(fmt, rounding, (None, "tensor")) for name, fmt in formats.items()}


def _any_key(quantizer: Quantizer) -> Key | None:
    return Key(0) if quantizer.stochastic else None
