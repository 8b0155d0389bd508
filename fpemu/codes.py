"""Codes: the bit patterns of a format, to and from values, and packed into bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .arrays import as_array, carrier_of, is_tensor
from .formats import BINARY32, BINARY64, Format, as_format
from .kernels import launch
from .kernels.rules import carried
from .quantize import planned, quantize
from .random import Key


def encode(
    x: Any,
    fmt: str | Format,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    key: Key | None = None,
    random_bits: int | None = None,
    variant: str = "C",
    flush_subnormals: bool = False,
) -> Any:
    """The codes of ``fmt`` that the elements of ``x`` round to.

    NaN becomes the quiet NaN of its sign; in a format without NaN, the code of -0.0, as in ml_dtypes.

    Args:
        x: As for ``quantize``, like the arguments that follow ``fmt``.
        fmt: Format of up to 32 bits, or its name.

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
    x = as_array(x)
    carrier = carrier_of(x)
    if carried(fmt, carrier) != fmt:
        # The format holds more than the dtype: its codes are those of float32, or float64, values.
        x, carrier = _widened(x, fmt)
    steps = planned(fmt, rounding, overflow, carrier)
    rounded: Any = quantize(
        x,
        fmt,
        rounding,
        overflow=overflow,
        key=key,
        random_bits=random_bits,
        variant=variant,
        flush_subnormals=flush_subnormals,
    )
    like = launch.code_like(fmt)
    if isinstance(rounded, np.ndarray):
        work = np.ascontiguousarray(rounded, f"f{steps.words.itemsize}").reshape(rounded.shape)
        codes = np.empty(rounded.shape, like.dtype)
        launch.encode_array(work.ctypes.data, codes.ctypes.data, codes.size, steps, like)
        return codes
    import torch

    wide = torch.float64 if steps.words.itemsize == 8 else torch.float32
    work = rounded.to(wide).contiguous()
    tensor = torch.empty(work.shape, dtype=getattr(torch, like.dtype.name), device=work.device)
    if work.is_cuda:
        from .kernels import device

        device.encode_tensor(work, tensor, steps)
    else:
        launch.encode_array(work.data_ptr(), tensor.data_ptr(), tensor.numel(), steps, like)
    return tensor


def _widened(x: Any, fmt: Format) -> tuple[Any, Format]:
    """``x`` in the smaller of float32 and float64 that holds ``fmt``, and that dtype's format."""
    for name, carrier in (("float32", BINARY32), ("float64", BINARY64)):
        try:
            fits = carried(fmt, carrier) == fmt
        except ValueError:
            continue
        if fits and is_tensor(x):
            import torch

            return x.to(getattr(torch, name)), carrier
        if fits:
            return x.astype(name), carrier
    raise ValueError(f"no dtype holds the values of {fmt.name}")


def decode(codes: Any, fmt: str | Format, dtype: str = "float32") -> Any:
    """The values that codes of ``fmt`` mean, exact.

    Args:
        codes: numpy array or torch tensor of an unsigned integer dtype, any shape. On a CUDA device, codes of
            a dtype wider than the format are checked, which waits for the device.
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
    if dtype == "float32" and carried(fmt) != fmt:
        raise ValueError(f"float32 cannot hold the values of {fmt.name}; use dtype='float64'")
    codes = as_array(codes)
    dtype_of_codes = str(getattr(codes, "dtype", type(codes).__name__)).removeprefix("torch.")
    if not (isinstance(codes, np.ndarray) or is_tensor(codes)) or not dtype_of_codes.startswith("uint"):
        raise TypeError(f"decode needs an array of unsigned integers, got {dtype_of_codes}")
    if is_tensor(codes):
        import torch

        if not codes.is_cuda or fmt.bits > 16:
            return torch.from_numpy(decode(codes.cpu().numpy(), fmt, dtype)).to(codes.device)
        codes = codes.long()
    if dtype_of_codes != f"uint{fmt.bits}" and 0 not in codes.shape and int(codes.max()) >> fmt.bits:
        raise ValueError(f"codes of {fmt.name} have {fmt.bits} bits, got {int(codes.max()):#x}")
    if is_tensor(codes):
        return torch.from_numpy(_table(fmt, dtype)).to(codes.device)[codes]
    values = _table(fmt, dtype)[codes] if fmt.bits <= 16 else _decode(codes, fmt).astype(dtype)
    return np.asarray(values)


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
    return value if fmt.nan_code is None else np.where(wide == fmt.nan_code, np.nan, value)


def pack(codes: Any, bits: int, *, first: str = "low") -> Any:
    """Codes of fewer than 8 bits, packed into bytes without gaps: row by row, along the last dimension.

    Args:
        codes: uint8 numpy array or torch CPU tensor of at least one dimension; each row is filled up with
            zero bits.
        bits: Width of a code, 1 to 8.
        first: Where in a byte element 0 lies: ``"low"`` (as in torch.float4_e2m1fn_x2), or ``"high"``.

    Returns:
        uint8 array of ``codes``' kind; the last dimension holds ``ceil(n * bits / 8)`` bytes.

    Raises:
        TypeError: ``codes`` is no uint8 array.
        ValueError: a code has more bits, ``bits`` or ``first`` is out of range, or there is no dimension.

    Example:
        >>> import numpy as np
        >>> codes = np.uint8([0x1, 0x2])
        >>> hex(pack(codes, 4)[0]), hex(pack(codes, 4, first="high")[0])
        ('0x21', '0x12')
    """
    if is_tensor(codes):
        import torch

        return torch.from_numpy(pack(codes.numpy(), bits, first=first))
    _check_bytes(codes, "codes", bits, first)
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"codes must have {bits} bits, got {int(codes.max()):#x}")
    order: Literal["little", "big"] = "little" if first == "low" else "big"
    places = np.unpackbits(codes[..., np.newaxis], axis=-1, bitorder=order)
    places = places[..., :bits] if first == "low" else places[..., 8 - bits :]
    return np.packbits(places.reshape(*codes.shape[:-1], -1), axis=-1, bitorder=order)


def unpack(data: Any, bits: int, count: int, *, first: str = "low") -> Any:
    """The codes that `pack` packed.

    Args:
        data: uint8 numpy array or torch CPU tensor whose last dimension holds packed codes.
        bits: Width of a code, 1 to 8.
        count: Codes a row.
        first: As for `pack`.

    Returns:
        uint8 array of ``data``'s kind, its last dimension ``count`` long.

    Raises:
        TypeError: ``data`` is no uint8 array.
        ValueError: a row holds fewer codes, or ``bits`` or ``first`` is out of range.

    Example:
        >>> import numpy as np
        >>> unpack(pack(np.uint8([1, 2, 3, 63]), 6), 6, 4).tolist()
        [1, 2, 3, 63]
    """
    if is_tensor(data):
        import torch

        return torch.from_numpy(unpack(data.numpy(), bits, count, first=first))
    _check_bytes(data, "data", bits, first)
    if not 0 <= count * bits <= 8 * data.shape[-1]:
        raise ValueError(f"a row of {data.shape[-1]} bytes does not hold {count} codes of {bits} bits")
    order: Literal["little", "big"] = "little" if first == "low" else "big"
    places = np.unpackbits(data, axis=-1, bitorder=order)[..., : count * bits]
    places = places.reshape(*data.shape[:-1], count, bits)
    if first == "high":
        places = np.concatenate([np.zeros((*places.shape[:-1], 8 - bits), np.uint8), places], axis=-1)
    return np.packbits(places, axis=-1, bitorder=order)[..., 0]


def _check_bytes(x: Any, name: str, bits: int, first: str) -> None:
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8:
        raise TypeError(f"{name} must be an array of uint8, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim == 0:
        raise ValueError(
            f"{name} must have at least one dimension, got a single number; use {name}.reshape(1)"
        )
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits must be an int from 1 to 8, got {bits!r}")
    if first not in ("low", "high"):
        raise ValueError(f"first must be 'low' or 'high', got {first!r}")
