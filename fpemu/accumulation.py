"""`matmul` as a torch operator whose gradients are rounded as they accumulate too."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .autograd import LIBRARY, key_tensor
from .formats import Format
from .matmul import Accumulator
from .quantize import check_key
from .random import Key

LIBRARY.define(
    "matmul(Tensor a, Tensor b, str how, Tensor? key, str fold, int offset) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _matmul(a: Tensor, b: Tensor, how: str, key: Tensor | None, fold: str, offset: int) -> Tensor:
    own = None if key is None else replace(Key(*key.tolist()).fold_in(fold), offset=offset)
    return accumulator_of(how)(a, b, key=own)


LIBRARY.impl("matmul", _matmul, "CPU")


@torch.library.register_fake("fpemu::matmul", lib=LIBRARY)
def _(a: Tensor, b: Tensor, how: str, key: Tensor | None, fold: str, offset: int) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@lru_cache(maxsize=1024)
def spec_of(how: Accumulator) -> str:
    """All of an Accumulator in one string, for a torch operator's argument."""
    return json.dumps(asdict(how))


@cache
def accumulator_of(spec: str) -> Accumulator:
    """The Accumulator of which `spec_of` made this."""
    read: dict[str, Any] = {
        name: Format(**v) if isinstance(v, dict) else v for name, v in json.loads(spec).items()
    }
    return Accumulator(**read)


class _Product(torch.autograd.Function):
    """``a @ b`` of stacks of one shape; the gradients of both are such products again."""

    @staticmethod
    def forward(a, b, how, key, fold):  # type: ignore[no-untyped-def]
        return torch.ops.fpemu.matmul.default(a, b, how, key, fold, 0)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        a, b, ctx.how, key, ctx.fold = inputs
        ctx.save_for_backward(a, b, key)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        a, b, key = ctx.saved_tensors
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_a = _Product.apply(gradient, b.mT, ctx.how, key, f"{ctx.fold} dgrad")
        if ctx.needs_input_grad[1]:
            of_b = _Product.apply(a.mT, gradient, ctx.how, key, f"{ctx.fold} wgrad")
        return of_a, of_b, None, None, None


def needs_function(a: Tensor, b: Tensor) -> bool:
    """Whether a product goes through a Function; torch.compile passes one without gradient a context."""
    return not torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    )


def _product(a: Tensor, b: Tensor, how: str, key: Tensor | None) -> Tensor:
    apply = _Product.apply if needs_function(a, b) else _Product.forward
    return apply(a, b, how, key, "forward")


def multiply(a: Tensor, b: Tensor, how: str, key: Tensor | None) -> Tensor:
    """`product` of an Accumulator's spec, and a key as a tensor or None."""
    if b.dim() == 1:
        return multiply(a, b[:, None], how, key)[..., 0]
    if a.dim() == 1:
        return multiply(a[None], b, how, key)[..., 0, :]
    if b.dim() == 2:
        # One matrix, so that the gradient of b is one sum over all rows.
        rows = a.reshape(-1, a.shape[-1])
        return _product(rows, b, how, key).reshape(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    stacks = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    return _product(*stacks, how, key)


def product(a: Tensor, b: Tensor, how: Accumulator, *, key: Key | None = None) -> Tensor:
    """``a @ b``, rounded as it accumulates, forward and in both products of the backward pass.

    The gradient is that of the plain product, as if its rounding were not there (straight-through); where
    batches broadcast, gradients of the copies are added in the tensors' dtype.

    Args:
        a: CPU tensor of float32, float64, float16 or bfloat16, of one dimension or more.
        b: Of the same dtype; shapes go together as for ``torch.matmul``.
        how: How products and sums are rounded.
        key: Random words of stochastic rounding; each of the three products folds its name in.

    Returns:
        Tensor of that dtype.

    Raises:
        TypeError, ValueError: as `matmul`.

    Example:
        >>> w = torch.full((4096, 1), 1.0, requires_grad=True)
        >>> y = product(torch.ones(1, 4096), w, Accumulator("fp16"))
        >>> y.backward(torch.ones(1, 1))
        >>> y.item(), w.grad.mean().item()
        (2048.0, 1.0)
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise TypeError(f"product needs torch tensors, got {type(a).__name__} and {type(b).__name__}")
    if not isinstance(how, Accumulator):
        raise TypeError(f"how must be an Accumulator, for example Accumulator('fp16'), got {how!r}")
    check_key(how.rounding, key)
    return multiply(a, b, spec_of(how), None if key is None else key_tensor(key))


def as_accumulator(value: Any) -> Accumulator | None:
    """An Accumulator, that of a format, or None.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    return value if value is None or isinstance(value, Accumulator) else Accumulator(value)
