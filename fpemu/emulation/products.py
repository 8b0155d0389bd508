"""Products with a format for each factor in each of the three products of training.

Forward a layer computes ``y = a w``; backward, from the gradient ``g`` of ``y``, it computes ``g w`` for the
gradient of ``a`` (dgrad) and ``g a`` for that of ``w`` (wgrad). Each of the six factors has a role.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..policy import OPERANDS
from .accumulated import accumulated, why_not
from .functional import PRODUCTS, Product
from .sites import Site, Sums, cast_at
from .tensors import unsuitable


def multiply(
    product: Product,
    function: Any,
    args: Any,
    kwargs: Any,
    sites: dict[str, Site],
    sums: Sums | None,
    skipped: dict[str, str],
) -> Any:
    """``function(*args, **kwargs)`` with its factors rounded for each product, where a role says so; its sums
    too.
    """
    operands = any(role in sites for role in OPERANDS)
    if not operands and sums is None:
        return function(*args, **kwargs)
    if product.name == "attention":
        return attention(*args, sites=sites, sums=sums, skipped=skipped, **kwargs)
    factors: list[Any] = []
    product.change(args, kwargs, lambda number, x: factors.append(x))
    found = [unsuitable(x) for x in factors]
    reasons = [reason for reason in found if reason is not None]
    if len(factors) != 2 or reasons:
        skipped[f"factors of {product.name}"] = reasons[0] if reasons else f"there are {len(factors)} of them"
        return function(*args, **kwargs)
    a, w = factors
    if sums is not None:
        function = _with_sums(product, function, a, w, sums, skipped)
    if not operands:
        return function(*args, **kwargs)
    return _product(_Call(product, function, args, kwargs), a, w, sites)


def _with_sums(
    product: Product, function: Any, a: Tensor, w: Tensor, sums: Sums, skipped: dict[str, str]
) -> Any:
    """What computes like ``function`` with its sums rounded, or it itself."""
    rounded = accumulated(function, sums)
    reason = why_not(a, w) if rounded is not None else "torch adds them up itself"
    if reason is None:
        return rounded
    skipped[f"sums of {product.name}"] = reason
    return function


class _Call:
    """A call with other factors in the places of its own."""

    def __init__(self, product: Product, function: Any, args: Any, kwargs: Any) -> None:
        self.product, self.function, self.args, self.kwargs = product, function, args, kwargs

    def __call__(self, a: Tensor, w: Tensor) -> Any:
        """The product of these; the rest of the call, a bias say, as it was."""
        args, kwargs = self.product.change(self.args, self.kwargs, lambda number, _: (a, w)[number])
        return self.function(*args, **kwargs)

    def has_rest(self, a: Tensor, w: Tensor) -> bool:
        """Whether a tensor of the call other than its factors, a bias say, gets a gradient."""
        for x in (*self.args, *self.kwargs.values()):
            if isinstance(x, Tensor) and x.requires_grad and x is not a and x is not w:
                return True
        return False

    def without_rest(self) -> _Call:
        """The same call, whose other tensors get no gradient."""
        args = tuple(_detached(x) for x in self.args)
        return _Call(self.product, self.function, args, {k: _detached(x) for k, x in self.kwargs.items()})


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _product(call: _Call, a: Tensor, w: Tensor, sites: dict[str, Site]) -> Any:
    forward = cast_at(a, sites.get("forward_a"), None), cast_at(w, sites.get("forward_w"), None)
    if _same(sites, "forward_a", "wgrad_a") and _same(sites, "forward_w", "dgrad_w"):
        if _same(sites, "dgrad_g", "wgrad_g") and not ("dgrad_g" in sites and call.has_rest(a, w)):
            return _gradient_cast(call(*forward), sites.get("dgrad_g"))
    # The value comes from one product, and the gradient of each factor is that of a product of its own.
    value = call(*(x.detach() for x in forward))
    if not torch.is_grad_enabled():
        return value
    branches = [value]
    rest = call.without_rest()
    if a.requires_grad:
        fixed = cast_at(w.detach(), sites.get("dgrad_w"), None)
        branches.append(_gradient_cast(rest(a, fixed), sites.get("dgrad_g")))
    if w.requires_grad:
        fixed = cast_at(a.detach(), sites.get("wgrad_a"), None)
        branches.append(_gradient_cast(rest(fixed, w), sites.get("wgrad_g")))
    return _First.apply(*branches)


def _gradient_cast(y: Tensor, site: Site | None) -> Tensor:
    return cast_at(y, None, site) if unsuitable(y) is None else y  # autocast makes half of it


def _same(sites: dict[str, Site], *roles: str) -> bool:
    first, second = (sites.get(role) for role in roles)
    if first is None or second is None:
        return first is second
    return first.quantizer == second.quantizer


class _First(torch.autograd.Function):
    """The value of the first of several tensors, the gradient to all of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*branches):  # type: ignore[no-untyped-def]
        return branches[0].clone()

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return (gradient,) * ctx.count


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sites: dict[str, Site],
    sums: Sums | None,
    skipped: dict[str, str],
) -> Tensor:
    """F.scaled_dot_product_attention as its definition has it, its two products with formats of their own."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    matmul = PRODUCTS[torch.matmul]
    factors = query * factor, key.transpose(-2, -1)
    scores = multiply(matmul, torch.matmul, factors, {}, sites, sums, skipped)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = F.dropout(
        torch.ops.aten._safe_softmax.default(scores, -1), dropout_p
    )  # rows that are masked altogether give 0
    return multiply(matmul, torch.matmul, (weights, value), {}, sites, sums, skipped)
