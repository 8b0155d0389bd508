"""Rounding to block formats: from an array of any shape to blocks one after the other, and back."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import carrier_of, is_tensor
from .blocks import BlockFormat
from .formats import BINARY64
from .kernels import launch, rules
from .kernels.block_rules import BlockPlan
from .random import Key

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_SMALLEST = 2.0**-149
NOTHING_DRAWN = np.empty(0, np.uint32)


@dataclass(frozen=True)
class Layout:
    """Where the blocks of an array lie.

    Attributes:
        shape: Of the array; one dimension at least.
        axes: The dimensions along which blocks run.
        lengths: Elements of a block along each.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of a block."""
        return math.prod(self.lengths)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of an array with one element a block."""
        shape = list(self.shape)
        for axis, length in zip(self.axes, self.lengths, strict=True):
            shape[axis] = -(-shape[axis] // length)
        return tuple(shape)

    def _order(self) -> list[int]:
        others = [axis for axis in range(len(self.shape)) if axis not in self.axes]
        return [*others, *self.axes]

    def _places(self) -> list[int]:
        """For blocks and places in them by turns, the order with all blocks first."""
        others, many = len(self.shape) - len(self.axes), len(self.axes)
        pairs = range(others, others + 2 * many)
        return [*range(others), *pairs[::2], *pairs[1::2]]

    def split(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An array's blocks, one a row; what a block lacks is zero. A view if it can be."""
        order = self._order()
        moved = x.transpose(order)
        pad = [(0, 0)] * len(order)
        for place, length in enumerate(self.lengths, len(order) - len(self.axes)):
            pad[place] = (0, -moved.shape[place] % length)
        if any(after for _, after in pad):
            moved = np.pad(moved, pad)
        return np.ascontiguousarray(
            moved.reshape(self._split_shape()).transpose(self._places()).reshape(-1, self.size)
        )

    def join(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array that `split` took apart."""
        split, places = self._split_shape(), self._places()
        turned = rows.reshape([split[place] for place in places]).transpose(np.argsort(places))
        others = len(self.shape) - len(self.axes)
        padded = turned.reshape(
            *split[:others], *(split[i] * split[i + 1] for i in range(others, len(split), 2))
        )
        order = self._order()
        kept = padded[tuple(slice(self.shape[axis]) for axis in order)]
        return kept.transpose(np.argsort(order))

    def _split_shape(self) -> list[int]:
        scales = self.scales_shape
        shape = [self.shape[axis] for axis in self._order() if axis not in self.axes]
        for axis, length in zip(self.axes, self.lengths, strict=True):
            shape += [scales[axis], length]
        return shape

    def join_scales(self, scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What there is of each block, in the array's order of dimensions."""
        order = self._order()
        shape = self.scales_shape
        joined = scales.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        return np.ascontiguousarray(joined)

    def split_scales(self, scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What `join_scales` joined."""
        return np.ascontiguousarray(scales.transpose(self._order())).reshape(-1)


def layout(shape: tuple[int, ...], fmt: BlockFormat) -> Layout:
    """Where the blocks of an array of that shape lie; a single number is a block of one."""
    shape = tuple(shape) or (1,)
    lengths = fmt.lengths(shape)
    return Layout(shape, fmt.axes(len(shape)), tuple(max(n, 1) for n in lengths))


@dataclass(frozen=True)
class Rounded:
    """What rounding an array gave.

    Attributes:
        values: Of the array's kind, dtype and shape; or multiples of their block's scale.
        scales: float64, one for each block, in the order in which `Layout.split` has them.
        tensor_scale: By which all of them are multiplied.
        layout: Where the blocks lie.
    """

    values: Any
    scales: npt.NDArray[np.float64]
    tensor_scale: float
    layout: Layout


def round_blocks(
    x: Any, fmt: BlockFormat, plan: BlockPlan, key: Key | None, out: Any = None, coded: bool = False
) -> Rounded:
    """Round a checked array; a tensor on a CUDA device is rounded on the CPU.

    Args:
        x: Array of float32, float64, float16 or bfloat16, numpy's or torch's.
        fmt: The block format.
        plan: How to round to it.
        key: Random words, or None.
        out: Array of ``x``'s kind, dtype and shape to write to, or None.
        coded: Give elements in units of their block's scale.
    """
    result = out if out is not None else _empty_like(x)
    place = layout(tuple(x.shape), fmt)
    if 0 in place.shape:
        return Rounded(result, np.empty(0), 1.0, place)
    source, target = _in_place(x), _in_place(result)
    if source is None:
        source = _copied(x, products=not fmt.power_of_two)
    if target is None or (np.may_share_memory(source, target) and source.ctypes.data != target.ctypes.data):
        target = np.empty_like(source)
    shape = place.shape
    tensor_scale = _tensor_scale(source, fmt) if fmt.tensor_scale else 1.0
    scales = _round(source.reshape(shape), target.reshape(shape), place, plan, tensor_scale, key, coded)
    memory = _in_place(result)
    if memory is None or memory.ctypes.data != target.ctypes.data:
        if carrier_of(x).bits == 16 and target.dtype == np.float64:
            # Here and once: a cast of torch or ml_dtypes would round by way of float32.
            steps = rules.plan(carrier_of(x), "nearest_even", "ieee", BINARY64)
            launch.round_array(target.ctypes.data, target.ctypes.data, target.size, steps, None)
        _write(target, result)
    return Rounded(result, scales, tensor_scale, place)


def count_in_blocks(x: Any, rounded: Rounded, words: npt.NDArray[np.float64]) -> tuple[int, int]:
    """How many elements became subnormals of their block, and how many round past its largest value.

    Args:
        x: What was rounded.
        rounded: To what.
        words: Of the element's format the smallest normal value, and last the least magnitude that overflows.
    """
    if not rounded.scales.size:
        return 0, 0
    numbers, values = (
        rounded.layout.split(memory.reshape(rounded.layout.shape))
        for memory in (_in_memory(x), _in_memory(rounded.values))
    )
    return launch.count_blocks(numbers, values, rounded.scales * rounded.tensor_scale, words[[0, -1]])


def _round(
    source: npt.NDArray[Any],
    target: npt.NDArray[Any],
    place: Layout,
    plan: BlockPlan,
    tensor_scale: float,
    key: Key | None,
    coded: bool,
) -> npt.NDArray[np.float64]:
    """Round ``source`` to ``target``; the scales."""
    drawn = NOTHING_DRAWN
    if key is not None:
        # An element draws the word of its own index, wherever its block takes it.
        drawn = place.split(launch.draw(source.size, key).reshape(place.shape)).reshape(-1)
    rows = place.split(source)
    moved = not np.may_share_memory(rows, source)
    results = rows if moved else target
    scales = np.empty(len(rows))
    like = source.dtype.type(0)
    addresses = rows.ctypes.data, results.ctypes.data
    launch.round_blocks(*addresses, drawn, scales, place.size, plan, tensor_scale, coded, like)
    if moved:
        target[...] = place.join(rows)
    return scales


def _tensor_scale(source: npt.NDArray[Any], fmt: BlockFormat) -> float:
    """The scale of a whole array, a positive number of binary32."""
    amax = launch.largest_finite(source.ctypes.data, source.size, source.dtype.type(0))
    if amax == 0.0:
        return 1.0
    scale = min(amax / (fmt.element.max * fmt.scale.max), FLOAT32_MAX)
    return max(float(np.float32(scale)), FLOAT32_SMALLEST)


def _empty_like(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.empty_like(x, subok=False)
    import torch

    return torch.empty_like(x.detach())


def _in_place(x: Any) -> npt.NDArray[Any] | None:
    """The memory of a C-contiguous float32 or float64 array on the CPU; None of any other."""
    if isinstance(x, np.ndarray):
        usual = x.flags.c_contiguous and x.flags.aligned and x.dtype.name in ("float32", "float64")
        return x if usual else None
    number = {"torch.float32": ctypes.c_float, "torch.float64": ctypes.c_double}.get(str(x.dtype))
    if number is None or x.device.type != "cpu" or not x.is_contiguous():
        return None
    # Not by x.numpy(), which would pin the storage of a parameter.
    memory = (number * x.numel()).from_address(x.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(tuple(x.shape))


def _in_memory(x: Any) -> npt.NDArray[Any]:
    memory = _in_place(x)
    return _copied(x) if memory is None else memory


def _copied(x: Any, products: bool = False) -> npt.NDArray[Any]:
    """A new C-contiguous array of float32 or float64; of float64 if float16 is to be rounded to once.

    Args:
        x: Array.
        products: Whether elements are to become products that only float64 holds.
    """
    double = str(x.dtype).endswith("float64") or (x.dtype.itemsize == 2 and products)
    if isinstance(x, np.ndarray):
        return np.array(x, "f8" if double else "f4", order="C", subok=False)
    import torch

    wide = torch.float64 if double else torch.float32
    copy = x.detach().to("cpu", wide, copy=True, memory_format=torch.contiguous_format)
    numbers: npt.NDArray[Any] = copy.numpy()
    return numbers


def _write(numbers: npt.NDArray[Any], out: Any) -> None:
    if is_tensor(out):
        import torch

        out.detach().copy_(torch.from_numpy(numbers))
    else:
        out[...] = numbers.astype(out.dtype, copy=False)
