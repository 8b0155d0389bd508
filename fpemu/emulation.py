"""`emulate`: rounding put into a model by hooks, and taken out again without a trace."""

from __future__ import annotations

import copy
import dataclasses
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from .autograd import key_tensor, new_tally, round_with_gradient
from .columns import aligned
from .policy import Policy, Quantizer
from .random import Key
from .stats import Tally

Inputs = tuple[str | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Inputs = (None, None, None, None)
OF_MODULE, OF_WEIGHT = ("activation", "gradient"), ("weight", "weight_gradient")
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Site:
    """One place where rounding happens: a module, a role, its Quantizer, its random words and its tally."""

    def __init__(self, quantizer: Quantizer, key: Key) -> None:
        self.quantizer = quantizer
        # Sums of gradients, rounded again, must not draw the words that their last summand drew.
        stochastic = quantizer.stochastic
        self.key = key_tensor(key) if stochastic else None
        self.sum_key = key_tensor(key.fold_in("sum")) if stochastic else None
        self.counts, self.sums = new_tally()

    def inputs(self, device: torch.device) -> Inputs:
        """What the operator takes for a tensor on that device; counting goes on there, without waiting."""
        if self.counts.device != device:
            self.counts, self.sums = self.counts.to(device), self.sums.to(device)
        return self.quantizer.spec, self.key, self.counts, self.sums

    def next_step(self) -> None:
        """Draw new words from here on; what is already in a graph keeps its key."""
        for name in ("key", "sum_key"):
            key = getattr(self, name)
            if key is not None:
                setattr(self, name, key + _STEP)

    def tally(self) -> Tally:
        """A copy of the counts so far."""
        # A scaled tensor's format moves with its scale, so only the counts are of the format's name.
        counts, sums = (part.cpu().numpy().copy() for part in (self.counts, self.sums))
        return Tally(counts, sums, self.quantizer.format)


_STEP = key_tensor(Key(0, step=1))


class ModuleHooks:
    """The hooks of one module; they get the module passed and hold none, so they copy and pickle."""

    def __init__(self, sites: dict[str, Site], outputs: tuple[str, str] | None) -> None:
        self.sites = sites
        self.outputs = outputs
        self.called = False
        self.skipped: dict[str, str] = {}
        self._kept: list[dict[str, nn.Parameter | None]] = []
        self._watched: dict[str, tuple[Tensor, Any]] = {}

    def _rounds(self, roles: tuple[str, str]) -> bool:
        return roles[0] in self.sites or roles[1] in self.sites

    def _cast(self, x: Tensor, roles: tuple[str, str]) -> Tensor:
        inputs = (self.sites[role].inputs(x.device) if role in self.sites else NOTHING for role in roles)
        forward, backward = inputs
        return round_with_gradient(x, *forward, *backward)

    def before(self, module: nn.Module, args: Any) -> None:
        """Put rounded parameters in the places of the module's own, for the time of its forward."""
        self.called = True
        if self.outputs == OF_WEIGHT or not self._rounds(OF_WEIGHT):
            return
        if "weight_gradient" in self.sites:
            self.watch(module)
            if getattr(module, "sparse", False):
                self.skipped["weight gradient"] = "it is sparse"
        kept = dict(module._parameters)
        self._kept.append(kept)
        for name, parameter in kept.items():
            if parameter is not None and (reason := unsuitable(parameter)) is None:
                rounded: Any = self._cast(parameter, OF_WEIGHT)
                module._parameters[name] = rounded
            elif parameter is not None and reason:
                self.skipped[name] = reason
        refresh(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the parameters back, also after an exception, and round the outputs."""
        if self._kept:
            module._parameters.update(self._kept.pop())
            refresh(module)
        roles = self.outputs
        if roles is None or output is None or not self._rounds(roles):
            return output
        return map_tensors(lambda x: self._round(x, roles), output, self._unopened)

    def _unopened(self, leaf: Any) -> None:
        if not isinstance(leaf, PLAIN):
            self.skipped["output"] = f"a {type(leaf).__name__} is not opened"

    def watch(self, module: nn.Module) -> None:
        """Round what accumulates in the gradients of the module's parameters."""
        for name, parameter in module._parameters.items():
            known = self._watched.get(name)
            if parameter is None or not parameter.requires_grad or (known and known[0] is parameter):
                continue
            if torch.compiler.is_compiling() or not parameter.is_leaf:
                continue
            if known:
                known[1].remove()
            hook = GradientHook(self.sites["weight_gradient"])
            self._watched[name] = parameter, parameter.register_post_accumulate_grad_hook(hook)

    def leave(self, module: nn.Module) -> None:
        """Undo what is left in the module and its parameters, also after an interrupted forward."""
        if self._kept:
            module._parameters.update(self._kept[0])
            self._kept.clear()
            refresh(module)
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _round(self, x: Tensor, roles: tuple[str, str]) -> Tensor:
        reason = unsuitable(x)
        if reason is None:
            return self._cast(x, roles)
        if reason:
            self.skipped["output"] = reason
        return x

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters are others: it watches them from its first forward on.
        return self.__dict__ | {"_kept": [], "_watched": {}}


def refresh(module: nn.Module) -> None:
    """Let a recurrent layer, which reads its weights from a list of its own, see those in their places."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


class RootHook:
    """Before each forward of the whole model: fresh random words. A recomputation in it draws the same."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.called = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """As a forward pre-hook of the model."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # within a backward pass: a checkpoint runs the whole model again
        if self.called:
            for site in self.sites:
                site.next_step()
        self.called = True


class GradientHook:
    """Round what has accumulated in a parameter's ``.grad``: sums over uses and batches leave the format."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, parameter: Tensor) -> None:
        """As a post-accumulate hook, which must return None."""
        if parameter.grad is not None and unsuitable(parameter.grad) is None:
            rounded = torch.ops.fpemu.round.default(
                parameter.grad.detach(), self.site.quantizer.spec, self.site.sum_key
            )
            with torch.no_grad():
                parameter.grad.copy_(rounded)


def unsuitable(x: Tensor) -> str | None:
    """Why a tensor cannot be rounded: None if it can, an empty reason if its numbers are no floats."""
    if not x.is_floating_point() and not x.is_complex():
        return ""
    if type(x) not in (Tensor, nn.Parameter) and not isinstance(x, torch._subclasses.FakeTensor):
        return f"a {type(x).__name__} is not a plain tensor"
    if x.layout != torch.strided or x.is_nested:
        return "it is nested" if x.is_nested else f"layout {x.layout}"
    return None if x.dtype == torch.float32 else f"dtype {x.dtype}"


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, other: Callable[[Any], None]) -> Any:
    """``tree`` with every tensor in it replaced, in any containers; ``other`` is told of other leaves."""
    if isinstance(tree, Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                value = map_tensors(function, getattr(tree, field.name), other)
                object.__setattr__(changed, field.name, value)
        return changed
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if structure.is_leaf():
        other(tree)
        return tree
    return pytree.tree_unflatten([map_tensors(function, leaf, other) for leaf in leaves], structure)


class Emulation:
    """What `emulate` returns: the way to take it out again, and what it counted."""

    def __init__(self, model: nn.Module, hooks: dict[str, ModuleHooks]) -> None:
        self.hooks = hooks
        self._handles: list[Any] = []
        self._modules = {name: module for name, module in model.named_modules() if name in hooks}
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(hooks[name].before))
            self._handles.append(module.register_forward_hook(hooks[name].after, always_call=True))
            if "weight_gradient" in hooks[name].sites:
                hooks[name].watch(module)
        sites = [site for hook in hooks.values() for site in hook.sites.values() if site.key is not None]
        self._root = RootHook(sites)
        self._handles.append(model.register_forward_pre_hook(self._root))

    def remove(self) -> None:
        """Take all rounding out of the model; what was counted stays. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name, module in self._modules.items():
            self.hooks[name].leave(module)
        self._modules.clear()

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
        if self._root.called or any(hooks.called for hooks in self.hooks.values()):
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
        lines = aligned(rows, right=range(3, len(head)))
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
        model: Any module; its float32 parameters and activations are rounded, on the CPU or CUDA devices.
        policy: What to round, and to what.
        key: Random words of stochastic rounding, by default ``Key(0)``: each module and role draws its own,
            new ones in each forward of ``model``.

    Returns:
        The Emulation: a context manager; ``remove()``, ``report()``, ``tallies()``.

    Raises:
        TypeError: ``model`` is no module, ``policy`` no Policy.
        ValueError: a pattern of the policy matches no module.
        RuntimeError: a module to be rounded is emulated already, or the model is compiled.

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
    if any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
        raise RuntimeError(
            "the model is compiled, and what is compiled already would go on unrounded; emulate it first, "
            "then compile it"
        )
    chosen = _chosen(model, policy)
    key = Key(0) if key is None else key
    hooks = {}
    for name, module in chosen.items():
        outputs = outputs_of(module)
        if any(isinstance(getattr(h, "__self__", None), ModuleHooks) for h in module._forward_hooks.values()):
            raise RuntimeError(f"module {name!r} is emulated already; remove() that emulation first")
        sites = {
            role: Site(quantizer, key.fold_in(name).fold_in(role))
            for role, quantizer in policy.roles().items()
            if role in (outputs or ()) or (role in OF_WEIGHT and module._parameters)
        }
        hooks[name] = ModuleHooks(sites, outputs)
    return Emulation(model, hooks)


def outputs_of(module: nn.Module) -> tuple[str, str] | None:
    """The roles of what a module returns: a leaf's activations, a parametrization's weight, or none."""
    if isinstance(module, ParametrizationList):
        return OF_WEIGHT
    return OF_MODULE if not module._modules.keys() - {"parametrizations"} else None


def _chosen(model: nn.Module, policy: Policy) -> OrderedDict[str, nn.Module]:
    """Modules without children or with parameters of their own, by the policy's patterns."""
    candidates = {
        name: module
        for name, module in model.named_modules()
        if (outputs_of(module) or module._parameters)
        and (".parametrizations." not in f".{name}" or isinstance(module, ParametrizationList))
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
