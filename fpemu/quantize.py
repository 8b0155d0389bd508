"""Rounding of whole arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .arrays import as_array, carrier_of, is_tensor
from .blocks import BlockFormat, found
from .blockwise import Rounded, round_blocks
from .formats import BINARY32, BINARY64, OVERFLOWS, ROUNDINGS, Format, as_format
from .kernels import launch
from .kernels.block_rules import block_plan
from .kernels.rules import Plan, carried, plan
from .random import Key

Array = TypeVar("Array")
VARIANTS = ("A", "B", "C")
READ_ONLY = "out is read-only; give an array that can be written to"
MOST_BITS = 30  # of a word, so that a tie still shows in the bits below


def quantize(
    x: Array,
    fmt: str | Format | BlockFormat,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    key: Key | None = None,
    random_bits: int | None = None,
    variant: str = "C",
    flush_subnormals: bool = False,
    axis: int | tuple[int, ...] | None = None,
    out: Array | None = None,
) -> Array:
    """``x`` with every element rounded to a value of ``fmt``, once, still stored as ``x`` is.

    Args:
        x: numpy array or scalar or torch tensor, on the CPU or a CUDA device, of float32, float64, float16 or
            bfloat16, any shape and strides; or another library's array with ``__cuda_array_interface__``.
        fmt: Target format, or its name; one whose values ``x``'s dtype holds, or that holds all of the
            dtype's. Or a BlockFormat, or its name, ``"mxfp8"``: elements are then rounded in units of their
            block's scale, and a product that the dtype does not hold is rounded to it.
        rounding: ``"nearest_even"`` (IEEE 754 roundTiesToEven), ``"nearest_away"``, ``"toward_zero"``,
            ``"toward_positive"``, ``"toward_negative"``, ``"to_odd"``, or ``"stochastic"``: up with
            probability equal to the fraction dropped, to 32 bits.
        overflow: ``"ieee"``: what the mode and the format say, infinity, or NaN where there is none, or the
            largest finite value where there is neither. ``"saturate"``: the largest finite value, for
            infinities too. ``"propagate"``: finite values saturate, infinities stay. In a block format
            ``"ieee"`` is ``"propagate"``.
        key: Which random words ``"stochastic"`` draws. Element ``i``, counted row by row, draws word
            ``key.offset + i``, whatever the strides.
        random_bits: How many bits of its word an element draws, 1 to 30; None: all 32.
        variant: With ``random_bits``, how the dropped fraction is rounded to as many bits: ``"A"`` down,
            ``"B"`` to nearest with ties up, ``"C"`` to nearest with ties to even (StochasticA, B, C of IEEE
            P3109).
        flush_subnormals: Take elements below ``fmt.smallest_normal`` in magnitude for zero.
        axis: With a block format, the dimension along which blocks run, or several; None: the format's own.
        out: Array of ``x``'s kind, dtype and shape to write to; may be ``x`` itself.

    Returns:
        ``out``, or a new array of ``x``'s kind, dtype, shape and memory layout (a tensor for another
        library's CUDA array). A tensor comes back without gradient; ``cast`` is the differentiable form.

    Raises:
        TypeError: ``x`` or ``out`` is not such an array.
        ValueError: unknown format, rounding, overflow or variant; ``"stochastic"`` without ``key`` or
            another mode with one; ``out`` of another shape; a format that the dtype cannot hold; an
            ``axis`` that ``x`` does not have, or without a block format.

    Example:
        >>> import numpy as np
        >>> quantize(np.array([0.1, 65519, 65520, 1e-8], np.float32), "fp16").tolist()
        [0.0999755859375, 65504.0, inf, 0.0]
        >>> quantize(np.float32([464, 465]), "e4m3fn").tolist()
        [448.0, nan]
        >>> quantize(np.array([1 + 2**-11 + 2**-40]), "fp16").tolist()  # rounded once, from float64
        [1.0009765625]
        >>> x = np.full(4, 1.5, np.float32)
        >>> quantize(x, "e8m0", "toward_zero", out=x) is x, x.tolist()
        (True, [1.0, 1.0, 1.0, 1.0])
    """
    array, target = as_array(x), as_array(out)
    blocks = found(fmt)
    if blocks is not None:
        carrier_of(array)
        few = random_bits, variant, flush_subnormals
        values = in_blocks(array, blocks, rounding, overflow, key, few, axis, target).values
        return values if array is x or out is not None or is_tensor(array) else values[()]
    if axis is not None:
        raise ValueError(f"axis= is read by block formats only, got axis={axis!r} with {fmt}")
    steps = planned(fmt, rounding, overflow, carrier_of(array), random_bits, variant, flush_subnormals)
    check_key(rounding, key)
    if is_tensor(array):
        tensor = _quantize_torch(array, steps, key, target)
        return tensor if out is None else out
    result: Any = _quantize_numpy(array, steps, key, target)
    return result if array is x or out is not None else result[()]


def in_blocks(
    x: Any,
    fmt: BlockFormat,
    rounding: str = "nearest_even",
    overflow: str = "ieee",
    key: Key | None = None,
    few: tuple[int | None, str, bool] = (None, "C", False),
    axis: Any = None,
    out: Any = None,
    coded: bool = False,
) -> Rounded:
    """`quantize` to a block format of an array whose carrier was checked, with the scales that came of it."""
    planned(fmt.element, rounding, overflow, BINARY64, *few)
    check_key(rounding, key)
    if axis is not None:
        several = axis if isinstance(axis, tuple) else (axis,)
        if any(not isinstance(one, int) or not -x.ndim <= one < x.ndim for one in several):
            raise ValueError(f"axis must be of the {x.ndim} dimensions of x, got {axis!r}")
        fmt = fmt.along(axis)
    if out is not None:
        _check_out(x, out, np.ndarray if isinstance(x, np.ndarray) else _tensor_type())
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ValueError(READ_ONLY)
    rounded = round_blocks(x, fmt, block_plan(fmt, rounding, overflow, *few), key, out, coded)
    if out is not None and is_tensor(out):
        _written(out)
    return rounded


@lru_cache(maxsize=1024)
def _planned(
    fmt: str | Format,
    rounding: str,
    overflow: str,
    carrier: Format,
    random_bits: int | None,
    variant: str,
    flush_subnormals: bool,
) -> Plan:
    for name, given, known in (
        ("rounding", rounding, ROUNDINGS),
        ("overflow", overflow, OVERFLOWS),
        ("variant", variant, VARIANTS),
    ):
        if given not in known:
            raise ValueError(f"unknown {name} {given!r}; choose from {', '.join(known)}")
    if random_bits is not None:
        if not isinstance(random_bits, int) or not 1 <= random_bits <= MOST_BITS:
            raise ValueError(
                f"random_bits must be an int from 1 to {MOST_BITS}, or None for 32; got {random_bits!r}"
            )
        if rounding != "stochastic":
            raise ValueError(f"random_bits= is read by rounding='stochastic' only, got rounding={rounding!r}")
    fmt = carried(as_format(fmt), carrier)
    if not isinstance(flush_subnormals, bool):
        raise ValueError(f"flush_subnormals must be True or False, got {flush_subnormals!r}")
    # float16 and bfloat16 are widened to float32, which is exact.
    wide = BINARY64 if carrier == BINARY64 else BINARY32
    return plan(fmt, rounding, overflow, wide, random_bits, variant, flush_subnormals)


def planned(
    fmt: Any,
    rounding: str = "nearest_even",
    overflow: str = "ieee",
    carrier: Format = BINARY32,
    random_bits: int | None = None,
    variant: str = "C",
    flush_subnormals: bool = False,
) -> Plan:
    """The checked and planned form of the arguments that say how to round."""
    if not isinstance(fmt, (str, Format)):
        fmt = as_format(fmt)
    try:
        return _planned(fmt, rounding, overflow, carrier, random_bits, variant, flush_subnormals)
    except TypeError:  # not hashable
        raise TypeError(
            f"rounding, overflow and variant are names, got {rounding!r}, {overflow!r} and {variant!r}"
        ) from None


def check_key(rounding: str, key: Key | None) -> None:
    """Refuse stochastic rounding without a key, and a key that nothing would read."""
    if (rounding == "stochastic") != isinstance(key, Key):
        if rounding != "stochastic" and key is not None:
            raise ValueError(
                f"key= is read by rounding='stochastic' only, got rounding={rounding!r}; leave it out"
            )
        raise ValueError(f"rounding='stochastic' needs key=, for example key=fpemu.Key(0), got {key!r}")


def _quantize_numpy(
    x: npt.NDArray[Any], steps: Plan, key: Key | None, out: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    if out is None:
        out = np.empty_like(x, subok=False)
    elif out is not x:
        _check_out(x, out, np.ndarray)
    if not out.flags.writeable:
        raise ValueError(READ_ONLY)
    dense = x.flags.c_contiguous and out.flags.c_contiguous
    if not dense and key is None:
        # Any one order does for a mode without random words, as long as both arrays have it.
        dense = x.strides == out.strides == np.empty_like(x, subok=False).strides
    if out is not x and np.may_share_memory(x, out):
        dense = False
    if dense and x.itemsize == steps.words.itemsize and x.flags.aligned and out.flags.aligned:
        launch.round_array(x.ctypes.data, out.ctypes.data, x.size, steps, key)
        return out
    work = np.array(x, f"f{steps.words.itemsize}", order="C", subok=False)
    launch.round_array(work.ctypes.data, work.ctypes.data, work.size, steps, key)
    out[...] = work.astype(out.dtype, copy=False)
    return out


def _check_out(x: Any, out: Any, kind: Any) -> None:
    if not isinstance(out, kind):
        raise TypeError(f"out must be a {kind.__name__} like x, got {type(out).__name__}")
    carrier_of(out, "out")
    if out.dtype != x.dtype:
        raise TypeError(f"out must have x's dtype {x.dtype}, got {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")


def _quantize_torch(x: Any, steps: Plan, key: Key | None, out: Any) -> Any:
    import torch

    if out is not None:
        _check_out(x, out, torch.Tensor)
    result = round_tensor(x, steps, key, out)
    if out is not None:
        _written(out)
    return result


def _tensor_type() -> type:
    import torch

    return torch.Tensor


def _written(out: Any) -> None:
    """Tell autograd of what the loops wrote where it does not see it."""
    import torch

    torch.autograd.graph.increment_version(out)


def _overlap(a: Any, b: Any) -> bool:
    """Whether the memory from first to last element of two tensors has a byte in common."""
    if not a.numel() or not b.numel():
        return False
    ends = []
    for t in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        ends.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize))
    return bool(ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1])


def round_tensor(x: Any, steps: Plan, key: Key | None, out: Any = None) -> Any:
    """`quantize` of a tensor that has been checked, whether or not it requires grad."""
    import torch

    x = x.detach()
    result = torch.empty_like(x) if out is None else out
    same = out is not None and x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
    dense = x.is_contiguous() and result.is_contiguous()
    if not dense and key is None:
        dense = x.stride() == result.stride() == torch.empty_like(x).stride()
    if out is not None and not same and _overlap(x, out):
        dense = False  # another view of the same memory
    if dense and x.itemsize == steps.words.itemsize:
        _round_dense(x, result, steps, key)
        return result
    wide = torch.float64 if steps.words.itemsize == 8 else torch.float32
    work = x.to(wide, memory_format=torch.contiguous_format, copy=True)
    _round_dense(work, work, steps, key)
    result.detach().copy_(work)
    return result


def _round_dense(x: Any, out: Any, steps: Plan, key: Key | None) -> None:
    """Round a tensor of the carrier's dtype without gaps, element by element in the order of its memory."""
    if x.is_cuda:
        from .kernels import device

        # Whatever the strides, both lie in memory in one order and without gaps.
        flat, result = (t.as_strided((t.numel(),), (1,)) for t in (x, out.detach()))
        device.round_tensor(flat, result, steps, key)
    else:
        launch.round_array(x.data_ptr(), out.data_ptr(), x.numel(), steps, key)
