"""Block-scaled formats: elements of a small format that share a scale by blocks, as in MX and NVFP4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from .formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, E8M0FNU, Format, as_format

ScaleRule = Literal["floor", "ceil", "round"]


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks: the value of an element is its code's, times the block's scale.

    Attributes:
        name: Short name, as ``as_block_format`` takes it if the format is a named one.
        element: Format of the elements, or its name.
        scale: Format of the scales, or its name: with precision 1 powers of two, as e8m0fnu.
        block: How many elements along ``axis`` share a scale, or how many along each; None: all. The last
            block of an axis may be shorter.
        axis: The dimension along which blocks run, or several; None: all. Those that an array does not have
            are left out, and if none is left its last one counts: a bias has blocks too.
        scale_rule: How a scale follows from the largest finite magnitude ``amax`` of its block. Powers of
            two: ``"floor"``, that of amax's binade over that of the element's largest value (OCP MX v1.0);
            ``"round"``, the same of amax rounded to the element's precision, a tie up; ``"ceil"``, the least
            with which nothing saturates. Other scales: ``amax / element.max`` rounded toward zero, to nearest
            even, or up.
        tensor_scale: Whether all scales are multiplied by one more, of the whole array, in binary32: its
            amax over ``element.max * scale.max``.
        twos_complement: Whether codes of elements are two's complement, so that there is no -0.0.

    Raises:
        ValueError: no such format can exist, or a value of it is not exact in binary64.

    Example:
        >>> mine = BlockFormat("mine", element="e2m1", scale="e5m3", block=8, scale_rule="round")
        >>> mine.element.max, mine.size((3, 20)), mine.bits_per_element((3, 20))
        (6.0, 8, 5.125)
    """

    name: str
    element: Any
    scale: Any
    block: Any
    axis: Any = -1
    scale_rule: ScaleRule = "floor"
    tensor_scale: bool = False
    twos_complement: bool = False

    def __post_init__(self) -> None:
        for field in ("element", "scale"):
            object.__setattr__(self, field, as_format(getattr(self, field)))
        for field in ("block", "axis"):
            value = getattr(self, field)
            object.__setattr__(self, field, tuple(value) if isinstance(value, (list, tuple)) else value)
        _check_axes(self)
        if self.scale_rule not in get_args(ScaleRule):
            raise ValueError(
                f"scale_rule must be one of {', '.join(get_args(ScaleRule))}, got {self.scale_rule!r}"
            )
        _check_formats(self)

    def __str__(self) -> str:
        return self.name

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return bool(self.scale.precision == 1)

    def axes(self, ndim: int) -> tuple[int, ...]:
        """The dimensions, of ``ndim``, that blocks run along: without those that an array does not have."""
        if self.axis is None:
            return tuple(range(ndim))
        several = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        return tuple(axis % ndim for axis in several if -ndim <= axis < ndim) or (ndim - 1,)

    def lengths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many elements a block has along each of ``axes``, in an array of this shape."""
        axes = self.axes(len(shape))
        if not isinstance(self.block, tuple):
            several = (self.block,) * len(axes)
        else:
            # As many as are left, the last ones: on one dimension a block of 4 x 16 is one of 16.
            several = self.block[len(self.block) - len(axes) :]
        return tuple(shape[axis] if n is None else n for axis, n in zip(axes, several, strict=True))

    def size(self, shape: tuple[int, ...]) -> int:
        """Elements of a whole block in an array of this shape."""
        return math.prod(self.lengths(shape))

    def bits_per_element(self, shape: tuple[int, ...]) -> float:
        """Bits of an element and its share of the block's scale."""
        return float(self.element.bits + self.scale.bits / self.size(shape))

    def along(self, axis: int | tuple[int, ...] | None) -> BlockFormat:
        """This format with its blocks along other dimensions."""
        return replace(self, axis=axis)


def _check_axes(fmt: BlockFormat) -> None:
    axes = fmt.axis if isinstance(fmt.axis, tuple) else () if fmt.axis is None else (fmt.axis,)
    lengths = fmt.block if isinstance(fmt.block, tuple) else (fmt.block,)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in lengths if n is not None):
        raise ValueError(f"block must be a positive int, or None for all, or a tuple, got {fmt.block!r}")
    if any(not isinstance(axis, int) or isinstance(axis, bool) for axis in axes) or fmt.axis == ():
        raise ValueError(f"axis must be an int, a tuple of ints, or None for all, got {fmt.axis!r}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis names a dimension twice: {fmt.axis!r}")
    if isinstance(fmt.block, tuple) and len(fmt.block) != len(axes):
        raise ValueError(f"block={fmt.block!r} gives {len(fmt.block)} lengths for axis={fmt.axis!r}")
    if fmt.axis is None and fmt.block is not None:
        raise ValueError(f"axis=None is one block for the whole array: block must be None, got {fmt.block!r}")


def _check_formats(fmt: BlockFormat) -> None:
    element, scale = fmt.element, fmt.scale
    if not element.signed or not element.has_zero or element.precision > 20:
        raise ValueError(f"elements need a sign, a zero and at most 20 significand bits, got {element.name}")
    if not scale.has_nan:
        raise ValueError(f"scales need a NaN, for blocks that no number fits, but {scale.name} has none")
    if fmt.tensor_scale and fmt.power_of_two:
        raise ValueError(f"tensor_scale needs scales between powers of two, but {scale.name} has precision 1")
    # An element times both scales must be exact in binary64.
    if element.precision + scale.precision + 24 * fmt.tensor_scale > 53:
        raise ValueError(f"{element.name} times {scale.name} takes more than 53 significand bits")
    for part in (element, scale):
        if part.smallest_subnormal < 2.0**-149 or part.max >= 2.0**128:
            raise ValueError(f"elements and scales must be numbers of binary32, but {part.name} goes beyond")
    if fmt.twos_complement and (element.exponent_bits != 1 or element.specials != "finite"):
        raise ValueError(f"two's complement needs integers: one exponent bit, finite; got {element.name}")


# With one exponent bit and no specials every value is a multiple of one quantum: integers.
INT8 = Format("int8", 1, 7, bias=1, specials="finite")
INT4 = Format("int4", 1, 3, bias=1, specials="finite")

MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3FN, E8M0FNU, 32)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, E8M0FNU, 32)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2, E8M0FNU, 32)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3, E8M0FNU, 32)
MXFP4 = BlockFormat("mxfp4", E2M1, E8M0FNU, 32)
MXINT8 = BlockFormat("mxint8", INT8, E8M0FNU, 32, twos_complement=True)
NVFP4 = BlockFormat("nvfp4", E2M1, E4M3FN, 16, scale_rule="round", tensor_scale=True)
NVFP4_16X16 = replace(NVFP4, name="nvfp4_16x16", block=(16, 16), axis=(-2, -1))
MSFP16 = BlockFormat("msfp16", INT8, E8M0FNU, 16)
MSFP12 = BlockFormat("msfp12", INT4, E8M0FNU, 16)

NAMED = (
    MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, MXINT8, NVFP4, NVFP4_16X16, MSFP16, MSFP12,
)  # fmt: skip
_BY_NAME = {fmt.name: fmt for fmt in NAMED} | {"mxfp8": MXFP8_E4M3, "mxfp4_e2m1": MXFP4}


def as_block_format(spec: str | BlockFormat, axis: Any = None) -> BlockFormat:
    """The block format that ``spec`` names.

    Args:
        spec: ``"mxfp8"`` (that is ``"mxfp8_e4m3"``), ``"mxfp8_e5m2"``, ``"mxfp6_e3m2"``, ``"mxfp6_e2m3"``,
            ``"mxfp4"``, ``"mxint8"``, ``"nvfp4"``, ``"nvfp4_16x16"``, ``"msfp16"``, ``"msfp12"``, or a
            BlockFormat.
        axis: The dimension along which blocks run, or several; None leaves the format's own, the last.

    Raises:
        ValueError: no block format has that name.
        TypeError: ``spec`` is no name and no BlockFormat.

    Example:
        >>> as_block_format("nvfp4").scale.name, as_block_format("mxfp8", axis=0).axis
        ('e4m3fn', 0)
    """
    if not isinstance(spec, (str, BlockFormat)):
        raise TypeError(f"a block format is given by name or as a BlockFormat, got {spec!r}")
    fmt = found(spec)
    if fmt is None:
        raise ValueError(
            f"unknown block format {spec!r}; choose from {', '.join(_BY_NAME)}, or make a BlockFormat"
        )
    return fmt if axis is None else fmt.along(axis)


def found(spec: Any) -> BlockFormat | None:
    """The block format that ``spec`` is or names; None if it is none."""
    if isinstance(spec, BlockFormat):
        return spec
    return _BY_NAME.get(spec.lower()) if isinstance(spec, str) else None


def any_format(spec: Any) -> Format | BlockFormat:
    """The format or block format that ``spec`` names.

    Raises:
        ValueError, TypeError: as ``as_format``.
    """
    return found(spec) or as_format(spec)


def write_format(fmt: Format | BlockFormat) -> dict[str, Any]:
    """The fields of a format in strings, numbers, lists and dicts; None, which TOML lacks, is ``"all"``."""
    written = asdict(fmt)
    for name in ("block", "axis"):
        if name in written:
            written[name] = _replaced(written[name], None, "all")
    return written


def read_format(written: Mapping[str, Any]) -> Format | BlockFormat:
    """The format that `write_format` wrote."""
    if "element" not in written:
        return Format(**written)
    parts: dict[str, Any] = {name: Format(**written[name]) for name in ("element", "scale")}
    parts |= {name: _replaced(written[name], "all", None) for name in ("block", "axis")}
    return BlockFormat(**{**written, **parts})


def _replaced(value: Any, old: Any, new: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replaced(one, old, new) for one in value]
    return new if value == old else value
