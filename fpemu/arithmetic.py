"""What a numerical analyst asks of a format: spacing, neighbours, and sums rounded as they go."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import is_tensor
from .formats import BINARY64, Format, as_format
from .kernels import launch
from .quantize import check_key, planned, quantize
from .random import Key

ORDERS = ("sequential", "pairwise", "chunk")


def ulp(x: npt.ArrayLike, fmt: str | Format) -> npt.NDArray[np.float64]:
    """Distance between the neighbouring values of ``fmt`` around each ``x``: one unit in the last place.

    Args:
        x: Numbers that numpy takes, of any shape; their exponents count, as if ``fmt`` had no largest value.
        fmt: Format, or its name.

    Returns:
        float64 array of ``x``'s shape; NaN for infinities and NaNs.

    Example:
        >>> ulp([1.0, 1000.0, 0.0], "fp16").tolist() == [2.0**-10, 0.5, 2.0**-24]
        True
    """
    fmt = as_format(fmt)
    values = _float64(x)
    exponents = np.maximum(np.frexp(values)[1] - 1, fmt.emin)
    spacing = np.ldexp(1.0, exponents - fmt.precision + 1)
    spacing = np.where(np.abs(values) < fmt.smallest_normal, fmt.smallest_subnormal, spacing)
    return np.where(np.isfinite(values), spacing, np.nan)


def is_representable(x: npt.ArrayLike, fmt: str | Format) -> npt.NDArray[np.bool_]:
    """Whether each ``x`` is a value of ``fmt``, its infinities, NaN and -0.0 included where it has them.

    Args:
        x: Numbers that numpy takes, of any shape.
        fmt: Format, or its name.

    Returns:
        Array of bools of ``x``'s shape.

    Example:
        >>> is_representable([1.0, 0.1, 65504.0, 65536.0, float("inf")], "fp16").tolist()
        [True, False, True, False, True]
    """
    fmt = as_format(fmt)
    values = _float64(x)
    rounded = quantize(values, fmt, "toward_zero")
    same = (rounded == values) & (np.signbit(rounded) == np.signbit(values))
    return np.where(np.isnan(values), fmt.has_nan, same)


def next_up(x: npt.ArrayLike, fmt: str | Format) -> npt.NDArray[np.float64]:
    """The least value of ``fmt`` above each ``x`` (IEEE 754-2019, 5.3.1: nextUp).

    Args:
        x: Numbers that numpy takes, of any shape; they need not be values of ``fmt``.
        fmt: Format, or its name.

    Returns:
        float64 array of ``x``'s shape. Above the largest value comes infinity, or that value again where
        there is none; NaN stays NaN.

    Example:
        >>> next_up([1.0, 0.0, 65504.0], "fp16").tolist() == [1 + 2.0**-10, 2.0**-24, float("inf")]
        True
    """
    fmt = as_format(fmt)
    values = _float64(x)
    # Any number between x and the value wanted rounds up to it.
    above = quantize(np.nextafter(values, np.inf), fmt, "toward_positive", overflow="propagate")
    top = np.inf if fmt.has_infinity else fmt.max
    above = np.where((values >= fmt.max) & ~np.isnan(values), top, above)
    lowest = (-fmt.max if fmt.signed else 0.0) if fmt.has_zero or fmt.signed else fmt.smallest_subnormal
    above = np.where(values < (-fmt.max if fmt.signed else 0.0), lowest, above)
    return np.where(np.isnan(values), np.nan, above)


def next_down(x: npt.ArrayLike, fmt: str | Format) -> npt.NDArray[np.float64]:
    """The largest value of ``fmt`` below each ``x`` (IEEE 754-2019, 5.3.1: nextDown); as `next_up`, mirrored.

    Args:
        x: Numbers that numpy takes, of any shape; they need not be values of ``fmt``.
        fmt: Signed format, or its name.

    Returns:
        float64 array of ``x``'s shape.

    Raises:
        ValueError: ``fmt`` is unsigned.

    Example:
        >>> next_down([1.0, -65504.0], "fp16").tolist() == [1 - 2.0**-11, float("-inf")]
        True
    """
    fmt = as_format(fmt)
    if not fmt.signed:
        raise ValueError(
            f"next_down needs a signed format, got {fmt.name}; nothing lies below its smallest value"
        )
    return -next_up(-_float64(x), fmt)


def sum(
    x: Any,
    fmt: str | Format,
    *,
    axis: int | None = None,
    order: str = "sequential",
    chunk: int | None = None,
    compensated: bool = False,
    rounding: str = "nearest_even",
    key: Key | None = None,
) -> Any:
    """The sum of ``x`` with every addition rounded to ``fmt``.

    Args:
        x: numpy array or torch CPU tensor of floats; its elements are rounded to ``fmt`` first.
        fmt: Format of up to 25 significand bits, or its name: each addition is exact in float64 before it is
            rounded.
        axis: Dimension to sum over; None: all elements, row by row.
        order: ``"sequential"``: from the first element on; ``"pairwise"``: neighbours, then neighbours of
            those sums; ``"chunk"``: sequential sums of ``chunk`` elements each, then their sequential sum.
        chunk: Elements of a chunk.
        compensated: Kahan's summation, each of its operations rounded; not with ``"pairwise"`` or
            ``"stochastic"``.
        rounding: As for ``quantize``.
        key: Random words of ``"stochastic"``: addition ``i`` of row ``r`` of ``n`` draws word ``r * n + i``,
            where sums of chunks and of pairs draw from keys of their own.

    Returns:
        Array of ``x``'s kind and dtype without that dimension; 0-d for the whole.

    Raises:
        TypeError: ``x`` is no such array.
        ValueError: an unknown order, a chunk without its order or below 1, a format too wide, as
            ``quantize``.

    Example:
        >>> import numpy as np
        >>> ones = np.ones(4096, np.float32)
        >>> [float(sum(ones, "fp16")), float(sum(ones, "fp16", order="chunk", chunk=64))]
        [2048.0, 4096.0]
    """
    fmt, rows, finish = _rows(x, fmt, axis)
    _check_order(order, chunk, compensated, rounding)
    check_key(rounding, key)
    return finish(_summed(rows, fmt, order, chunk, compensated, rounding, key))


def dot(
    a: Any,
    b: Any,
    fmt: str | Format,
    *,
    order: str = "sequential",
    chunk: int | None = None,
    compensated: bool = False,
    rounding: str = "nearest_even",
    key: Key | None = None,
) -> Any:
    """The inner product of two vectors with every product and every addition rounded to ``fmt``.

    Args:
        a: 1-d numpy array or torch CPU tensor of floats; rounded to ``fmt`` first, like ``b``.
        b: Of the same kind, dtype and length.
        fmt: As for `sum`, like the other arguments; products draw from ``key.fold_in("product")``.
        order: As for `sum`.
        chunk: As for `sum`.
        compensated: As for `sum`.
        rounding: As for `sum`.
        key: As for `sum`.

    Returns:
        0-d array of ``a``'s kind and dtype.

    Raises:
        TypeError, ValueError: as `sum`; the shapes differ or are not 1-d.

    Example:
        >>> import numpy as np
        >>> x = np.full(1000, 0.1, np.float32)
        >>> float(dot(x, x, "fp16")), float(dot(x, x, "fp32"))
        (9.953125, 10.000133514404297)
    """
    if getattr(a, "ndim", None) != 1 or getattr(b, "shape", None) != a.shape:
        raise ValueError(
            "dot needs two vectors of one length, got shapes "
            f"{getattr(a, 'shape', a)} and {getattr(b, 'shape', b)}"
        )
    fmt, left, finish = _rows(a, fmt, None)
    _, right, _ = _rows(b, fmt, None)
    _check_order(order, chunk, compensated, rounding)
    check_key(rounding, key)
    product_key = None if key is None else key.fold_in("product")
    products = quantize(left * right, fmt, rounding, key=product_key)
    return finish(_summed(products, fmt, order, chunk, compensated, rounding, key))


def _float64(x: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.asarray(x, dtype=np.float64)


def _rows(x: Any, fmt: str | Format, axis: int | None) -> tuple[Format, npt.NDArray[np.float64], Any]:
    """The format; ``x`` as float64 rows to sum, rounded to it; and how to give back a sum for each row."""
    fmt = as_format(fmt)
    if 2 * fmt.precision + 2 > BINARY64.precision:
        raise ValueError(
            "sums are rounded from float64, which is exact enough for up to 25 significand bits, but "
            f"{fmt.name} has {fmt.precision}"
        )
    rounded = quantize(x, fmt)
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be from {-x.ndim} to {x.ndim - 1}, got {axis}")
    values = rounded.double().numpy() if is_tensor(rounded) else rounded.astype(np.float64)
    values = values.reshape(-1) if axis is None else np.moveaxis(values, axis, -1)
    rows = np.ascontiguousarray(values)

    def finish(sums: npt.NDArray[np.float64]) -> Any:
        shaped = sums.reshape(values.shape[:-1])
        if is_tensor(x):
            import torch

            return torch.from_numpy(shaped).to(x.dtype)
        return shaped.astype(x.dtype)[()] if x.ndim == 0 else shaped.astype(x.dtype)

    return fmt, rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]), finish


def _check_order(order: str, chunk: int | None, compensated: bool, rounding: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; choose from {', '.join(ORDERS)}")
    if (order == "chunk") != (chunk is not None) or (chunk is not None and chunk < 1):
        raise ValueError(
            f"order='chunk' takes chunk=, at least 1, and no other does; got {order!r} and {chunk!r}"
        )
    if compensated and order == "pairwise":
        raise ValueError("compensated=True adds one element after another; order='pairwise' does not")
    if compensated and rounding == "stochastic":
        raise ValueError(
            "compensated=True makes up for rounding=; choose a deterministic one, got 'stochastic'"
        )


def _summed(
    rows: npt.NDArray[np.float64],
    fmt: Format,
    order: str,
    chunk: int | None,
    compensated: bool,
    rounding: str,
    key: Key | None,
) -> npt.NDArray[np.float64]:
    if order == "chunk" and chunk is not None:
        count, n = rows.shape
        padded = np.concatenate([rows, np.zeros((count, -n % chunk))], axis=1).reshape(-1, chunk)
        parts = _sequential(padded, fmt, compensated, rounding, key)
        key = None if key is None else key.fold_in("chunks")
        return _sequential(parts.reshape(count, -1), fmt, compensated, rounding, key)
    if order == "pairwise":
        level = 0
        while rows.shape[1] > 1:
            pairs = rows[:, : rows.shape[1] // 2 * 2]
            folded = None if key is None else key.fold_in("pairs").fold_in(level)
            sums = quantize(pairs[:, ::2] + pairs[:, 1::2], fmt, rounding, key=folded)
            rows = np.concatenate([sums, rows[:, pairs.shape[1] :]], axis=1)
            level += 1
        return rows.sum(axis=1)  # one element, or none
    return _sequential(rows, fmt, compensated, rounding, key)


def _sequential(
    rows: npt.NDArray[np.float64], fmt: Format, compensated: bool, rounding: str, key: Key | None
) -> npt.NDArray[np.float64]:
    rows = np.ascontiguousarray(rows)
    sums = np.empty(rows.shape[0])
    launch.sum_rows(rows, sums, planned(fmt, rounding, carrier=BINARY64), compensated, key)
    return sums
