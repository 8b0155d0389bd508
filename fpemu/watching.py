"""What is counted of a model, its optimizer and its loss scaler in one step, and how it is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from .emulation.hooks import ModuleHooks
from .formats import Format
from .patterns import Pattern, compile_anew, matching, modules_of, unwrapped
from .quantizer import Quantizer
from .stats import Tally
from .taps import Counter, Switch, Tap, take

ROLES = ("activation", "gradient", "weight", "weight_gradient", "update", "update_ratio")
GRADIENTS = ("gradient", "weight_gradient")  # what a loss scale multiplies


@dataclass(frozen=True)
class Counted:
    """What was counted of one module and role in one step.

    Attributes:
        module: Its name, without those of wrappers.
        role: One of ROLES, or ``state.NAME`` of optimizer state.
        scale: By which the loss scale had multiplied these numbers.
        tallies: One for each format, or one without.
        reduced: Whether they are sums or means over ranks, as gradients of weights are under DDP and FSDP2.
    """

    module: str
    role: str
    scale: float
    tallies: list[Tally]
    reduced: bool = False


@dataclass(frozen=True)
class Step:
    """What is known of a step as a whole.

    Attributes:
        step: Its number.
        scale: Loss scale of its backward pass; None without a scaler.
        skipped: Whether the scaler left the optimizer's step out; None without a scaler or an optimizer.
        updates: Weight updates since the beginning that were not zero, where the optimizer counts those.
        lost: Those of ``updates`` that left their weight as it was.
    """

    step: int
    scale: float | None
    skipped: bool | None
    updates: int | None
    lost: int | None


class Watch:
    """Hooks on a model and an optimizer, and the counters that they fill while ``switch`` is on."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scaler: Any,
        formats: tuple[Format, ...],
        modules: tuple[Pattern, ...],
        inference: bool,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.formats, self.switch = formats, Switch(inference)
        self.bare = unwrapped(model)
        known = modules_of(self.bare)
        self.names = set().union(*(matching(pattern, known) for pattern in modules))
        self.order = {_owner(name): place for place, name in enumerate(known)}
        self.replicas = _replicas(model)
        self.whole = self.replicas is None or torch.distributed.get_rank(self.replicas) == 0
        devices = [p.device for p in self.bare.parameters() if p.device.type in ("cpu", "cuda")]
        self.device = devices[0] if devices else torch.device("cpu")
        self.counters: dict[tuple[str, str], Counter] = {}
        self._scales: dict[str, float] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._seen = False  # the parameters and their gradients, in this step
        self._stepped = False
        self._found_inf: Tensor | None = None
        self._unhooked: dict[str, str] = {}
        self._handles: list[Any] = []
        self.scale = self._scale()
        for name, module in known.items():
            if name in self.names and isinstance(module, torch.jit.ScriptModule):
                self._unhooked[f"{name or '(model)'} activation"] = "a torch.jit module takes no hooks"
            elif name in self.names and _returns_activations(name, module):
                tap = Tap(self.switch, self._counter(name, "activation"), self._counter(name, "gradient"))
                # Before an emulation rounds what the module returns, and the gradient.
                self._handles.append(module.register_forward_hook(tap.see, prepend=True))
                self._handles.append(module.register_forward_hook(tap.tap))
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        compile_anew(model)

    def remove(self) -> None:
        """Take all hooks off."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._before.clear()
            compile_anew(self.model)

    def _counter(self, module: str, role: str) -> Counter:
        if (module, role) not in self.counters:
            self.counters[module, role] = Counter(self.formats, self.device)
        return self.counters[module, role]

    def _scale(self) -> float | None:
        if self.scaler is None or isinstance(self.scaler, (int, float)):
            return None if self.scaler is None else float(self.scaler)
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, with the first of the modules that have it."""
        seen = set()
        for name, module in modules_of(self.bare).items():
            for parameter in module._parameters.values():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    if name in self.names and not isinstance(parameter, UninitializedParameter):
                        yield _owner(name), parameter

    def _local(self, x: Tensor) -> Tensor | None:
        """The part of a parameter, or of a tensor like it, that this process counts."""
        if not isinstance(x, DTensor):
            return x.detach() if self.whole else None
        place = x.device_mesh.get_coordinate() or ()
        copies = [at for at, placed in zip(place, x.placements, strict=True) if placed.is_replicate()]
        whole: Any = x.detach()
        return None if any(copies) else whole.to_local()

    def _add(self, module: str, role: str, x: Tensor | None, scale: float = 1.0) -> None:
        local = None if x is None else self._local(x)
        if local is not None:
            self._counter(module, role).add(local)
            self._scales[role] = scale

    def _see_weights(self) -> None:
        for name, parameter in self._parameters():
            self._add(name, "weight", parameter)

    def _see_gradients(self, scale: float) -> None:
        self._seen = True
        for name, parameter in self._parameters():
            self._add(name, "weight_gradient", parameter.grad, scale)

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._found_inf = getattr(optimizer, "found_inf", None)  # a fused step tests it, and does nothing
        self._stepped = True
        if self.switch.on:
            self._see_weights()
            if not _closure(args, kwargs):
                fused = getattr(optimizer, "grad_scale", None) is not None  # it unscales by itself
                self._see_gradients((self.scale or 1.0) if fused else 1.0)
            self._before = {p: p.detach().clone() for _, p in self._parameters() if p.requires_grad}

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before, self._before = self._before, {}
        if not self.switch.on:
            return
        if _closure(args, kwargs):
            self._see_gradients(1.0)
        for name, parameter in self._parameters():
            if parameter in before and parameter.grad is not None:
                self._see_update(name, self._local(before[parameter]), self._local(parameter))
                for what, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        self._add(name, f"state.{what}", value)

    def _see_update(self, name: str, before: Tensor | None, after: Tensor | None) -> None:
        if before is None or after is None or before.is_complex():
            return
        # As wide as float32 at least; exact wherever the weight moved by less than half of itself.
        wide = torch.promote_types(before.dtype, torch.float32)
        old, update = before.to(wide), after.to(wide) - before
        self._counter(name, "update").add(update)
        self._counter(name, "update_ratio").add(old.div_(update).masked_fill_(update == 0, 0))

    def take(self, step: int) -> tuple[list[Counted], Step]:
        """What was counted since the last call, in the model's order, and what is known of the step."""
        counted = self._take() if self.switch.on else []
        counts = [getattr(self.optimizer, name, None) for name in ("updates", "lost")]
        known = Step(step, self.scale, self._skipped(), *counts)
        self._seen = self._stepped = False
        self.scale = self._scale()
        return counted, known

    @property
    def pending(self) -> bool:
        """Whether something was counted since the last call of `take`."""
        return self._seen or any(counter.used for counter in self.counters.values())

    def _take(self) -> list[Counted]:
        if not self._seen:
            # Without an optimizer to tell, gradients are as the loss scale left them.
            self._see_weights()
            self._see_gradients((self.scale or 1.0) if self.optimizer is None else 1.0)
        self._scales["gradient"] = self.scale or 1.0
        reduced = self.replicas is not None or any(isinstance(p, DTensor) for _, p in self._parameters())
        keys = sorted(self.counters, key=self._place)
        return [
            Counted(module, role, self._scales.get(role, 1.0), tallies, role == "weight_gradient" and reduced)
            for (module, role), tallies in zip(keys, take([self.counters[k] for k in keys]), strict=True)
            if tallies
        ]

    def _skipped(self) -> bool | None:
        if self.optimizer is None or self.scale is None or isinstance(self.scaler, (int, float)):
            return None
        found = self._found_inf
        return not self._stepped or (found is not None and bool(found > 0))

    def _place(self, key: tuple[str, str]) -> tuple[int, int, str]:
        module, role = key
        return self.order[module], ROLES.index(role) if role in ROLES else len(ROLES), role

    def left_alone(self) -> dict[str, str]:
        """By module and role, why tensors were not counted."""
        return self._unhooked | {
            f"{module or '(model)'} {role}": ", ".join(sorted(counter.left_alone))
            for (module, role), counter in self.counters.items()
            if counter.left_alone
        }

    def emulated(self) -> dict[str, dict[str, str]]:
        """By module and role, what an emulation rounds to there, and how."""
        found = {}
        for module in self.bare.modules():
            for hook in module._forward_hooks.values():
                hooks = getattr(hook, "__self__", None)
                if isinstance(hooks, ModuleHooks) and hooks.sites:
                    found[hooks.name] = {role: _said(s.quantizer) for role, s in hooks.sites.items()}
        return found


def _said(quantizer: Quantizer) -> str:
    """A format, and how it is rounded to where that is not the usual way."""
    options = (quantizer.rounding, quantizer.overflow, quantizer.scaling)
    usual = ("nearest_even", "ieee", None)
    return " ".join([str(quantizer.format), *(str(o) for o, u in zip(options, usual, strict=True) if o != u)])


def _owner(name: str) -> str:
    """The module that a parametrization's parameters belong to."""
    return f".{name}".partition(".parametrizations")[0].removeprefix(".")


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an optimizer's step computes the gradients itself; the optimizer is the first argument."""
    return any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None


def _returns_activations(name: str, module: nn.Module) -> bool:
    """Whether what a module returns is counted: a leaf, or what calls none of its children."""
    if isinstance(module, ParametrizationList) or _owner(name) != name:
        return False
    return not module._modules.keys() - {"parametrizations"} or isinstance(module, nn.MultiheadAttention)


def _replicas(model: nn.Module) -> Any:
    """The process group that DistributedDataParallel keeps parameters alike in; None without it."""
    inside: Any = model
    while inside is not None:
        if isinstance(inside, nn.parallel.DistributedDataParallel):
            return inside.process_group
        inside = getattr(inside, "_orig_mod", None)
    return None
