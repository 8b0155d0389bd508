"""Convolutions as matrix products that are rounded as they accumulate: forward and both gradients.

The windows of the input, unfolded, are the rows of the left factor: terms run through the channels, and
within a channel through the kernel. The gradient of the input is such a convolution again, of the output's
gradient spread by the stride with the flipped kernel; that of the weight sums over the windows of all images,
row by row. Unfolded are a few images, or channels, at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..accumulation import needs_function

TILE = 1 << 22  # numbers that are unfolded at a time, more only if one image or channel has more


class Geometry(NamedTuple):
    """Of a convolution: for each dimension its stride, what is padded before and after, its dilation."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    how: str,
    key: Tensor | None,
) -> Tensor:
    """F.conv1d, conv2d or conv3d, rounded by ``how``, an Accumulator's spec; the bias is added after."""
    dimensions = weight.dim() - 2
    if x.dim() == dimensions + 1:
        return convolve(x[None], weight, bias, stride, padding, dilation, groups, how=how, key=key)[0]
    strides, dilations = _each(stride, dimensions), _each(dilation, dimensions)
    geometry = Geometry(strides, _padding(padding, weight, dilations), dilations, groups)
    apply = _Convolution.apply if needs_function(x, weight) else _Convolution.forward
    y = apply(x, weight, geometry, how, key)
    return y if bias is None else y + bias.reshape(-1, *[1] * dimensions)


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    several = (value,) if isinstance(value, int) else tuple(value)
    return several * dimensions if len(several) == 1 else several


def _padding(padding: Any, weight: Tensor, dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        padding = 0
    if padding != "same":
        return tuple((p, p) for p in _each(padding, weight.dim() - 2))
    spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    return tuple((span // 2, span - span // 2) for span in spans)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, geometry, how, key):  # type: ignore[no-untyped-def]
        return _correlate(_padded(x, geometry.padding), weight, geometry, how, key, "forward")

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x, weight, ctx.geometry, ctx.how, key = inputs
        ctx.save_for_backward(x, weight, key)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight, key = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _input_gradient(gradient, x.shape[2:], weight, ctx.geometry, ctx.how, key)
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(gradient, x, weight.shape, ctx.geometry, ctx.how, key)
        return of_x, of_weight, None, None, None


def _padded(x: Tensor, padding: tuple[tuple[int, int], ...]) -> Tensor:
    return F.pad(x, [p for pair in reversed(padding) for p in pair])


def _windows(x: Tensor, kernel: tuple[int, ...], geometry: Geometry) -> Tensor:
    """A view (images, channels, places ..., kernel ...) of a padded input."""
    for i, (k, s, d) in enumerate(zip(kernel, geometry.stride, geometry.dilation, strict=True)):
        x = x.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
    return x


def _correlate(
    x: Tensor, weight: Tensor, geometry: Geometry, how: str, key: Tensor | None, fold: str
) -> Tensor:
    """The convolution of an input that is padded already."""
    kernel, groups = tuple(weight.shape[2:]), geometry.groups
    n, outputs, inputs = len(kernel), weight.shape[0] // groups, weight.shape[1]
    windows = _windows(x, kernel, geometry)
    images, places = x.shape[0], tuple(windows.shape[2 : 2 + n])
    count, terms = math.prod(places), inputs * math.prod(kernel)
    results = x.new_empty(groups, images, count, outputs)
    step = max(1, TILE // max(1, count * terms))
    order = (0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n))
    for group in range(groups):
        part = windows[:, group * inputs : (group + 1) * inputs].permute(order)
        columns = weight[group * outputs : (group + 1) * outputs].reshape(outputs, terms).mT
        for i in range(0, images, step):
            rows = part[i : i + step].reshape(-1, terms)
            offset = (group * images + i) * count * outputs
            summed = torch.ops.fpemu.matmul.default(rows, columns, how, key, fold, offset)
            results[group, i : i + step] = summed.reshape(-1, count, outputs)
    return results.permute(1, 0, 3, 2).reshape(images, groups * outputs, *places)


def _input_gradient(
    gradient: Tensor, size: Any, weight: Tensor, geometry: Geometry, how: str, key: Tensor | None
) -> Tensor:
    groups, kernel = geometry.groups, weight.shape[2:]
    spread, padding = gradient, []
    for i, (s, d, k, (before, after)) in enumerate(
        zip(geometry.stride, geometry.dilation, kernel, geometry.padding, strict=True)
    ):
        spread = _spread(spread, 2 + i, s)
        span = d * (k - 1)
        left_out = size[i] + before + after - span - spread.shape[2 + i]  # by a stride that does not fit
        padding.append((span - before, span - after + left_out))
    # (groups, outputs, inputs, kernel ...) becomes (groups * inputs, outputs, kernel ...), flipped.
    parts = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    flipped = parts.flip(tuple(range(3, parts.dim()))).reshape(-1, parts.shape[2], *kernel)
    plain = Geometry((1,) * len(kernel), geometry.padding, geometry.dilation, groups)
    return _correlate(_padded(spread, tuple(padding)), flipped, plain, how, key, "forward dgrad")


def _spread(x: Tensor, dimension: int, stride: int) -> Tensor:
    """With ``stride - 1`` zeros between neighbours."""
    if stride == 1:
        return x
    shape = list(x.shape)
    shape[dimension] = (shape[dimension] - 1) * stride + 1
    wide = x.new_zeros(shape)
    wide[(slice(None),) * dimension + (slice(None, None, stride),)] = x
    return wide


def _weight_gradient(
    gradient: Tensor, x: Tensor, shape: Any, geometry: Geometry, how: str, key: Tensor | None
) -> Tensor:
    groups, inputs, kernel = geometry.groups, shape[1], tuple(shape[2:])
    n, size = len(kernel), math.prod(kernel)
    windows = _windows(_padded(x, geometry.padding), kernel, geometry)
    outputs, terms = shape[0] // groups, gradient.shape[0] * math.prod(gradient.shape[2:])
    results = x.new_empty(groups, inputs * size, outputs)
    step = max(1, TILE // max(1, terms * size))
    order = (1, *range(2 + n, 2 + 2 * n), 0, *range(2, 2 + n))
    for group in range(groups):
        part = gradient[:, group * outputs : (group + 1) * outputs]
        columns = part.transpose(0, 1).reshape(outputs, terms).mT
        for c in range(0, inputs, step):
            last = min(inputs, c + step)
            channels = windows[:, group * inputs + c : group * inputs + last]
            rows = channels.permute(order).reshape((last - c) * size, terms)
            offset = (group * inputs + c) * size * outputs
            summed = torch.ops.fpemu.matmul.default(rows, columns, how, key, "forward wgrad", offset)
            results[group, c * size : last * size] = summed
    return results.mT.reshape(shape)
