"""`emulate`: rounding put into a model by hooks, and taken out again without a trace."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .autograd import key_tensor, new_tally, round_with_gradient
from .policy import Policy, Quantizer
from .random import Key
from .stats import Tally

Inputs = tuple[str | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Inputs = (None, None, None, None)


class Site:
    """One place where rounding happens: a module, a role, its Quantizer, its random words and its tally."""

    def __init__(self, quantizer: Quantizer, key: Key) -> None:
        self.quantizer = quantizer
        self.key = key_tensor(key) if quantizer.stochastic else None
        self.counts, self.sums = new_tally()

    def inputs(self) -> Inputs:
        """What the operator takes."""
        return self.quantizer.spec, self.key, self.counts, self.sums

    def tally(self) -> Tally:
        """A copy of the counts so far."""
        # A scaled tensor's format moves with its scale, so only the counts are of the format's name.
        return Tally(self.counts.numpy().copy(), self.sums.numpy().copy(), self.quantizer.format)


class ModuleHooks:
    """The hooks of one module; they get the module passed and hold none, so they copy and pickle."""

    def __init__(self, sites: dict[str, Site], leaf: bool) -> None:
        self.sites = sites
        self.leaf = leaf
        self.called = False
        self.skipped: dict[str, str] = {}
        self._kept: list[dict[str, nn.Parameter | None]] = []

    def _inputs(self, role: str) -> Inputs:
        return self.sites[role].inputs() if role in self.sites else NOTHING

    def before(self, module: nn.Module, args: Any) -> None:
        """Put rounded parameters in the places of the module's own, for the time of its forward."""
        self.called = True
        forward, backward = self._inputs("weight"), self._inputs("weight_gradient")
        if forward is NOTHING and backward is NOTHING:
            return
        kept = dict(module._parameters)
        self._kept.append(kept)
        for name, parameter in kept.items():
            if parameter is not None and (reason := unsuitable(parameter)) is None:
                rounded: Any = round_with_gradient(parameter, *forward, *backward)
                module._parameters[name] = rounded
            elif parameter is not None and reason:
                self.skipped[name] = reason
        refresh(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the parameters back, also after an exception, and round the outputs."""
        if self._kept:
            module._parameters.update(self._kept.pop())
            refresh(module)
        forward, backward = self._inputs("activation"), self._inputs("gradient")
        if not self.leaf or output is None or (forward is NOTHING and backward is NOTHING):
            return output
        return map_tensors(lambda x: self._round(x, forward, backward), output)

    def _round(self, x: Tensor, forward: Inputs, backward: Inputs) -> Tensor:
        reason = unsuitable(x)
        if reason is None:
            return round_with_gradient(x, *forward, *backward)
        if reason:
            self.skipped["output"] = reason
        return x

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": []}


def refresh(module: nn.Module) -> None:
    """Let a recurrent layer, which reads its weights from a list of its own, see those in their places."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


class StepHook:
    """Before each forward of the whole model: fresh random words. A recomputation in it draws the same."""

    def __init__(self, keys: list[Tensor]) -> None:
        self.keys = keys
        self.first = True

    def __call__(self, module: nn.Module, args: Any) -> None:
        """As a forward pre-hook of the model."""
        if not self.first:
            for key in self.keys:
                key[2] += 1
        self.first = False


class GradientHook:
    """Round what has accumulated in a parameter's ``.grad``: sums over uses and batches leave the format."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, parameter: Tensor) -> None:
        """As a post-accumulate hook, which must return None."""
        if parameter.grad is not None and unsuitable(parameter.grad) is None:
            spec, key, _, _ = self.site.inputs()
            parameter.grad.copy_(torch.ops.fpemu.round.default(parameter.grad, spec, key))


def unsuitable(x: Tensor) -> str | None:
    """Why a tensor cannot be rounded: None if it can, an empty reason if its numbers are no floats."""
    if not x.is_floating_point() and not x.is_complex():
        return ""
    if type(x) not in (Tensor, nn.Parameter) and not isinstance(x, torch._subclasses.FakeTensor):
        return f"a {type(x).__name__} is not a plain tensor"
    if x.layout != torch.strided:
        return f"layout {x.layout}"
    return None if x.dtype == torch.float32 else f"dtype {x.dtype}"


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor in it replaced, whatever containers hold it; dataclasses too."""
    if isinstance(tree, Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {
            f.name: map_tensors(function, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init
        }
        return dataclasses.replace(tree, **changed)
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if structure.is_leaf():
        return tree
    return pytree.tree_unflatten([map_tensors(function, leaf) for leaf in leaves], structure)


class Emulation:
    """What `emulate` returns: the way to take it out again, and what it counted."""

    def __init__(self, model: nn.Module, hooks: dict[str, ModuleHooks]) -> None:
        self.hooks = hooks
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if name in hooks:
                self._handles.append(module.register_forward_pre_hook(hooks[name].before))
                self._handles.append(module.register_forward_hook(hooks[name].after, always_call=True))
                self._watch_gradients(module, hooks[name])
        keys = [site.key for hook in hooks.values() for site in hook.sites.values() if site.key is not None]
        if keys:
            self._handles.append(model.register_forward_pre_hook(StepHook(keys)))

    def _watch_gradients(self, module: nn.Module, hooks: ModuleHooks) -> None:
        if "weight_gradient" in hooks.sites:
            watch = GradientHook(hooks.sites["weight_gradient"])
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(watch))

    def remove(self) -> None:
        """Take all rounding out of the model; what was counted stays. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def tallies(self) -> dict[tuple[str, str], Tally]:
        """By module name and role, what rounding did so far.

        Returns:
            Tallies, in the order of the model's modules.
        """
        return {
            (name, role): site.tally()
            for name, hooks in self.hooks.items()
            for role, site in hooks.sites.items()
        }

    def report(self) -> Report:
        """A table of the tallies, and what was left alone and why."""
        skipped = {
            f"{name}.{what}" if name else what: why
            for name, hooks in self.hooks.items()
            for what, why in hooks.skipped.items()
        }
        if any(hooks.called for hooks in self.hooks.values()):
            never = (name for name, hooks in self.hooks.items() if not hooks.called)
            skipped |= {name: "its forward was never called" for name in never}
        return Report(self.tallies(), skipped)


@dataclasses.dataclass(frozen=True)
class Report:
    """What an emulation counted; ``str()`` is a table.

    Attributes:
        tallies: By module name and role.
        skipped: By module, and output or parameter, why it was left alone.
    """

    tallies: dict[tuple[str, str], Tally]
    skipped: dict[str, str]

    def __str__(self) -> str:
        head = ("module", "role", "format", "elements", "to zero", "subnormal", "overflow", "largest")
        rows: list[tuple[str, ...]] = [head]
        for (name, role), t in self.tallies.items():
            if t.count:
                shares = (f"{t.share(what):.2%}" for what in ("underflow", "subnormal", "overflow"))
                rows.append((name or "(model)", role, str(t.fmt), str(t.count), *shares, f"{t.amax:.3g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 3 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        if len(rows) == 1:
            lines = ["nothing was rounded yet: run the model forward, and backward for gradients"]
        return "\n".join(lines + [f"left alone: {what}: {why}" for what, why in self.skipped.items()])

    __repr__ = __str__


def emulate(model: nn.Module, policy: Policy, *, key: Key | None = None) -> Emulation:
    """Round weights, activations and gradients of ``model`` as ``policy`` says, until removed.

    Every module without children whose name matches rounds its floating-point outputs and the gradients
    arriving at them; every matching module that has parameters of its own reads them rounded. The parameters
    themselves, the state_dict and copies of the model stay as they are. A copy made meanwhile is emulated
    like the original.

    Args:
        model: Any module with float32 parameters and activations on the CPU.
        policy: What to round, and to what.
        key: Random words of stochastic rounding, by default ``Key(0)``: each module and role draws its own,
            new ones in each forward of ``model``.

    Returns:
        The Emulation: a context manager; ``remove()``, ``report()``, ``tallies()``.

    Raises:
        TypeError: ``model`` is no module, ``policy`` no Policy.
        ValueError: a pattern of the policy matches no module.
        RuntimeError: a module to be rounded is emulated already.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with emulate(model, Policy(activation="e2m1")):
        ...     _ = torch.nn.init.constant_(model.weight, 0.3), model.weight.requires_grad_(False)
        ...     model(torch.tensor([2.0, 2.0])).item()
        1.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"emulate needs a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(policy, Policy):
        raise TypeError(f"emulate needs a Policy, for example Policy(weight='fp16'), got {policy!r}")
    chosen = _chosen(model, policy)
    key = Key(0) if key is None else key
    hooks = {}
    for name, module in chosen.items():
        if any(isinstance(getattr(h, "__self__", None), ModuleHooks) for h in module._forward_hooks.values()):
            raise RuntimeError(f"module {name!r} is emulated already; remove() that emulation first")
        sites = {
            role: Site(quantizer, key.fold_in(name).fold_in(role))
            for role, quantizer in policy.roles().items()
            if role in ("activation", "gradient") or module._parameters
        }
        hooks[name] = ModuleHooks(sites, leaf=not module._modules)
    return Emulation(model, hooks)


def _chosen(model: nn.Module, policy: Policy) -> OrderedDict[str, nn.Module]:
    """Modules without children or with parameters of their own, by the policy's patterns."""
    candidates = {
        name: module for name, module in model.named_modules() if not module._modules or module._parameters
    }
    for pattern in (*policy.include, *policy.exclude):
        if not any(_matches(pattern, name, module) for name, module in candidates.items()):
            some = ", ".join(f"{name!r} ({type(module).__name__})" for name, module in candidates.items())
            raise ValueError(
                f"pattern {pattern!r} matches none of the {len(candidates)} modules: "
                f"{textwrap.shorten(some, 200)}; patterns are module types, or fnmatch "
                "patterns on these names"
            )
    return OrderedDict(
        (name, module)
        for name, module in candidates.items()
        if any(_matches(pattern, name, module) for pattern in policy.include)
        and not any(_matches(pattern, name, module) for pattern in policy.exclude)
    )


def _matches(pattern: str | type, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)
