"""Matrix products that a module computes itself: F.linear, convolutions, @, einsum, attention.

Hooks see modules only. While a module's forward runs, a TorchFunctionMode sees the functions it calls. The
mode is entered by the outermost module's hook and left by it, so nothing outside the model runs under it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .recompute import remember
from .sites import Site, Sums


class Product(NamedTuple):
    """The arguments of a function that it multiplies: their names, from which place on; what it goes by."""

    name: str
    names: tuple[str, ...]
    first: int = 0

    def change(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The arguments with ``change(number, factor)`` for each factor."""
        if self.name == "einsum":
            return _change_einsum(args, change), kwargs
        changed, named = list(args), dict(kwargs)
        for number, name in enumerate(self.names):
            place = self.first + number
            if place < len(changed):
                changed[place] = change(number, changed[place])
            elif name in named:
                named[name] = change(number, named[name])
        return tuple(changed), named


def _change_einsum(args: tuple[Any, ...], change: Any) -> tuple[Any, ...]:
    if len(args) == 2 and isinstance(args[1], (list, tuple)):
        return args[0], [change(number, x) for number, x in enumerate(args[1])]
    return args[0], *(change(number, x) for number, x in enumerate(args[1:]))


def _products() -> dict[Any, Product]:
    table: dict[Any, Product] = {torch.einsum: Product("einsum", ())}

    def add(name: str, names: str, first: int, *functions: Any) -> None:
        for function in functions:
            table[function] = Product(name, tuple(names.split()), first)

    add("linear", "input weight", 0, F.linear)
    add("bilinear", "input1 input2 weight", 0, F.bilinear)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        add(name, "input weight", 0, getattr(F, name), getattr(torch, name))
    method = Tensor
    add("matmul", "input other", 0, torch.matmul, method.matmul, method.__matmul__, torch.linalg.matmul)
    add("matmul", "other input", 0, method.__rmatmul__)
    add("mm", "input mat2", 0, torch.mm, method.mm)
    add("bmm", "input mat2", 0, torch.bmm, method.bmm)
    add("mv", "input vec", 0, torch.mv, method.mv)
    add("addmm", "mat1 mat2", 1, torch.addmm, method.addmm)
    add("addmv", "mat vec", 1, torch.addmv, method.addmv)
    add("baddbmm", "batch1 batch2", 1, torch.baddbmm, method.baddbmm)
    add("addbmm", "batch1 batch2", 1, torch.addbmm, method.addbmm)
    add("dot", "input tensor", 0, torch.dot, method.dot)
    add("inner", "input other", 0, torch.inner, method.inner)
    add("tensordot", "a b", 0, torch.tensordot)
    add("attention", "query key value", 0, F.scaled_dot_product_attention)
    return table


PRODUCTS = _products()
FUSED = ("attention",)

# Their result holds numbers of a parameter, moved: what another module's parameter is read through.
READS = {
    Tensor.T.__get__,  # type: ignore[attr-defined]
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.__getitem__,
    F.embedding,
    *(
        getattr(owner, name)
        for name in "t transpose permute reshape unsqueeze squeeze flatten chunk split unbind".split()
        for owner in (Tensor, torch)
    ),
    *(getattr(Tensor, name) for name in "view expand contiguous".split()),
}


def _opened(function: types.FunctionType) -> types.FunctionType:
    """A function of torch.nn.functional that does not ask for overrides of itself, only its parts do."""
    scope = {**function.__globals__, "has_torch_function": lambda arguments: False}
    opened = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


# Written in Python out of products: a mode that is asked about the whole sees no part of it.
COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward)  # type: ignore[arg-type]
}


class Hooks(Protocol):
    """What a module's hooks do here."""

    name: str

    def before(self, module: nn.Module, args: Any) -> None:
        """As the module's forward begins."""

    def restore(self, module: nn.Module) -> None:
        """As it ends."""

    def product(self, product: Product, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of a product that the module's forward computes."""

    def read_rounded(self, args: Any) -> tuple[Any, ...]:
        """The arguments, parameters of other modules rounded."""

    def like(self, module: nn.Module) -> Hooks | None:
        """The hooks of another module."""


THREADS = "an emulated model runs in two threads at once; make a copy for each thread"


class Frame(NamedTuple):
    """A module whose forward runs, its hooks, and what was so when it began."""

    hooks: Hooks
    module: nn.Module
    grad: bool
    region: Any


class Functional(TorchFunctionMode):
    """Sees the functions that emulated modules call; ``frames`` are those now running, innermost last."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.sites: list[Site | Sums] = []  # that a new step changes
        self._begun: list[str] = []  # the outermost modules whose forwards ran in this step
        self._thread = 0
        self._caller: Any = None  # the Python frame that runs the outermost forward
        self.fused: str | None = None  # the product that runs now, if torch may compute several in it

    def begin(self, frame: Frame) -> None:
        """A module's forward begins."""
        if not self.frames:
            self.__enter__()
            if not torch.compiler.is_compiling():
                self._caller, self._thread = sys._getframe(2), threading.get_ident()
        elif self.elsewhere():
            raise RuntimeError(THREADS)
        self.frames.append(frame)

    def count_step(self, name: str) -> None:
        """A forward of an outermost module begins: if it is not its first, a new step does.

        A recomputation within a backward pass belongs to the step of its forward.
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        if name in self._begun:
            self._begun.clear()
            for site in self.sites:
                site.next_step()
        self._begun.append(name)

    def elsewhere(self) -> bool:
        """Whether a forward runs in another thread."""
        if torch.compiler.is_compiling() or not self.frames:
            return False
        return self._thread != threading.get_ident()

    def end(self, hooks: Hooks) -> None:
        """It ends; of a forward that did not begin, as its pre-hooks failed, nothing happens."""
        if self.frames and self.frames[-1].hooks is hooks:
            self.frames.pop()
            if not self.frames:
                self._caller = None
                self.__exit__(None, None, None)

    def leave(self) -> None:
        """End all forwards."""
        if self.frames:
            self.frames.clear()
            self._caller = None
            self.__exit__(None, None, None)

    def leave_interrupted(self) -> None:
        """End forwards that an interrupt, for which torch calls no hooks, broke off."""
        if self.elsewhere():
            raise RuntimeError(THREADS)
        running: Any = sys._getframe(1) if self.frames else None
        while running is not None and running is not self._caller:
            running = running.f_back
        if running is None:
            self.leave()

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """As torch calls it, with itself out of the way."""
        kwargs = {} if kwargs is None else kwargs
        if function in COMPOSITES:
            with self:
                return COMPOSITES[function](*args, **kwargs)
        if function is Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(args[0], args[1], args[2:] if len(args) > 3 else args[2])
        if not self.frames or (function not in PRODUCTS and function not in READS):
            return function(*args, **kwargs)
        if function in READS:
            return function(*self.frames[-1].hooks.read_rounded(args), **kwargs)
        if not torch.compiler.is_compiling():
            remember(self)
        product = PRODUCTS[function]
        self.fused = product.name if product.name in FUSED else None
        try:
            return self.frames[-1].hooks.product(product, function, args, kwargs)
        finally:
            self.fused = None

    def running(self) -> tuple[str, str | None]:
        """The module whose forward runs, and what torch computes in one there: attention, or a layer."""
        frame = self.frames[-1]
        return frame.hooks.name, type(frame.module).__name__ if isinstance(
            frame.module, nn.RNNBase
        ) else self.fused

    def owner(self, parameter: nn.Parameter) -> Any:
        """The hooks of the module, within one that runs now, that has the parameter."""
        for frame in reversed(self.frames):
            for module in frame.module.modules():
                if any(known is parameter for known in module._parameters.values()):
                    return frame.hooks.like(module)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"frames": [], "_caller": None}
