"""A format and how to round to it, in one piece: what a role of a policy takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from .blocks import BlockFormat, any_format, read_format, write_format
from .formats import BINARY32, Format
from .kernels.rules import Plan
from .quantize import planned, quantize
from .random import Key

SCALINGS = (None, "tensor", "delayed", "channel")
HISTORY = 16  # steps whose largest magnitudes "delayed" remembers


@dataclass(frozen=True)
class Quantizer:
    """A format and how to round to it.

    Attributes:
        format: A Format or a BlockFormat, or a name that ``as_format`` or ``as_block_format`` takes.
        rounding: As for ``quantize``.
        overflow: As for ``quantize``, like ``random_bits``, ``variant`` and ``flush_subnormals``.
        scaling: None, or ``"tensor"``: each tensor is rounded as if scaled by the largest power of two that
            keeps its largest finite magnitude in the format's range, and scaled back. Rounding happens once.
            ``"delayed"``: the largest magnitude is that of the last 16 forwards of an emulated model, this
            one not among them. ``"channel"``: each slice along ``axis`` has a scale of its own.
        axis: With ``scaling="channel"``, the dimension of channels: 0 in weights, 1 in images. A tensor
            that has fewer dimensions, or only one, has one scale.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> Quantizer("e5m2", rounding="stochastic").format.max
        57344.0
    """

    format: Any
    rounding: str = "nearest_even"
    overflow: str = "ieee"
    scaling: str | None = None
    random_bits: int | None = None
    variant: str = "C"
    flush_subnormals: bool = False
    axis: int = 0

    def __init__(
        self,
        format: str | Format | BlockFormat,
        rounding: str = "nearest_even",
        overflow: str = "ieee",
        scaling: str | None = None,
        random_bits: int | None = None,
        variant: str = "C",
        flush_subnormals: bool = False,
        axis: int = 0,
    ) -> None:
        if scaling not in SCALINGS:
            raise ValueError(f"unknown scaling {scaling!r}; choose from {', '.join(map(repr, SCALINGS))}")
        if not isinstance(axis, int) or axis < 0 or (axis and scaling != "channel"):
            raise ValueError(f"axis must be 0 or, with scaling='channel', more, got {axis!r}")
        fmt = any_format(format)
        if isinstance(fmt, BlockFormat) and scaling is not None:
            raise ValueError(
                f"{fmt.name} has scales of its own; leave out scaling={scaling!r}, and say along which "
                "dimension its blocks run by as_block_format(name, axis=)"
            )
        for name, value in (
            ("format", fmt),
            ("rounding", rounding),
            ("overflow", overflow),
            ("scaling", scaling),
            ("random_bits", random_bits),
            ("variant", variant),
            ("flush_subnormals", flush_subnormals),
            ("axis", axis),
        ):
            object.__setattr__(self, name, value)
        self.plan()  # refuses what is unknown, or not held by float32
        # A plain attribute: torch.compile cannot follow a cached_property.
        object.__setattr__(self, "spec", self._spec())

    def __call__(self, x: Any, *, key: Key | None = None, out: Any = None) -> Any:
        """``x`` rounded, as by ``quantize``.

        Raises:
            ValueError: as ``quantize``; or there is a scaling, which ``cast`` and ``emulate`` carry out.
        """
        if self.scaling is not None:
            raise ValueError(
                f"scaling={self.scaling!r} is for cast and emulate; round with scaling=None here"
            )
        return quantize(
            x,
            self.format,
            self.rounding,
            overflow=self.overflow,
            key=key,
            random_bits=self.random_bits,
            variant=self.variant,
            flush_subnormals=self.flush_subnormals,
            out=out,
        )

    def plan(self, fmt: Format | None = None, carrier: Format = BINARY32) -> Plan:
        """How the kernels carry it out, in another format if one is given; of blocks, their elements'."""
        own = self.format.element if isinstance(self.format, BlockFormat) else self.format
        return planned(fmt or own, self.rounding, self.overflow, carrier, *self.few)

    @property
    def few(self) -> tuple[int | None, str, bool]:
        """random_bits, variant and flush_subnormals."""
        return self.random_bits, self.variant, self.flush_subnormals

    @property
    def in_blocks(self) -> bool:
        """Whether its format has blocks."""
        return isinstance(self.format, BlockFormat)

    def along(self, axis: int) -> Quantizer:
        """The same with its format's blocks along another dimension; without blocks, itself."""
        return _along(self, axis) if self.in_blocks else self

    @property
    def stochastic(self) -> bool:
        """Whether rounding draws random words, and so needs a key."""
        return self.rounding == "stochastic"

    spec: ClassVar[str]  # all of it in one string, for a torch operator's argument; of each Quantizer its own

    def _spec(self) -> str:
        f = self.format
        shape: tuple[Any, ...]
        if isinstance(f, BlockFormat):
            shape = (json.dumps(write_format(f)),)
        else:
            shape = (
                f.exponent_bits,
                f.precision,
                f.bias,
                f.specials,
                int(f.subnormal),
                int(f.signed),
                f.name,
            )
        few = (self.random_bits or "", self.variant, int(self.flush_subnormals), self.axis)
        return "|".join(map(str, (self.rounding, self.overflow, self.scaling or "", *few, *shape)))


@cache
def quantizer_of(spec: str) -> Quantizer:
    """The Quantizer whose ``spec`` this is."""
    rounding, overflow, scaling, random_bits, variant, flush, axis, shape = spec.split("|", 7)
    few = int(random_bits) if random_bits else None, variant, flush == "1", int(axis)
    return Quantizer(_format_of(shape), rounding, overflow, scaling or None, *few)


def _format_of(shape: str) -> Format | BlockFormat:
    if shape.startswith("{"):
        return read_format(json.loads(shape))
    exponent_bits, precision, bias, specials, subnormal, signed, name = shape.split("|", 6)
    return Format(
        name,
        int(exponent_bits),
        int(precision),
        int(bias),
        specials,  # type: ignore[arg-type]
        subnormal == "1",
        signed == "1",
    )


@cache
def _along(quantizer: Quantizer, axis: int) -> Quantizer:
    return (
        quantizer
        if quantizer.format.axis == axis
        else replace(quantizer, format=quantizer.format.along(axis))
    )


def as_quantizer(role: str | Format | BlockFormat | Quantizer | None) -> Quantizer | None:
    """A role's value as a Quantizer; None stays None, which leaves the role alone.

    Raises:
        TypeError: it is none of these.
        ValueError: no format has that name.
    """
    return role if role is None or isinstance(role, Quantizer) else Quantizer(role)
