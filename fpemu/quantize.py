"""Rounding of whole arrays: quantize, encode, decode."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .formats import BINARY32, OVERFLOWS, ROUNDINGS, Format, as_format
from .kernels import launch
from .kernels.rules import Plan, carried, plan
from .random import Key

Array = TypeVar("Array")


def quantize(
    x: Array,
    fmt: str | Format,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    key: Key | None = None,
    out: Array | None = None,
) -> Array:
    """``x`` with every element rounded to a value of ``fmt``, still stored as float32.

    Args:
        x: float32 numpy array or torch CPU tensor, any shape and strides.
        fmt: Target format, or its name.
        rounding: ``"nearest_even"`` (IEEE 754 roundTiesToEven), ``"nearest_away"``, ``"toward_zero"``,
            ``"toward_positive"``, ``"toward_negative"``, ``"to_odd"``, or ``"stochastic"``: up with
            probability equal to the fraction dropped, to 32 bits.
        overflow: ``"ieee"``: what the mode and the format say, infinity, or NaN where there is none, or the
            largest finite value where there is neither. ``"saturate"``: the largest finite value, for
            infinities too. ``"propagate"``: finite values saturate, infinities stay.
        key: Which random words ``"stochastic"`` draws. Element ``i``, counted row by row, draws word
            ``key.offset + i``, whatever the strides.
        out: Array of ``x``'s kind, dtype and shape to write to; may be ``x`` itself.

    Returns:
        ``out``, or a new array of ``x``'s kind, shape and memory layout. A tensor comes back without
        gradient; ``cast`` is the differentiable form.

    Raises:
        TypeError: ``x`` or ``out`` is not such an array.
        ValueError: unknown format, rounding or overflow; ``"stochastic"`` without ``key`` or another mode
            with one; ``out`` of another shape; a format that float32 cannot hold.

    Example:
        >>> import numpy as np
        >>> quantize(np.array([0.1, 65519, 65520, 1e-8], np.float32), "fp16").tolist()
        [0.0999755859375, 65504.0, inf, 0.0]
        >>> quantize(np.float32([464, 465]), "e4m3fn").tolist()
        [448.0, nan]
        >>> x = np.full(4, 1.5, np.float32)
        >>> quantize(x, "e8m0", "toward_zero", out=x) is x, x.tolist()
        (True, [1.0, 1.0, 1.0, 1.0])
    """
    steps = planned(fmt, rounding, overflow)
    _check_key(rounding, key)
    if isinstance(x, np.ndarray):
        return _quantize_numpy(x, steps, key, out)  # type: ignore[return-value, arg-type]
    if is_tensor(x):
        return _quantize_torch(x, steps, key, out)
    raise TypeError(f"quantize needs a float32 numpy array or torch tensor, got {type(x).__name__}")


@lru_cache(maxsize=1024)
def _planned(fmt: str | Format, rounding: str, overflow: str) -> Plan:
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; choose from {', '.join(ROUNDINGS)}")
    if overflow not in OVERFLOWS:
        raise ValueError(f"unknown overflow {overflow!r}; choose from {', '.join(OVERFLOWS)}")
    return plan(as_format(fmt), rounding, overflow)


def planned(fmt: Any, rounding: str, overflow: str) -> Plan:
    """The checked and planned form of the arguments that say how to round."""
    if not isinstance(fmt, (str, Format)):
        fmt = as_format(fmt)
    try:
        return _planned(fmt, rounding, overflow)
    except TypeError:
        raise TypeError(f"rounding and overflow are names, got {rounding!r} and {overflow!r}") from None


def _check_key(rounding: str, key: Key | None) -> None:
    if (rounding == "stochastic") != isinstance(key, Key):
        if rounding != "stochastic" and key is not None:
            raise ValueError(
                f"key= is read by rounding='stochastic' only, got rounding={rounding!r}; leave it out"
            )
        raise ValueError(f"rounding='stochastic' needs key=, for example key=fpemu.Key(0), got {key!r}")


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _quantize_numpy(
    x: npt.NDArray[np.float32], steps: Plan, key: Key | None, out: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.float32]:
    check_numpy(x, "x")
    if out is None:
        out = np.empty_like(x, subok=False)
    elif out is not x:
        _check_out(x, out)
    dense = x.flags.c_contiguous and out.flags.c_contiguous
    if not dense and key is None:
        # Any one order does for a mode without random words, as long as both arrays have it.
        dense = x.strides == out.strides == np.empty_like(x, subok=False).strides
    if out is not x and np.may_share_memory(x, out):
        dense = False
    if dense and x.flags.aligned and out.flags.aligned:
        launch.round_array(x.ctypes.data, out.ctypes.data, x.size, steps, key)
        return out
    work = np.array(x, np.float32, order="C", subok=False)
    launch.round_array(work.ctypes.data, work.ctypes.data, work.size, steps, key)
    out[...] = work
    return out


def check_numpy(x: npt.NDArray[Any], name: str) -> None:
    """Refuse what is not native float32."""
    if x.dtype != np.float32 or isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be a float32 array in native byte order, got {type(x).__name__} of {x.dtype}; cast "
            f"first ({name}.astype('float32')), and mind that a cast down rounds once before fpemu does"
        )


def _check_out(x: npt.NDArray[np.float32], out: Any) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array like x, got {type(out).__name__}")
    check_numpy(out, "out")
    if out.shape != x.shape:
        raise ValueError(f"out must have x's shape {x.shape}, got {out.shape}")


def _quantize_torch(x: Any, steps: Plan, key: Key | None, out: Any) -> Any:
    import torch

    check_tensor(x, "x")
    if out is not None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a torch tensor like x, got {type(out).__name__}")
        check_tensor(out, "out")
        if out.shape != x.shape:
            raise ValueError(f"out must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")
    result = round_tensor(x, steps, key, out)
    if out is not None:
        torch.autograd.graph.increment_version(out)  # the loops write where autograd does not see it
    return result


def check_tensor(x: Any, name: str) -> None:
    """Refuse what is not a plain float32 CPU tensor."""
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{name} must be a plain torch tensor, got {type(x).__name__}; unwrap it first "
            "(a DTensor: to_local())"
        )
    if x.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got layout {x.layout}; round {name}.values() instead"
        )
    if x.dtype != torch.float32:
        raise TypeError(
            f"{name} must be float32, got {x.dtype}; cast first ({name}.float()), and mind that a cast down "
            "rounds once before fpemu does"
        )
    if x.device.type != "cpu":
        raise TypeError(
            f"{name} must be on the CPU, got a tensor on {x.device}; move it first ({name}.cpu())"
        )


def round_tensor(x: Any, steps: Plan, key: Key | None, out: Any = None) -> Any:
    """`quantize` of a tensor that has been checked, whether or not it requires grad."""
    import torch

    x = x.detach()
    result = torch.empty_like(x) if out is None else out
    same = out is not None and x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
    dense = x.is_contiguous() and result.is_contiguous()
    if not dense and key is None:
        dense = x.stride() == result.stride() == torch.empty_like(x).stride()
    if out is not None and not same and x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        dense = False  # another view of the same memory
    if dense:
        launch.round_array(x.data_ptr(), result.data_ptr(), x.numel(), steps, key)
        return result
    work = x.clone(memory_format=torch.contiguous_format)
    launch.round_array(work.data_ptr(), work.data_ptr(), work.numel(), steps, key)
    result.detach().copy_(work)
    return result


def encode(
    x: Array,
    fmt: str | Format,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    key: Key | None = None,
) -> Any:
    """The codes of ``fmt`` that the elements of ``x`` round to.

    NaN becomes the quiet NaN of its sign; in a format without NaN, the code of -0.0, as in ml_dtypes.

    Args:
        x: float32 numpy array or torch CPU tensor, any shape and strides.
        fmt: Format of up to 32 bits, or its name.
        rounding: As for ``quantize``, like ``overflow`` and ``key``.
        overflow: As for ``quantize``.
        key: As for ``quantize``.

    Returns:
        C-contiguous array of ``x``'s kind and shape in the smallest of uint8, uint16, uint32.

    Raises:
        TypeError, ValueError: as ``quantize``; a format of more than 32 bits.

    Example:
        >>> import numpy as np
        >>> [hex(code) for code in encode(np.float32([1, -0.0, 1e9]), "fp16").tolist()]
        ['0x3c00', '0x8000', '0x7c00']
    """
    fmt = as_format(fmt)
    if fmt.bits > 32:
        raise ValueError(f"encode needs a format of up to 32 bits, but {fmt.name} has {fmt.bits}")
    steps = planned(fmt, rounding, overflow)
    like = launch.code_like(fmt)
    rounded: Any = quantize(x, fmt, rounding, overflow=overflow, key=key)
    if isinstance(rounded, np.ndarray):
        rounded = np.ascontiguousarray(rounded).reshape(rounded.shape)
        codes = np.empty(rounded.shape, like.dtype)
        launch.encode_array(rounded.ctypes.data, codes.ctypes.data, codes.size, steps, like)
        return codes
    import torch

    rounded = rounded.contiguous()
    tensor = torch.empty(rounded.shape, dtype=getattr(torch, like.dtype.name))
    launch.encode_array(rounded.data_ptr(), tensor.data_ptr(), tensor.numel(), steps, like)
    return tensor


def decode(codes: Any, fmt: str | Format, dtype: str = "float32") -> Any:
    """The values that codes of ``fmt`` mean, exact.

    Args:
        codes: numpy array or torch CPU tensor of an unsigned integer dtype, any shape.
        fmt: Format of up to 32 bits, or its name.
        dtype: ``"float32"`` or ``"float64"``.

    Returns:
        Array of ``codes``' kind and shape.

    Raises:
        TypeError: ``codes`` is not such an array.
        ValueError: a code has more bits than the format, or ``dtype`` cannot hold its values.

    Example:
        >>> import numpy as np
        >>> decode(np.uint8([0x01, 0x38, 0x7E, 0x7F]), "e4m3fn").tolist()
        [0.001953125, 1.0, 448.0, nan]
    """
    fmt = as_format(fmt)
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    if fmt.bits > 32:
        raise ValueError(f"decode needs a format of up to 32 bits, but {fmt.name} has {fmt.bits}")
    if dtype == "float32" and carried(fmt) == BINARY32 != fmt and fmt.bits > BINARY32.bits:
        raise ValueError(f"float32 cannot hold the values of {fmt.name}; use dtype='float64'")
    if is_tensor(codes):
        import torch

        return torch.from_numpy(np.array(decode(codes.numpy(), fmt, dtype)))
    if not isinstance(codes, np.ndarray) or codes.dtype.kind != "u":
        raise TypeError(
            f"decode needs an array of unsigned integers, got {getattr(codes, 'dtype', type(codes))}"
        )
    if codes.dtype.itemsize * 8 > fmt.bits and codes.size and int(codes.max()) >> fmt.bits:
        raise ValueError(f"codes of {fmt.name} have {fmt.bits} bits, got {int(codes.max()):#x}")
    if fmt.bits <= 16:
        return _table(fmt, dtype)[codes]
    return _decode(codes, fmt).astype(dtype)


@lru_cache(maxsize=64)
def _table(fmt: Format, dtype: str) -> npt.NDArray[Any]:
    return _decode(np.arange(1 << fmt.bits, dtype=np.uint32), fmt).astype(dtype)


def _decode(codes: npt.NDArray[Any], fmt: Format) -> npt.NDArray[np.float64]:
    """The definition of a code (see Format), in float64, where every value of a format is exact."""
    wide = codes.astype(np.int64)
    magnitude = wide & ~fmt.sign_code
    field, fraction = np.divmod(magnitude, 1 << (fmt.precision - 1))
    normal = (field > 0) | (not fmt.has_zero)
    significand = np.where(normal, fraction + (1 << (fmt.precision - 1)), fraction * fmt.subnormal)
    lowest = 1 if fmt.has_zero else 0
    value = np.ldexp(significand.astype(np.float64), np.maximum(field, lowest) - fmt.bias - fmt.precision + 1)
    value = np.where(magnitude > fmt.max_code, np.nan, value)
    if fmt.infinity_code is not None:
        value = np.where(magnitude == fmt.infinity_code, np.inf, value)
    value = np.where((wide & fmt.sign_code) != 0, -value, value)
    return np.where(wide == fmt.nan_code, np.nan, value) if fmt.specials == "fnuz" else value
