"""Products with a format for each factor in each of the three products of training.

Forward a layer computes ``y = a w``; backward, from the gradient ``g`` of ``y``, it computes ``g w`` for the
gradient of ``a`` (dgrad) and ``g a`` for that of ``w`` (wgrad). Each of the six factors has a role. Blocks of
a block format run along the dimension that the product sums over.
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
    axes = contracted(call.product.name, a.dim(), w.dim())
    forward = _factor(a, "forward_a", sites, axes), _factor(w, "forward_w", sites, axes)
    if _same(sites, axes, "forward_a", "wgrad_a") and _same(sites, axes, "forward_w", "dgrad_w"):
        if _same(sites, axes, "dgrad_g", "wgrad_g") and not ("dgrad_g" in sites and call.has_rest(a, w)):
            return _gradient_cast(call(*forward), "dgrad_g", sites, axes)
    # The value comes from one product, and the gradient of each factor is that of a product of its own.
    value = call(*(x.detach() for x in forward))
    if not torch.is_grad_enabled():
        return value
    branches = [value]
    rest = call.without_rest()
    if a.requires_grad:
        fixed = _factor(w.detach(), "dgrad_w", sites, axes)
        branches.append(_gradient_cast(rest(a, fixed), "dgrad_g", sites, axes))
    if w.requires_grad:
        fixed = _factor(a.detach(), "wgrad_a", sites, axes)
        branches.append(_gradient_cast(rest(fixed, w), "wgrad_g", sites, axes))
    return _First.apply(*branches)


# Along which dimension blocks run: the one, or the first of those, that the product sums over. ROWS: all but
# the last, as one.
ROWS = "rows"
Axes = dict[str, Any]


def _axes(forward_a: Any, forward_w: Any, dgrad_g: Any, dgrad_w: Any, wgrad_g: Any, wgrad_a: Any) -> Axes:
    return dict(zip(OPERANDS, (forward_a, forward_w, dgrad_g, dgrad_w, wgrad_g, wgrad_a), strict=True))


def contracted(product: str, dim_a: int, dim_w: int) -> Axes:
    """By role, along which dimension the blocks of a factor run; empty where formats decide themselves."""
    if product in ("linear", "inner"):  # y[..., o] = a[..., i] w[o, i]
        return _axes(-1, -1, -1, 0, ROWS, ROWS)
    if product.startswith("conv"):  # a[n, i, ...], w[o, i, ...], transposed w[i, o, ...]: channels, batch
        i, o = (0, 1) if "transpose" in product else (1, 0)
        batch = 0 if dim_a == dim_w else -1
        return _axes(1 - dim_w, i, 1 - dim_w, o, batch, batch)
    if product in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "dot"):
        if dim_a < 2 or dim_w < 2:  # vectors have one dimension only
            return _axes(-1, max(-2, -dim_w), -1, -1, -1, max(-2, -dim_a))
        rows = ROWS if dim_w == 2 else -2  # one matrix for all rows of a, or one each
        return _axes(-1, -2, -1, -1, rows, rows)
    return {}


def _factor(x: Tensor, role: str, sites: dict[str, Site], axes: Axes) -> Tensor:
    """A factor rounded for the product of its role."""
    return _along(x, sites.get(role), None, axes.get(role))


def _gradient_cast(y: Tensor, role: str, sites: dict[str, Site], axes: Axes) -> Tensor:
    if unsuitable(y) is not None:  # autocast makes half of it
        return y
    return _along(y, None, sites.get(role), axes.get(role))


def _along(x: Tensor, forward: Site | None, backward: Site | None, axis: Any) -> Tensor:
    site = forward or backward
    if site is None or not site.quantizer.in_blocks:
        return cast_at(x, forward, backward)
    if axis == ROWS:
        return cast_at(x.reshape(-1, x.shape[-1]), forward, backward, 0).reshape(x.shape)
    return cast_at(x, forward, backward, axis)


def _same(sites: dict[str, Site], axes: Axes, *roles: str) -> bool:
    first, second = (sites.get(role) for role in roles)
    if first is None or second is None:
        return first is second
    if first.quantizer.in_blocks and axes.get(roles[0]) != axes.get(roles[1]):
        return False
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
