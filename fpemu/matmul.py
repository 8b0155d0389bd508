"""Matrix products whose products and sums are rounded as they accumulate."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .arrays import as_array, carrier_of, is_tensor
from .formats import BINARY32, BINARY64, Format, as_format
from .kernels import launch, ways
from .kernels.gemm import measure
from .kernels.rules import carried
from .kernels.ways import Rounding
from .quantize import check_key, planned
from .random import Key

Array = TypeVar("Array")
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Accumulator:
    """How a matrix product is rounded as it accumulates: the arguments of `matmul` in one piece.

    Attributes:
        accumulate: As for `matmul`, like all the others.
        product: Format of each product, or None.
        chunk: Terms of a chunk, or None.
        chunk_accumulate: Format of the sums within a chunk, or None.
        rounding: Of products and sums.
        overflow: Of products and sums.

    Raises:
        TypeError, ValueError: as `matmul`, as far as the factors do not matter.

    Example:
        >>> Accumulator("fp16", chunk=64).accumulate.name
        'binary16'
    """

    accumulate: Any = "fp16"
    product: Any = None
    chunk: int | None = None
    chunk_accumulate: Any = None
    rounding: str = "nearest_even"
    overflow: str = "ieee"

    def __post_init__(self) -> None:
        for name in ("accumulate", "product", "chunk_accumulate"):
            fmt = getattr(self, name)
            if name == "accumulate" or fmt is not None:
                object.__setattr__(self, name, as_format(fmt))
                planned(as_format(fmt), self.rounding, self.overflow, BINARY64)
                if name != "product":
                    _check_sums(getattr(self, name), name, self.rounding)
        if self.chunk is None and self.chunk_accumulate is not None:
            raise ValueError(f"chunk_accumulate= is read with chunk= only, got {self.chunk_accumulate} alone")
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1):
            raise ValueError(f"chunk must be an int of at least 1, or None, got {self.chunk!r}")

    def __call__(self, a: Array, b: Array, *, key: Key | None = None) -> Array:
        """``a @ b``, as by `matmul`."""
        left, right = as_array(a), as_array(b)
        carrier = _check_pair(left, right)
        wide = BINARY64 if carrier == BINARY64 else BINARY32
        _check_held(self.accumulate, carrier, "accumulate")
        if self.chunk_accumulate is not None:
            _check_held(self.chunk_accumulate, wide, "chunk_accumulate")
        check_key(self.rounding, key)
        shape = _shape(tuple(left.shape), tuple(right.shape))
        return _multiply(self, left, right, shape, wide == BINARY32, key)

    def roundings(self) -> tuple[Rounding | None, Rounding, Rounding | None]:
        """Of products, of sums of terms, of sums of chunks; None: there is no such rounding."""
        mode = self.rounding, self.overflow
        product = None if self.product is None else Rounding(self.product, *mode)
        if self.chunk is None:
            return product, Rounding(self.accumulate, *mode), None
        inner = Rounding(BINARY32, "nearest_even", "ieee")
        if self.chunk_accumulate is not None:
            inner = Rounding(self.chunk_accumulate, *mode)
        return product, inner, Rounding(self.accumulate, *mode)


def matmul(
    a: Array,
    b: Array,
    *,
    product: str | Format | None = None,
    accumulate: str | Format = "fp16",
    chunk: int | None = None,
    chunk_accumulate: str | Format | None = None,
    rounding: str = "nearest_even",
    overflow: str = "ieee",
    key: Key | None = None,
) -> Array:
    """The matrix product ``a @ b`` with every sum, and if asked every product, rounded as it accumulates.

    Each element of the result is a sum that starts at +0.0: its terms are added in the order of the factors,
    and each addition is rounded to ``accumulate``, once, from the exact value. With exact products that is a
    fused multiply-add; with ``product=`` a multiplier before an adder.

    Args:
        a: numpy array or torch CPU tensor of float32, float64, float16 or bfloat16, of one dimension or more;
            its elements are taken as they are.
        b: Of the same kind and dtype; shapes go together as for ``numpy.matmul``, batches broadcast.
        product: Format that each product is rounded to; None: it stays exact.
        accumulate: Format of the sums: signed, with a zero, held by the dtype, of at most 51 significand
            bits, or 20 for ``"stochastic"``.
        chunk: Terms, at least 1, that are summed apart, from +0.0 on, before their sum is added and rounded
            to ``accumulate``; None: each term is added by itself.
        chunk_accumulate: Format of the sums within a chunk, like ``accumulate``; None: float32, rounded to
            nearest even whatever ``rounding`` and ``overflow``.
        rounding: As for ``quantize``, of products and sums alike.
        overflow: As for ``quantize``.
        key: Random words of ``"stochastic"``. Element ``i`` of the result, counted row by row, draws word
            ``i`` of ``key.fold_in(k)`` for its sum after term ``k``, of ``key.fold_in("product").fold_in(k)``
            for product ``k``, and of ``key.fold_in("chunks").fold_in(n)`` for its sum after chunk ``n``.

    Returns:
        Array of ``a``'s kind and dtype. A tensor comes back without gradient.

    Raises:
        TypeError: ``a`` or ``b`` is no such array, or their kinds or dtypes differ.
        ValueError: shapes that do not go together; a chunk below 1; a format that is too wide; float64
            factors so long that float64 does not hold their products; as ``quantize``.

    Example:
        >>> import numpy as np
        >>> ones = np.ones((1, 4096), np.float32)
        >>> matmul(ones, ones.T).item(), matmul(ones, ones.T, chunk=64).item()
        (2048.0, 4096.0)
    """
    return Accumulator(accumulate, product, chunk, chunk_accumulate, rounding, overflow)(a, b, key=key)


def _check_sums(fmt: Format, name: str, rounding: str) -> None:
    most = ways.WIDEST_RANDOM if rounding == "stochastic" else ways.WIDEST
    if fmt.precision > most or fmt.emax > ways.LARGEST:
        raise ValueError(
            f"{name} takes a format of up to {most} significand bits with rounding={rounding!r}, below "
            f"2**{ways.LARGEST + 1}, so that float64 tells how an exact sum rounds; got {fmt.name}"
        )
    if not fmt.has_zero or not fmt.signed:
        raise ValueError(f"{name} takes a signed format with a zero, where sums start; got {fmt.name}")


def _check_held(fmt: Format, carrier: Format, name: str) -> None:
    if fmt.precision > carrier.precision:
        raise ValueError(
            f"{name}={fmt.name!r} has {fmt.precision} significand bits, more than the dtype's "
            f"{carrier.precision}; pass wider arrays"
        )
    carried(fmt, carrier)


def _check_pair(a: Any, b: Any) -> Format:
    carrier, other = carrier_of(a, "a"), carrier_of(b, "b")
    if is_tensor(a) != is_tensor(b) or carrier != other:
        raise TypeError(
            f"a and b must be of one kind and dtype, got {type(a).__name__} of {a.dtype} and "
            f"{type(b).__name__} of {b.dtype}"
        )
    if is_tensor(a) and (a.is_cuda or b.is_cuda):
        raise TypeError(f"matmul runs on the CPU, got tensors on {a.device} and {b.device}; move them first")
    return carrier


def _shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Of the stack of products: batches, rows and columns."""
    if not a or not b:
        raise ValueError(f"matmul needs factors of one dimension or more, got shapes {a} and {b}")
    left, right = (a if len(a) > 1 else (1, *a)), (b if len(b) > 1 else (*b, 1))
    if left[-1] != right[-2]:
        raise ValueError(f"a needs as many columns as b has rows, got shapes {a} and {b}")
    try:
        return (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])
    except ValueError:
        raise ValueError(f"the batches of a and b must broadcast, got shapes {a} and {b}") from None


def _multiply(
    how: Accumulator, left: Any, right: Any, shape: tuple[int, ...], single: bool, key: Key | None
) -> Any:
    wide = "f4" if single else "f8"
    a = _dense(left if left.ndim > 1 else left[None], wide)
    b = _dense(right if right.ndim > 1 else right[:, None], wide)
    exact = _products_are_exact(a, b)
    if not single and not exact:
        raise ValueError(
            "float64 does not hold the products of these float64 factors; round them first, to 26 "
            "significand bits say, or pass float32, whose products it holds"
        )
    c = np.zeros((math.prod(shape[:-2]), *shape[-2:]), wide)
    if a.shape[-1] and c.size:
        steps = ways.sums(*how.roundings(), single, exact)
        places = _places(a.shape[:-2], shape[:-2]), _places(b.shape[:-2], shape[:-2])
        launch.multiply(_stack(a), _stack(b), c, places, how.chunk or 0, steps, key)
    ends = (() if left.ndim == 1 else shape[-2:-1]) + (() if right.ndim == 1 else shape[-1:])
    return _like(left, c.reshape(shape[:-2] + ends))


def _stack(x: Floats) -> Floats:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _places(batches: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """For each batch of the broadcast shape the place of what is broadcast to it."""
    own = np.arange(math.prod(batches)).reshape(batches)
    return np.ascontiguousarray(np.broadcast_to(own, shape).reshape(-1))


def _dense(x: Any, wide: str) -> Floats:
    """A C-contiguous array of the numbers, copied where they are not one already."""
    if not is_tensor(x):
        return np.ascontiguousarray(x, wide)
    import torch

    dense = x.detach().to(torch.float32 if wide == "f4" else torch.float64).contiguous()
    if not dense.numel():
        return np.zeros(tuple(dense.shape), wide)
    # Not dense.numpy(): that would pin the storage of a parameter.
    memory = (ctypes.c_char * (dense.numel() * dense.itemsize)).from_address(dense.data_ptr())
    memory.tensor = dense
    return np.frombuffer(memory, wide).reshape(tuple(dense.shape))


def _like(x: Any, c: Floats) -> Any:
    """The numbers as ``x``'s kind and dtype."""
    if not is_tensor(x):
        return c.astype(x.dtype, copy=False)
    import torch

    return torch.from_numpy(c).to(x.dtype)


def _products_are_exact(a: Floats, b: Floats) -> bool:
    """Whether the factors' dtype holds each product of a number of each."""
    carrier = BINARY32 if a.dtype == np.float32 else BINARY64
    of = measure if carrier == BINARY32 else _measure64
    bits, low, high = (sum(pair) for pair in zip(of(a.reshape(-1)), of(b.reshape(-1)), strict=True))
    lowest = carrier.emin - carrier.precision + 1
    # The sums to come, of numbers below 2**emax, must not overflow either.
    return bits <= carrier.precision and low >= lowest and high + 2 <= carrier.emax


def _measure64(x: Floats) -> tuple[int, int, int]:
    """`gemm.measure` of float64."""
    x = x[np.isfinite(x) & (x != 0)]
    if not x.size:
        return 0, 0, 0
    fractions, exponents = np.frexp(x)
    together = int(np.bitwise_or.reduce(np.ldexp(np.abs(fractions), 53).astype(np.int64)))
    zeros = (together & -together).bit_length() - 1
    return 53 - zeros, int(exponents.min()) - 53 + zeros, int(exponents.max()) - 1
