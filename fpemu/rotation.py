"""The random Hadamard transform: it spreads an outlier over its block before rounding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import as_array, carrier_of, is_tensor
from .kernels import launch
from .random import Key


def hadamard(x: Any, key: Key, *, size: int = 16, axis: int = -1, inverse: bool = False) -> Any:
    """``x`` with blocks along a dimension turned by random signs and an orthonormal Hadamard matrix.

    With the same key the sum over ``axis`` of the products of two arrays stays as it is, to rounding; so both
    factors of a matrix product may be turned along the dimension that it sums over.

    Args:
        x: Array as for ``quantize``; a tensor's gradient passes through.
        key: Which signs: the lowest bits of its first ``size`` words, the same in every block.
        size: Elements of a block, a power of two up to 1024 that divides the length of ``axis``.
        axis: The dimension.
        inverse: Turn back.

    Returns:
        New array of ``x``'s kind, dtype and shape.

    Raises:
        TypeError: ``x`` is no such array, or ``key`` no Key.
        ValueError: ``size`` is none of these, or ``x`` does not have the dimension.

    Example:
        >>> import numpy as np
        >>> hadamard(np.float32([0, 4, 0, 0]), Key(0), size=4).tolist()
        [-2.0, 2.0, -2.0, 2.0]
    """
    x = as_array(x)
    carrier_of(x)
    if not isinstance(key, Key):
        raise TypeError(f"hadamard needs a key, for example fpemu.Key(0), got {key!r}")
    if not isinstance(size, int) or not 1 <= size <= 1024 or size & (size - 1):
        raise ValueError(f"size must be a power of two up to 1024, got {size!r}")
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be of the {x.ndim} dimensions of x, got {axis!r}")
    if x.shape[axis] % size:
        raise ValueError(f"size={size} must divide the {x.shape[axis]} elements along axis {axis}")
    matrix: Any = _matrix(key, size)
    matrix = matrix.T if inverse else matrix
    if is_tensor(x):
        import torch

        moved = x.movedim(axis, -1)
        turned = moved.reshape(-1, size) @ torch.tensor(matrix, dtype=x.dtype, device=x.device)
        return turned.reshape(moved.shape).movedim(-1, axis)
    rows = np.moveaxis(x, axis, -1)
    turned = (rows.reshape(-1, size) @ matrix.astype(x.dtype)).astype(x.dtype, copy=False)
    return np.moveaxis(turned.reshape(rows.shape), -1, axis)


@lru_cache(maxsize=64)
def _matrix(key: Key, size: int) -> npt.NDArray[np.float64]:
    """Rows with random signs of Sylvester's matrix, over the root of its size."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = 1.0 - 2.0 * (launch.draw(size, key) & np.uint32(1))
    turned: npt.NDArray[np.float64] = signs[:, np.newaxis] * matrix / np.sqrt(size)
    turned.setflags(write=False)
    return turned
