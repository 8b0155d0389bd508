"""Matrix products of torch with their sums rounded, by the function that computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..accumulation import multiply
from .convolve import convolve
from .sites import Sums

Multiply = Callable[[Tensor, Tensor], Tensor]


def accumulated(function: Any, sums: Sums) -> Callable[..., Any] | None:
    """What computes like ``function``, its sums rounded; None for a function that is not known here."""
    if function in CONVOLUTIONS:
        return partial(convolve, how=sums.spec, key=sums.key)
    if function not in PRODUCTS:
        return None

    def of_factors(a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b, sums.spec, sums.key)

    def compute(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        result: Tensor = PRODUCTS[function](of_factors, *args, **kwargs)
        return result if out is None else out.copy_(result)

    return compute


def why_not(a: Tensor, b: Tensor) -> str | None:
    """Why the sums of these factors are not rounded; None if they can be."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return "sums are rounded on the CPU only"
    return "autocast chooses the dtype" if torch.is_autocast_enabled("cpu") else None


def _linear(of: Multiply, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = of(input, weight.t())
    return y if bias is None else y + bias


def _matmul(of: Multiply, input: Tensor, other: Tensor) -> Tensor:
    return of(input, other)


def _mm(of: Multiply, input: Tensor, mat2: Tensor) -> Tensor:
    return of(input, mat2)


def _mv(of: Multiply, input: Tensor, vec: Tensor) -> Tensor:
    return of(input, vec)


def _dot(of: Multiply, input: Tensor, tensor: Tensor) -> Tensor:
    return of(input, tensor)


def _swapped(of: Multiply, other: Tensor, input: Tensor) -> Tensor:
    return of(input, other)


def _added(first: str, second: str) -> Callable[..., Tensor]:
    """addmm and its like, with the names of its two factors."""

    def compute(
        of: Multiply, input: Tensor, *args: Any, beta: Any = 1, alpha: Any = 1, **named: Any
    ) -> Tensor:
        a, b = (*args, *(named[name] for name in (first, second) if name in named))
        scaled = of(a, b) if alpha == 1 else alpha * of(a, b)
        return scaled if beta == 0 else (input if beta == 1 else beta * input) + scaled

    return compute


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    Tensor.__rmatmul__: _swapped,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul), _matmul),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), _mm),
    **dict.fromkeys((torch.mv, Tensor.mv), _mv),
    **dict.fromkeys((torch.dot, Tensor.dot), _dot),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _added("mat1", "mat2")),
    **dict.fromkeys((torch.addmv, Tensor.addmv), _added("mat", "vec")),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _added("batch1", "batch2")),
}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
