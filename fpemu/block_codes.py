"""Codes of block formats: of the elements, and of the scales that they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrays import as_array, carrier_of, is_tensor
from .blocks import BlockFormat, as_block_format
from .blockwise import layout
from .codes import decode, encode
from .quantize import in_blocks
from .random import Key


class Blocks(NamedTuple):
    """An array in a block format.

    Attributes:
        scales: Codes of the scales, one for each block: of the array's shape, but that a dimension along
            which blocks run counts blocks.
        codes: Codes of the elements, of the array's shape; ``pack`` puts those of fewer than 8 bits into
            bytes.
        tensor_scale: What all scales are multiplied by, a number of binary32; 1.0 where a format has none.
    """

    scales: Any
    codes: Any
    tensor_scale: float = 1.0


def encode_blocks(
    x: Any,
    fmt: str | BlockFormat,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    key: Key | None = None,
    axis: int | tuple[int, ...] | None = None,
) -> Blocks:
    """The codes of the scales and the elements that ``x`` rounds to in a block format.

    Args:
        x: As for ``quantize``, like the arguments that follow ``fmt``.
        fmt: Block format, or its name.

    Returns:
        Blocks of uint8 arrays, or as wide as the formats need, of ``x``'s kind. Where the scale of a block is
        NaN, its elements have the code of zero.

    Raises:
        TypeError, ValueError: as ``quantize``.

    Example:
        >>> import numpy as np
        >>> b = encode_blocks(np.float32([3, -0.5, 8, 1]), BlockFormat("mine", "e2m1", "e8m0", 2))
        >>> b.scales.tolist(), [hex(code) for code in b.codes.tolist()]
        ([126, 128], ['0x7', '0xa', '0x6', '0x1'])
    """
    fmt = as_block_format(fmt)
    x = as_array(x)
    carrier_of(x)
    tensor = is_tensor(x)
    if x.dtype.itemsize == 2:  # too narrow for elements of some formats
        x = x.float() if tensor else x.astype(np.float32)
    rounded = in_blocks(x, fmt, rounding, overflow, key, axis=axis, coded=True)
    spoiled = np.isnan(rounded.scales)
    elements: Any = rounded.values.detach().cpu().numpy() if tensor else rounded.values
    if spoiled.any():
        place = rounded.layout
        rows = place.split(elements.reshape(place.shape)).copy()
        rows[spoiled] = 0.0
        elements = place.join(rows).reshape(elements.shape)
    codes = _element_codes(np.asarray(elements, order="C"), fmt)
    scales = encode(rounded.layout.join_scales(rounded.scales), fmt.scale)
    if tensor:
        import torch

        on_device = [torch.from_numpy(part).to(x.device) for part in (scales, codes)]
        return Blocks(on_device[0], on_device[1], rounded.tensor_scale)
    return Blocks(scales, codes, rounded.tensor_scale)


def decode_blocks(
    blocks: Blocks,
    fmt: str | BlockFormat,
    dtype: str = "float32",
    *,
    axis: int | tuple[int, ...] | None = None,
) -> Any:
    """The values of codes that `encode_blocks` gave: elements times scales, rounded once to ``dtype``.

    Args:
        blocks: Blocks, or a tuple of scales, codes and, if there is one, the tensor scale.
        fmt: Block format, or its name.
        dtype: ``"float32"`` or ``"float64"``.
        axis: As it was for `encode_blocks`.

    Returns:
        Array of the codes' kind and shape.

    Raises:
        TypeError, ValueError: as ``decode``; scales of another shape than the blocks of the codes.

    Example:
        >>> import numpy as np
        >>> x = np.float32([3, -0.5, 8, 1])
        >>> decode_blocks(encode_blocks(x, "mxfp4"), "mxfp4").tolist()
        [3.0, -0.0, 8.0, 1.0]
    """
    fmt = as_block_format(fmt, axis)
    blocks = Blocks(*blocks)
    if is_tensor(blocks.codes):
        import torch

        plain = Blocks(blocks.scales.cpu().numpy(), blocks.codes.cpu().numpy(), blocks.tensor_scale)
        return torch.from_numpy(decode_blocks(plain, fmt, dtype)).to(blocks.codes.device)
    place = layout(blocks.codes.shape, fmt)
    if blocks.scales.shape != place.scales_shape:
        raise ValueError(
            f"codes of shape {blocks.codes.shape} have blocks of {fmt.name} of shape {place.scales_shape}, "
            f"got scales of shape {blocks.scales.shape}"
        )
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    if 0 in place.shape:
        return np.zeros(blocks.codes.shape, dtype)
    scales = place.split_scales(decode(blocks.scales, fmt.scale, "float64")) * blocks.tensor_scale
    rows = place.split(_element_values(blocks.codes, fmt).reshape(place.shape))
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite element times scale zero is NaN
        values = place.join(rows * scales[:, np.newaxis]).reshape(blocks.codes.shape).astype(dtype)
    return np.asarray(values, order="C")


def _element_codes(elements: npt.NDArray[Any], fmt: BlockFormat) -> npt.NDArray[Any]:
    codes: npt.NDArray[Any] = encode(elements, fmt.element)
    if not fmt.twos_complement:
        return codes
    sign = fmt.element.sign_code
    wide = codes.astype(np.int64)
    magnitude = wide & (sign - 1)
    return np.where(wide & sign, 2 * sign - magnitude, magnitude).astype(codes.dtype)


def _element_values(codes: npt.NDArray[Any], fmt: BlockFormat) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = decode(codes, fmt.element, "float64")
    if not fmt.twos_complement:
        return values
    wide = codes.astype(np.int64)
    return np.where(wide & fmt.element.sign_code, wide - 2 * fmt.element.sign_code, wide) * (
        fmt.element.smallest_subnormal
    )
