"""The hooks of modules; they get the module passed and hold none, so they copy and pickle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .functional import Frame, Functional, Product
from .products import multiply
from .recompute import region
from .sites import Site, Sums, cast_at
from .tensors import map_tensors, unsuitable

OF_MODULE, OF_WEIGHT = ("activation", "gradient"), ("weight", "weight_gradient")
Roles = tuple[str, str]
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class ModuleHooks:
    """What is rounded in one module, and the hooks that do it.

    Attributes:
        name: Of the module, as in ``named_modules``.
        sites: By role.
        sums: How its matrix products are rounded as they accumulate, or None.
        outputs: The roles of what the module returns: a leaf's activations, a parametrization's weight, none.
        own_products: Whether products that its forward computes are rounded like a leaf's outputs.
        tied: By parameter name, the hooks of the module that has the parameter too, and had it first.
        skipped: By what was left alone, the reason.
    """

    def __init__(
        self,
        name: str,
        sites: dict[str, Site],
        sums: Sums | None,
        mode: Functional,
        outputs: Roles | None,
        own_products: bool,
    ) -> None:
        self.name, self.sites, self.sums, self.mode = name, sites, sums, mode
        self.outputs, self.own_products = outputs, own_products
        self.tied: dict[str, ModuleHooks] = {}
        self.called = False
        self.read = False  # its parameters, by another module
        self.skipped: dict[str, str] = {}
        self._kept: list[dict[str, nn.Parameter | None]] = []
        self._watched: dict[str, tuple[Tensor, Any]] = {}
        self._last: tuple[Tensor, int] | None = None  # what a product of its own was rounded to, its version

    def rounds(self, roles: Roles) -> bool:
        """Whether one of the roles is set."""
        return roles[0] in self.sites or roles[1] in self.sites

    def _cast(self, x: Tensor, roles: Roles, what: str) -> Tensor:
        if not self.rounds(roles):
            return x
        reason = unsuitable(x)
        if reason is not None:
            if reason:
                self.skipped[what] = reason
            return x
        return cast_at(x, self.sites.get(roles[0]), self.sites.get(roles[1]))

    def before(self, module: nn.Module, args: Any) -> None:
        """Put rounded parameters in the places of the module's own, for the time of its forward."""
        self.called = True
        if self.name and not self.mode.frames:
            self.mode.count_step(self.name)
        began = (False, None) if torch.compiler.is_compiling() else (torch.is_grad_enabled(), region())
        self.mode.begin(Frame(self, module, *began))
        if self.outputs == OF_WEIGHT or not module._parameters:
            return
        with torch._C.DisableTorchFunction():
            self._round_parameters(module)

    def _round_parameters(self, module: nn.Module) -> None:
        if "weight_gradient" in self.sites:
            self.watch(module)
            if getattr(module, "sparse", False):
                self.skipped["weight gradient"] = "it is sparse"
        kept = dict(module._parameters)
        self._kept.append(kept)
        computed = _computed(module)
        for name, parameter in kept.items():
            if parameter is not None and not any(name.startswith(f"{base}_") for base in computed):
                rounded: Any = self.tied.get(name, self)._cast(parameter, OF_WEIGHT, name)
                module._parameters[name] = rounded
        for name in computed:
            setattr(module, name, self._cast(getattr(module, name), OF_WEIGHT, name))
        refresh(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the parameters back, also after an exception, and round the outputs."""
        self.restore(module)
        with torch._C.DisableTorchFunction():
            roles, last, self._last = self.outputs, self._last, None
            if roles is None or output is None or not self.rounds(roles):
                return output
            return map_tensors(
                lambda x: x if _is(x, last) else self._cast(x, roles, "output"), output, self._unopened
            )

    def restore(self, module: nn.Module) -> None:
        """The module's forward ends: put its own parameters back."""
        if self.mode.elsewhere():
            return
        self.mode.end(self)
        if self._kept:
            module._parameters.update(self._kept.pop())
            refresh(module)

    def _unopened(self, leaf: Any) -> None:
        if not isinstance(leaf, PLAIN):
            self.skipped["output"] = f"a {type(leaf).__name__} is not opened"

    def product(self, product: Product, function: Any, args: Any, kwargs: Any) -> Any:
        """A product that the module's forward computes, of rounded parameters, and rounded itself."""
        args, kwargs = self.read_rounded(args), {k: self._one(x) for k, x in kwargs.items()}
        result = multiply(product, function, args, kwargs, self.sites, self.sums, self.skipped)
        if not self.own_products or not isinstance(result, Tensor):
            return result
        rounded = self._cast(result, OF_MODULE, product.name)
        if isinstance(out := kwargs.get("out"), Tensor):
            return out.copy_(rounded)
        self._last = rounded, _version(rounded)
        return rounded

    def read_rounded(self, args: Any) -> tuple[Any, ...]:
        """The arguments of a function, parameters of other modules rounded as those modules'."""
        return tuple(type(x)(map(self._one, x)) if type(x) in (tuple, list) else self._one(x) for x in args)

    def _one(self, x: Any) -> Any:
        """A parameter of another module, rounded as that module's; anything else as it is."""
        if not isinstance(x, nn.Parameter):
            return x
        owner = self.mode.owner(x)
        if owner is None:
            return x
        owner.read = True
        return owner._cast(x, OF_WEIGHT, "weight")

    def like(self, module: nn.Module) -> ModuleHooks | None:
        """The hooks that the same emulation put on another module."""
        for hook in module._forward_pre_hooks.values():
            hooks = getattr(hook, "__self__", None)
            if isinstance(hooks, ModuleHooks) and hooks.mode is self.mode:
                return hooks
        return None

    def watch(self, module: nn.Module) -> None:
        """Round what accumulates in the gradients of the module's parameters."""
        for name, parameter in module._parameters.items():
            known = self._watched.get(name)
            if parameter is None or not parameter.requires_grad or (known and known[0] is parameter):
                continue
            if type(parameter) not in (Tensor, nn.Parameter):
                continue  # FSDP's shard: the whole that stands in its place in a forward is watched
            if torch.compiler.is_compiling() or not parameter.is_leaf or name in self.tied:
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

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters are others: it watches them from its first forward on.
        return self.__dict__ | {"_kept": [], "_watched": {}, "_last": None}


def refresh(module: nn.Module) -> None:
    """Let a recurrent layer, which reads its weights from a list of its own, see those in their places."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


def _computed(module: nn.Module) -> list[str]:
    """Weights that older hooks of torch, of pruning say, compute from parameters before each forward."""
    parameters = module._parameters
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor) and (f"{name}_orig" in parameters or f"{name}_v" in parameters)
    ]


def _version(x: Tensor) -> int:
    return -1 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _is(x: Tensor, last: tuple[Tensor, int] | None) -> bool:
    """Whether it is that tensor, and nothing was written to it since."""
    return last is not None and x is last[0] and _version(x) == last[1]


class RootHook:
    """Before each forward of the whole model: a new step's random words, and its inputs rounded."""

    def __init__(self, mode: Functional, inputs: Site | None) -> None:
        self.mode, self.inputs = mode, inputs
        self.called = False
        self.skipped: dict[str, str] = {}

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """As a forward pre-hook of the model."""
        if not torch.compiler.is_compiling():
            self.mode.leave_interrupted()
        self.called = True
        if not self.mode.frames:
            self.mode.count_step("")
        if self.inputs is None:
            return None
        return map_tensors(self._round, (args, kwargs), lambda leaf: None)

    def _round(self, x: Tensor) -> Tensor:
        reason = unsuitable(x)
        if reason is None:
            return cast_at(x, self.inputs, None)
        if reason:
            self.skipped["input"] = reason
        return x


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
