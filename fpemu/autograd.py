"""`cast`: rounding as a torch operator, straight through for the gradient.

The operators ``fpemu::round`` and ``fpemu::round_tally`` take everything but tensors in one string, and the
key as a tensor: an int would make torch.compile start over for every step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from . import stats
from .arrays import carrier_of
from .blocks import BlockFormat
from .formats import Format, as_format
from .kernels.layout import COUNTS, SUMS
from .kernels.rules import Plan, carried
from .quantize import in_blocks, round_tensor
from .quantizer import HISTORY, Quantizer, as_quantizer, quantizer_of
from .random import Key

LIBRARY = torch.library.Library("fpemu", "DEF")
LIBRARY.define("round(Tensor x, str spec, Tensor? key) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    "round_tally(Tensor x, str spec, Tensor? key, Tensor(a!) counts, Tensor(b!) sums) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _round(x: Tensor, spec: str, key: Tensor | None) -> Tensor:
    steps = _steps(spec, carrier_of(x).name)
    if steps is not None:
        return round_tensor(x, steps, _key(key))
    return _round_scaled(x, quantizer_of(spec), _key(key), None, None)


def _round_tally(x: Tensor, spec: str, key: Tensor | None, counts: Tensor, sums: Tensor) -> Tensor:
    quantizer, steps = quantizer_of(spec), _steps(spec, carrier_of(x).name)
    if steps is None:
        return _round_scaled(x, quantizer, _key(key), counts, sums)
    rounded = round_tensor(x, steps, _key(key))
    stats.add(counts, sums, x, rounded, quantizer.format)
    return rounded


@cache
def _steps(spec: str, carrier: str) -> Plan | None:
    """How to round, where that does not depend on the tensor's largest value."""
    quantizer = quantizer_of(spec)
    scaled = quantizer.scaling is not None or quantizer.in_blocks
    return None if scaled else quantizer.plan(carrier=as_format(carrier))


class _Straight(torch.autograd.Function):
    """`round_tally` for autograd: straight through."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fpemu.round_tally.default(*inputs)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None, None, None, None


def _round_tally_autograd(*inputs: Any) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # there _Cast has the gradient
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fpemu.round_tally.default(*inputs)
    return _Straight.apply(*inputs)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("round", _round, _device)
    LIBRARY.impl("round_tally", _round_tally, _device)
LIBRARY.impl("round_tally", _round_tally_autograd, "Autograd")
torch.library.register_autograd("fpemu::round", lambda ctx, gradient: (gradient, None, None), lib=LIBRARY)


@torch.library.register_fake("fpemu::round", lib=LIBRARY)
def _(x: Tensor, spec: str, key: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("fpemu::round_tally", lib=LIBRARY)
def _(x: Tensor, spec: str, key: Tensor | None, counts: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_vmap("fpemu::round", lib=LIBRARY)
def _(info: Any, in_dims: Any, x: Tensor, spec: str, key: Tensor | None) -> tuple[Tensor, int]:
    return _batched(torch.ops.fpemu.round, in_dims, x, spec, key), 0


@torch.library.register_vmap("fpemu::round_tally", lib=LIBRARY)
def _(
    info: Any, in_dims: Any, x: Tensor, spec: str, key: Any, counts: Tensor, sums: Tensor
) -> tuple[Tensor, int]:
    return _batched(torch.ops.fpemu.round_tally, in_dims, x, spec, key, counts, sums), 0


def _batched(operator: Any, in_dims: Any, x: Tensor, spec: str, key: Any, *counters: Tensor) -> Tensor:
    """A batch is one more dimension, for random words too; but each tensor has its own scale."""
    if in_dims[0] is None:
        x = x.expand(key.shape[in_dims[2]], *x.shape)
    else:
        x = x.movedim(in_dims[0], 0)
    keys = [key] * len(x) if key is None or in_dims[2] is None else key.movedim(in_dims[2], 0)
    quantizer = quantizer_of(spec)
    if len(x) and (quantizer.scaling is not None or quantizer.in_blocks or keys[0] is not key):
        return torch.stack([operator(one, spec, own, *counters) for one, own in zip(x, keys, strict=True)])
    return operator(x, spec, key, *counters)


def _round_scaled(
    x: Tensor, quantizer: Quantizer, key: Key | None, counts: Tensor | None, sums: Tensor | None
) -> Tensor:
    if quantizer.in_blocks:
        return _round_in_blocks(x, quantizer, key, counts, sums)
    if quantizer.scaling != "channel" or x.dim() <= max(1, quantizer.axis):
        amax = amax_of(x)
        if quantizer.scaling == "delayed" and sums is not None and len(sums) > SUMS:
            amax = _delayed(amax, sums[SUMS:])
        return round_by(amax, x, quantizer, key, counts, sums)
    channels = x.detach().movedim(quantizer.axis, 0).contiguous()
    rounded = torch.empty_like(channels)
    for number, channel in enumerate(channels):
        own = key and replace(key, offset=key.offset + number * channel.numel())
        rounded[number] = round_by(amax_of(channel), channel, quantizer, own, counts, sums)
    return torch.empty_like(x).copy_(rounded.movedim(0, quantizer.axis))


def _round_in_blocks(
    x: Tensor, quantizer: Quantizer, key: Key | None, counts: Tensor | None, sums: Tensor | None
) -> Tensor:
    how = quantizer.rounding, quantizer.overflow, key, quantizer.few
    rounded = in_blocks(x.detach(), quantizer.format, *how)
    if counts is not None:
        stats.add(counts, sums, x, rounded.values, None)
        stats.add_in_blocks(counts, x, rounded, quantizer.format)
    values: Tensor = rounded.values
    return values


def amax_of(x: Tensor) -> float:
    """Largest finite magnitude of a plain tensor; 0.0 if there is none."""
    return float(x.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _delayed(amax: float, history: Tensor) -> float:
    """The largest magnitude of earlier steps, or before there are any this one, which is noted."""
    earlier = float(history[1:].max())
    history[0].clamp_(min=amax)
    return earlier or amax


def round_by(
    amax: float,
    x: Tensor,
    quantizer: Quantizer,
    key: Key | None,
    counts: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """``x`` rounded as if scaled for this largest magnitude."""
    wide, fmt = _scaled(amax, x, quantizer.format)
    rounded = round_tensor(wide, quantizer.plan(fmt, carrier_of(wide)), key)
    if counts is not None:
        stats.add(counts, sums, wide, rounded, fmt)
    return rounded.to(x.dtype)


def _scaled(amax: float, x: Tensor, fmt: Format) -> tuple[Tensor, Format]:
    """The tensor, wide enough for the format that it is rounded to; that format.

    Scaling by a power of two is another bias, and so exact. Where the moved range leaves that of the dtype
    float64 holds it; what an element is rounded to always fits the dtype again.
    """
    if amax > 0:
        fmt = _shifted(fmt, math.frexp(amax)[1], amax)
    try:
        carried(fmt, carrier_of(x))
    except ValueError:
        return x.double(), fmt
    return x, fmt


@lru_cache(maxsize=4096)
def _shift(fmt: Format, exponent: int, fits: bool) -> Format:
    # How far the range moves down. Only to where float64 can follow: float64 tensors of the very largest or
    # smallest numbers meet that end.
    down = math.frexp(fmt.max)[1] - exponent - (not fits)
    lowest = fmt.emin - (fmt.precision - 1 if fmt.subnormal else 0)
    down = max(min(down, lowest + 1074, fmt.emin + 1022), fmt.emax - 1023)
    return replace(fmt, bias=fmt.bias + down)


def _shifted(fmt: Format, exponent: int, amax: float) -> Format:
    fits = math.ldexp(amax, -exponent) <= math.ldexp(fmt.max, -math.frexp(fmt.max)[1])
    return _shift(fmt, exponent, fits)


def key_tensor(key: Key) -> Tensor:
    """A key as the operators take it: int64 (seed, stream, step, offset)."""
    with torch.inference_mode(False):
        return torch.tensor([key.seed, key.stream, key.step, key.offset])


def _key(key: Tensor | None) -> Key | None:
    return None if key is None else Key(*key.tolist())


def new_tally(quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Counts and sums for ``round_tally``, all zero; for delayed scaling, sums and a history after them."""
    more = 1 + HISTORY if quantizer.scaling == "delayed" else 0  # largest magnitudes, this step's first
    with torch.inference_mode(False):
        return torch.zeros(COUNTS, dtype=torch.int64), torch.zeros(SUMS + more, dtype=torch.float64)


class _Cast(torch.autograd.Function):
    """Round on the way forward, and the gradient on the way back; each with its key and its tally, or None.

    The result is always a new tensor: a view of the input would break on an in-place module after it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, forward, key, counts, sums, backward, *gradient):  # type: ignore[no-untyped-def]
        return _apply(x, forward, key, counts, sums)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, _, _, _, _, ctx.backward_spec, *ctx.gradient = inputs

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        # Straight through: the derivative of rounding is taken as one, here and where this is differentiated.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rounded = round_with_gradient(gradient, ctx.backward_spec, *ctx.gradient, None, None, None, None)
        else:
            rounded = _apply(gradient, ctx.backward_spec, *ctx.gradient)
        return rounded, *[None] * 8


class _EagerCast(torch.autograd.Function):
    """`_Cast` for plain eager calls: without ``setup_context`` apply() costs a third; functorch needs it."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        _Cast.setup_context(ctx, inputs, None)
        return _apply(*inputs[:5])

    backward = _Cast.backward


def round_with_gradient(*inputs: Any) -> Tensor:
    """`_Cast` of its nine inputs: a tensor, then spec, key, counts, sums forward, and the same backward."""
    if torch.compiler.is_compiling() and not (torch.is_grad_enabled() and inputs[0].requires_grad):
        # No Function is needed, and torch.compile would pass _Cast.forward a context, which it does not take.
        return _apply(*inputs[:5])
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _Cast.apply(*inputs)
    return _EagerCast.apply(*inputs)


def _apply(
    x: Tensor, spec: str | None, key: Tensor | None, counts: Tensor | None, sums: Tensor | None
) -> Tensor:
    if spec is None:
        return x.clone()
    if not torch.compiler.is_compiling():
        if x.layout != torch.strided:
            return x.clone()  # the sparse gradient of an embedding is left alone
        if type(x) in (Tensor, nn.Parameter) and not _seen():
            # Nothing looks on: spare the dispatcher, half the cost of a small call.
            if counts is None or sums is None:
                return _round(x, spec, key)
            return _round_tally(x, spec, key, counts, sums)
    if counts is None:
        return torch.ops.fpemu.round.default(x, spec, key)
    return torch.ops.fpemu.round_tally.default(x, spec, key, counts, sums)


def _seen() -> bool:
    """Whether a transform, a dispatch mode, the profiler or a tracer wants to see the operator."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def cast(
    x: Tensor,
    forward: str | Format | BlockFormat | Quantizer | None = None,
    backward: str | Format | BlockFormat | Quantizer | None = None,
    *,
    key: Key | None = None,
) -> Tensor:
    """``x`` rounded on the way forward, its gradient rounded on the way back.

    The derivative of rounding is taken as one (straight-through).

    Args:
        x: Tensor of float32, float64, float16 or bfloat16, any shape; integer and bool ones pass unchanged.
        forward: Format or BlockFormat of the value, or a Quantizer; None leaves it alone.
        backward: The same for the gradient.
        key: Random words of stochastic rounding; the gradient draws from ``key.fold_in("backward")``.

    Returns:
        Tensor of ``x``'s dtype, shape and memory format, always a new one.

    Raises:
        TypeError: a tensor of another dtype, or not a plain dense one.
        ValueError: an unknown name; stochastic rounding without ``key``; delayed scaling.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.3], requires_grad=True)
        >>> y = cast(x, forward="e4m3fn", backward="e5m2")
        >>> y.backward(torch.tensor([0.3]))
        >>> y.item(), x.grad.item()
        (0.3125, 0.3125)
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"cast needs a torch tensor, got {type(x).__name__}; quantize takes numpy arrays")
    specs = _spec(forward), _spec(backward)
    if not x.is_floating_point() and not x.is_complex():
        return x
    carrier_of(x)
    keys: list[Tensor | None] = [None, None]
    for place, spec in enumerate(specs):
        if spec is not None and spec.startswith("stochastic|"):
            if key is None:
                raise ValueError("rounding='stochastic' needs key=, for example key=fpemu.Key(0), got None")
            keys[place] = key_tensor(key.fold_in("backward") if place else key)
    return round_with_gradient(x, specs[0], keys[0], None, None, specs[1], keys[1], None, None)


@torch.compiler.assume_constant_result
def _spec(role: str | Format | BlockFormat | Quantizer | None) -> str | None:
    """What the operators take for a role; a constant for torch.compile, which cannot follow its making."""
    return _cached_spec(role)


@lru_cache(maxsize=1024)
def _cached_spec(role: str | Format | BlockFormat | Quantizer | None) -> str | None:
    quantizer = as_quantizer(role)
    if quantizer is not None and quantizer.scaling == "delayed":
        raise ValueError("scaling='delayed' needs the steps of an emulated model; cast has no memory")
    return None if quantizer is None else quantizer.spec
