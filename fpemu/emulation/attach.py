"""`emulate`: hooks put on every module of a model, and taken off again."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..patterns import compile_anew, has_matrix, modules_of, unwrapped
from ..policy import Policy
from ..random import Key
from ..stats import Tally
from .audit import Audit, audit
from .every_op import EveryOp
from .functional import Functional
from .hooks import OF_MODULE, OF_WEIGHT, ModuleHooks, Roles, RootHook
from .report import Report
from .sites import Site, Sums


class Emulation:
    """What `emulate` returns: the way to take it out again, and what it counted."""

    def __init__(
        self,
        whole: nn.Module,
        model: nn.Module,
        hooks: dict[str, ModuleHooks],
        root: RootHook,
        every_op: EveryOp | None,
    ) -> None:
        self.whole, self.model = whole, model
        self.hooks, self.root, self.every_op = hooks, root, every_op
        self._handles: list[Any] = []
        self._modules = modules_of(model)
        for name, module in self._modules.items():
            if name not in hooks:
                continue
            self._handles.append(module.register_forward_pre_hook(hooks[name].before))
            # First of all hooks: FSDP's must find the parameters back in their places.
            after = module.register_forward_hook(hooks[name].after, prepend=True, always_call=True)
            self._handles.append(after)
            if "weight_gradient" in hooks[name].sites:
                hooks[name].watch(module)
        self._handles.append(model.register_forward_pre_hook(root, prepend=True, with_kwargs=True))
        if every_op is not None:
            self._handles.append(model.register_forward_pre_hook(every_op.before))
            every_op.start()
        compile_anew(whole)

    def remove(self) -> None:
        """Take all rounding out of the model; what was counted stays. A second call does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.every_op is not None:
            self.every_op.stop()
        for name, hooks in self.hooks.items():
            hooks.mode.leave()
            hooks.leave(self._modules[name])
        self._modules.clear()
        compile_anew(self.whole)

    def __enter__(self) -> Emulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def tallies(self) -> dict[tuple[str, str], Tally]:
        """By module name and role, what rounding did so far.

        Returns:
            Tallies, in the order of the model's modules; then those of ``every_op``, by operation.
        """
        return {where: site.tally() for where, site in self._sites().items()}

    def _sites(self) -> dict[tuple[str, str], Site]:
        sites = {("", "input"): self.root.inputs} if self.root.inputs is not None else {}
        sites |= {
            (name, role): site for name, hooks in self.hooks.items() for role, site in hooks.sites.items()
        }
        if self.every_op is not None:
            sites |= {(name, "every_op"): site for name, site in self.every_op.sites.items()}
        return sites

    def state_dict(self) -> dict[str, Any]:
        """Random words, counts and histories as they are now, to go on with the same bits later."""
        return {
            "begun": list(self.root.mode._begun),
            "every_op": None if self.every_op is None else self.every_op.step,
            "sites": {where: site.state_dict() for where, site in self._sites().items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it is none of an emulation of the same roles in modules of the same names.
        """
        saved = state_dict["sites"]
        if self.every_op is not None and state_dict["every_op"] is not None:
            self.every_op.step = state_dict["every_op"]
            self.every_op.sites = {
                name: self.every_op.new_site(name) for name, role in saved if role == "every_op"
            }
        sites = self._sites()
        if different := saved.keys() ^ sites.keys():
            name, role = sorted(different)[0]
            raise ValueError(
                "load_state_dict needs the state_dict of an emulation of the same modules and roles; only "
                f"one of the two rounds the {role} of {name or '(model)'}"
            )
        for where, site in sites.items():
            site.load_state_dict(saved[where])
        self.root.mode._begun[:] = state_dict["begun"]

    def report(self) -> Report:
        """A table of the tallies, and what was left alone and why."""
        skipped = {
            f"{name}.{what}" if name else what: why
            for name, hooks in self.hooks.items()
            for what, why in hooks.skipped.items()
        }
        skipped |= self.root.skipped
        if self.every_op is not None:
            skipped |= self.every_op.skipped
        if self.root.called or any(hooks.called for hooks in self.hooks.values()):
            skipped |= {
                name: "its forward was never called"
                for name, hooks in self.hooks.items()
                if name and hooks.sites and not hooks.called and not hooks.read
            }
        return Report(self.tallies(), skipped)

    def audit(self, *inputs: Any, strict: bool = False, **named: Any) -> Audit:
        """Run the model forward and backward once, and list the factors of every matrix product.

        Parameters, buffers, gradients, tallies and random states are as before afterwards.

        Args:
            inputs: What the model takes.
            strict: Raise if a factor was not rounded whose role the policy sets.
            named: The same, by name.

        Returns:
            An Audit; ``str()`` is a table.

        Raises:
            RuntimeError: ``strict``, and something is not covered; the emulation is removed, or the model
                returns nothing to differentiate.
        """
        if not self._handles:
            raise RuntimeError("the emulation is removed; audit the model before remove()")
        found = audit(self.model, self.hooks, self.root, self.every_op, inputs, named)
        if strict and found.uncovered:
            raise RuntimeError(f"{len(found.uncovered)} matrix products are not covered:\n{found}")
        return found


def emulate(model: nn.Module, policy: Policy, *, key: Key | None = None, count: bool = True) -> Emulation:
    """Round weights, activations and gradients of ``model`` as ``policy`` says, until removed.

    Every module without children rounds its floating-point outputs and the gradients arriving at them; so do
    the matrix products that modules compute by functions. Every module that has parameters of its own reads
    them rounded. The parameters themselves, the state_dict and copies of the model stay as they are. A copy
    made meanwhile is emulated like the original, except for ``every_op``.

    Args:
        model: Any module; its float32 parameters and activations are rounded, on the CPU or CUDA devices. If
            it is compiled, it compiles anew.
        policy: What to round, and to what.
        key: Random words of stochastic rounding, by default ``Key(0)``: each module and role draws its own,
            new ones in each forward of ``model``.
        count: Whether to count what is lost, for ``report()`` and ``tallies()``: most of the time that
            emulation takes.

    Returns:
        The Emulation: a context manager; ``remove()``, ``report()``, ``tallies()``, ``audit()``.

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
    if key is not None and not isinstance(key, Key):
        raise TypeError(f"key must be a fpemu.Key, for example fpemu.Key(0), got {key!r}")
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise TypeError("torch.jit modules take no hooks; emulate the module that they were made from")
    key = Key(0) if key is None else key
    whole, model = model, unwrapped(model)
    mode = Functional()
    chosen = policy.by_module(model)
    hooks = {
        name: _hooks(name, module, chosen[name], mode, key, count)
        for name, module in modules_of(model).items()
        if _has_forward(name, module)
    }
    _tie(model, hooks)
    inputs = None if policy.input is None else Site(policy.input, key.fold_in("input"), count)
    every_op = None
    if policy.every_op is not None:
        every_op = EveryOp(policy.every_op, policy.except_ops, key.fold_in("every_op"), count)
    sites = [site for one in hooks.values() for site in one.sites.values()] + ([inputs] if inputs else [])
    mode.sites = [site for site in sites if site.changes]
    mode.sites += [one.sums for one in hooks.values() if one.sums is not None]
    return Emulation(whole, model, hooks, RootHook(mode, inputs), every_op)


def _has_forward(name: str, module: nn.Module) -> bool:
    """Whether hooks of its own do anything."""
    inside = ".parametrizations." in f".{name}" and not isinstance(module, ParametrizationList)
    return not inside and type(module) not in (nn.ModuleList, nn.ModuleDict)


def _hooks(
    name: str, module: nn.Module, policy: Policy | None, mode: Functional, key: Key, count: bool
) -> ModuleHooks:
    outputs = outputs_of(module)
    multiplies = _multiplies(module)
    roles = {} if policy is None else policy.roles()
    sites = {
        role: Site(quantizer, key.fold_in(name).fold_in(role), count)
        for role, quantizer in roles.items()
        if (role in (outputs or ()))
        or (role in OF_WEIGHT and module._parameters)
        or (role in OF_MODULE and multiplies)
        or (role not in (*OF_MODULE, *OF_WEIGHT) and (multiplies or _has_matrix(module)))
    }
    sums = None
    if policy is not None and policy.accumulate is not None and (multiplies or _has_matrix(module)):
        sums = Sums(policy.accumulate, key.fold_in(name).fold_in("accumulate"))
    if (sites or sums) and any(
        isinstance(other := getattr(hook, "__self__", None), ModuleHooks) and (other.sites or other.sums)
        for hook in module._forward_hooks.values()
    ):
        raise RuntimeError(f"module {name!r} is emulated already; remove() that emulation first")
    hooks = ModuleHooks(name, sites, sums, mode, outputs, multiplies)
    if isinstance(module, nn.RNNBase) and policy is not None and policy.accumulate is not None:
        hooks.skipped["sums"] = "torch computes a recurrent layer in one"
    return hooks


def outputs_of(module: nn.Module) -> Roles | None:
    """The roles of what a module returns: a leaf's activations, a parametrization's weight, or none."""
    if isinstance(module, ParametrizationList):
        return OF_WEIGHT
    return OF_MODULE if not module._modules.keys() - {"parametrizations"} else None


def _multiplies(module: nn.Module) -> bool:
    """Whether a module's forward may call products whose results are not what the module returns."""
    if isinstance(module, (nn.Sequential, ParametrizationList)):
        return False
    known = type(module).__module__.startswith("torch.nn.") or hasattr(module, "parametrizations")
    return not known or isinstance(module, nn.MultiheadAttention)


def _has_matrix(module: nn.Module) -> bool:
    tables = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase)
    return any(has_matrix(m) for m in module.modules()) and not isinstance(module, tables)


def _tie(model: nn.Module, hooks: dict[str, ModuleHooks]) -> None:
    """Let a shared parameter be rounded as its first module's wherever it is read."""
    first: dict[Tensor, ModuleHooks] = {}
    for name, module in modules_of(model).items():
        here = hooks.get(name)
        for label, parameter in module._parameters.items():
            if parameter is None or here is None:
                continue
            owner = first.setdefault(parameter, here)
            if owner is not here and {r for r in OF_WEIGHT if r in here.sites} <= owner.sites.keys():
                here.tied[label] = owner
