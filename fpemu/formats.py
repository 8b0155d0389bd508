"""Floating-point formats: what a format is, and the ones that have a name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Specials = Literal["ieee", "fn", "fnuz", "finite", "p3109e", "p3109f"]

ROUNDINGS = (
    "nearest_even",
    "nearest_away",
    "toward_zero",
    "toward_positive",
    "toward_negative",
    "to_odd",
    "stochastic",
)
OVERFLOWS = ("ieee", "saturate", "propagate")


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    A code is, from the top, a sign bit (if ``signed``), ``exponent_bits`` of biased exponent and
    ``precision - 1`` bits of fraction. With exponent field ``e > 0`` and fraction ``f`` it means
    ``2**(e - bias) * (1 + f * eps)``; with ``e == 0`` it means ``2**(1 - bias) * f * eps``.

    Attributes:
        name: Short name, as ``as_format`` takes it if the format is a named one.
        exponent_bits: Width of the exponent field, 1 to 11.
        precision: Significand bits, the implicit one included, 1 to 53 (binary16: 11).
        bias: Exponent bias; by default ``2**(exponent_bits - 1) - 1`` (``fnuz`` and P3109: one more).
        specials: Which codes are no finite number. ``"ieee"``: the top exponent holds infinity and
            NaNs. ``"fn"``: NaN is the code of all ones, no infinity. ``"fnuz"``: NaN is the code of
            -0.0, no infinity and no -0.0. ``"finite"``: none, all codes are numbers. ``"p3109e"`` and
            ``"p3109f"``, extended and finite formats of IEEE P3109: one NaN, the code of -0.0 or, if
            unsigned, of all ones; no -0.0; extended ones have infinity next to the largest value.
        subnormal: Whether values below ``smallest_normal`` exist. If not, the codes that would mean
            them mean zero; with precision 1 the one such code means ``2**-bias`` and there is no
            zero (e8m0fnu).
        signed: Whether there is a sign bit.

    Raises:
        ValueError: no such format can exist, or a value of it is not exact in binary64.

    Example:
        >>> f = Format("mine", exponent_bits=4, precision=4, bias=7, specials="fn")
        >>> f.max, f.smallest_normal, f.smallest_subnormal, f.eps
        (448.0, 0.015625, 0.001953125, 0.125)
    """

    name: str
    exponent_bits: int
    precision: int
    bias: Any = None  # an int once made; None stands for the usual one
    specials: Specials = "ieee"
    subnormal: bool = True
    signed: bool = True

    def __post_init__(self) -> None:
        if self.specials not in get_args(Specials):
            raise ValueError(
                f"specials must be one of {', '.join(get_args(Specials))}, got {self.specials!r} "
                f"for format {self.name!r}"
            )
        for field, low, high in (("exponent_bits", 1, 11), ("precision", 1, 53)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(
                    f"{field} must be an int from {low} to {high}, got {value!r} for format {self.name!r}"
                )
        if self.bias is None:
            usual = self.specials in ("ieee", "fn", "finite")
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - usual)
        if not isinstance(self.bias, int) or isinstance(self.bias, bool):
            raise ValueError(f"bias must be an int, got {self.bias!r} for format {self.name!r}")
        if self.specials == "fnuz" and not self.signed:
            raise ValueError(f"specials='fnuz' keeps NaN in the code of -0.0, but {self.name!r} is unsigned")
        if self.specials == "ieee" and self.precision == 1:
            raise ValueError(
                f"specials='ieee' needs a fraction bit to tell NaN from infinity, but {self.name!r} has "
                "precision=1; use specials='fn' or 'finite'"
            )
        if self.max_code < 1 or (not self.subnormal and self.precision > 1 and self.max_code < self._binade):
            raise ValueError(f"format {self.name!r} has no finite value but zero: give it more exponent bits")
        top = (self.max_code >> (self.precision - 1) or 1) - self.bias
        low_exponent = self.emin - (self.precision - 1 if self.subnormal else 0)
        if top > 1023 or low_exponent < -1074:
            raise ValueError(
                f"every value must be exact in binary64 (2**-1074 to 2**1024), but {self.name!r} goes from "
                f"2**{low_exponent} to 2**{top + 1}; choose fewer exponent bits or another bias"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Width of a code in bits (binary16: 16)."""
        return self.signed + self.exponent_bits + self.precision - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value (binary16: -14)."""
        return -self.bias if self.precision == 1 and not self.subnormal else 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value (binary16: 15)."""
        return math.frexp(self.max)[1] - 1

    @property
    def max(self) -> float:
        """Largest finite value (binary16: 65504.0)."""
        return self.magnitude(self.max_code)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value (binary16: 2**-14)."""
        return math.ldexp(1.0, self.emin)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value; without subnormals the smallest normal one (binary16: 2**-24)."""
        return math.ldexp(1.0, self.emin - (self.precision - 1 if self.subnormal else 0))

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next value above, ``2**(1 - precision)`` (binary16: 2**-10)."""
        return math.ldexp(1.0, 1 - self.precision)

    @property
    def has_infinity(self) -> bool:
        """Whether the format has infinities."""
        return self.specials in ("ieee", "p3109e")

    @property
    def has_nan(self) -> bool:
        """Whether the format has a NaN."""
        return self.specials != "finite"

    @property
    def has_zero(self) -> bool:
        """Whether the format has a zero; e8m0fnu has none."""
        return self.precision > 1 or self.subnormal

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0.0 is a value of its own."""
        return self.signed and self.specials in ("ieee", "fn", "finite") and self.has_zero

    @property
    def ties_to_even_code(self) -> bool:
        """Whether a tie between values of one significand bit goes to the even code, not to the larger."""
        return self.specials in ("p3109e", "p3109f")

    @property
    def _binade(self) -> int:
        """Codes in one binade, which is also the lowest set bit of the exponent field."""
        return 1 << (self.precision - 1)

    @property
    def sign_code(self) -> int:
        """The sign bit of a code; 0 where there is none (binary16: 0x8000)."""
        return self.signed << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value (binary16: 0x7bff)."""
        ones = (1 << (self.exponent_bits + self.precision - 1)) - 1
        above = {"ieee": self._binade, "fn": 1, "fnuz": 0, "finite": 0, "p3109f": 0, "p3109e": 1}[
            self.specials
        ]
        return ones - above - (self.specials.startswith("p3109") and not self.signed)

    @property
    def infinity_code(self) -> int | None:
        """Code of +infinity, None where there is none (binary16: 0x7c00)."""
        return self.max_code + 1 if self.has_infinity else None

    @property
    def nan_code(self) -> int | None:
        """Code of the (quiet, positive) NaN, None where there is none (binary16: 0x7e00)."""
        return {
            "ieee": self.max_code + 1 + self._binade // 2,
            "fn": self.max_code + 1,
            "fnuz": self.sign_code,
            "finite": None,
            "p3109e": self.sign_code or self.max_code + 2,
            "p3109f": self.sign_code or self.max_code + 1,
        }[self.specials]

    def magnitude(self, code: int) -> float:
        """The finite value of a non-negative code, exact.

        Example:
            >>> BINARY16.magnitude(1) == 2.0**-24, BINARY16.magnitude(0x3C01)
            (True, 1.0009765625)
        """
        exponent, fraction = divmod(code, self._binade)
        if exponent > 0 or not self.has_zero:
            return math.ldexp(self._binade + fraction, exponent - self.bias - self.precision + 1)
        return math.ldexp(fraction, self.emin - self.precision + 1) if self.subnormal else 0.0

    def values(self) -> npt.NDArray[np.float64]:
        """Every finite value, ascending, zero once.

        Returns:
            1-d float64 array.

        Raises:
            ValueError: the format has more than 16 bits.

        Example:
            >>> as_format("e2m1").values()[-8:].tolist()
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        if self.bits > 16:
            raise ValueError(f"values() lists formats of up to 16 bits, but {self.name!r} has {self.bits}")
        positive = np.array([self.magnitude(code) for code in range(self.max_code + 1)])
        return np.unique(np.concatenate([-positive, positive]) + 0.0 if self.signed else positive)


BINARY16 = Format("binary16", 5, 11)
BINARY32 = Format("binary32", 8, 24)
BINARY64 = Format("binary64", 11, 53)
BFLOAT16 = Format("bfloat16", 8, 8)
TF32 = Format("tf32", 8, 11)
# IBM's DLFloat: NaN and infinity share the code of all ones, no subnormals. Its lowest binade, which
# IBM gives to normal values, means zero here, as in every format without subnormals.
DLFLOAT16 = Format("dlfloat16", 6, 10, specials="fn", subnormal=False)
E5M2 = Format("e5m2", 5, 3)
E4M3FN = Format("e4m3fn", 4, 4, specials="fn")
E4M3 = Format("e4m3", 4, 4)
E3M4 = Format("e3m4", 3, 5)
E5M2FNUZ = Format("e5m2fnuz", 5, 3, specials="fnuz")
E4M3FNUZ = Format("e4m3fnuz", 4, 4, specials="fnuz")
E4M3B11FNUZ = Format("e4m3b11fnuz", 4, 4, bias=11, specials="fnuz")
E3M2 = Format("e3m2", 3, 3, specials="finite")
E2M3 = Format("e2m3", 2, 4, specials="finite")
E2M1 = Format("e2m1", 2, 2, specials="finite")
E8M0FNU = Format("e8m0fnu", 8, 1, specials="fn", subnormal=False, signed=False)

NAMED = (
    BINARY16, BINARY32, BINARY64, BFLOAT16, TF32, DLFLOAT16, E5M2, E4M3FN, E4M3, E3M4, E5M2FNUZ, E4M3FNUZ,
    E4M3B11FNUZ, E3M2, E2M3, E2M1, E8M0FNU,
)  # fmt: skip

ALIASES: dict[str, tuple[str, ...]] = {
    "binary16": ("fp16", "float16", "half", "f16", "e5m10"),
    "binary32": ("fp32", "float32", "single", "float", "f32", "e8m23"),
    "binary64": ("fp64", "float64", "double", "f64", "e11m52"),
    "bfloat16": ("bf16", "e8m7"),
    "tf32": ("tensorfloat32", "e8m10"),
    "dlfloat16": ("dlfloat", "1-6-9"),
    "e5m2": ("fp8_e5m2", "float8_e5m2"),
    "e4m3fn": ("fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"),
    "e4m3": ("float8_e4m3",),
    "e3m4": ("fp8_e3m4", "float8_e3m4"),
    "e5m2fnuz": ("fp8_e5m2fnuz", "float8_e5m2fnuz"),
    "e4m3fnuz": ("fp8_e4m3fnuz", "float8_e4m3fnuz"),
    "e4m3b11fnuz": ("fp8_e4m3b11fnuz", "float8_e4m3b11fnuz", "e4m3b11"),
    "e3m2": ("fp6_e3m2", "float6_e3m2fn", "e3m2fn"),
    "e2m3": ("fp6_e2m3", "float6_e2m3fn", "e2m3fn"),
    "e2m1": ("fp4", "fp4_e2m1", "float4_e2m1fn", "float4_e2m1fn_x2", "e2m1fn"),
    "e8m0fnu": ("e8m0", "float8_e8m0fnu"),
}
_BY_NAME = {name: fmt for fmt in NAMED for name in (fmt.name, *ALIASES[fmt.name])}


def as_format(spec: str | Format | Any) -> Format:
    """The format that ``spec`` names.

    Args:
        spec: A ``Format``; a name of IEEE 754, ml_dtypes or everyday use (``"fp16"``, ``"half"``,
            ``"bf16"``, ``"fp8_e4m3"``, ``"float8_e4m3fnuz"``); any ``"eXmY"`` with X exponent and Y
            fraction bits, read the IEEE way (with Y = 0 as ``"fn"``) unless it ends in ``fn`` or
            ``fnuz``; a name of IEEE P3109, ``"binary8p4se"``: bits, precision, signed or unsigned,
            extended or finite; or a numpy or torch dtype.

    Returns:
        The format. The names ``e3m2``, ``e2m3`` and ``e2m1`` are the OCP ones, without specials.

    Raises:
        ValueError: no format has that name.
        TypeError: ``spec`` is no name, format or dtype.

    Example:
        >>> as_format("half").max, as_format("fp8_e4m3").max, as_format("e4m3").max, as_format("e6m9").eps
        (65504.0, 448.0, 240.0, 0.001953125)
    """
    if isinstance(spec, Format):
        return spec
    if not isinstance(spec, str):
        return _BY_NAME[_dtype_name(spec)]
    name = spec.lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    if match := re.fullmatch(r"e(\d{1,2})m(\d{1,2})(fn|fnuz)?", name):
        fraction_bits = int(match[2])
        specials: Any = match[3] or ("ieee" if fraction_bits else "fn")
        return Format(name, int(match[1]), fraction_bits + 1, specials=specials)
    if match := re.fullmatch(r"binary(\d{1,2})p(\d{1,2})([su])([ef])", name):
        bits, precision, signed = int(match[1]), int(match[2]), match[3] == "s"
        exponent_bits = bits - precision + (not signed)
        if exponent_bits < 1 or precision < 1:
            raise ValueError(f"{name!r} needs a precision from 1 to {bits - signed}, got {precision}")
        return Format(name, exponent_bits, precision, specials=f"p3109{match[4]}", signed=signed)  # type: ignore[arg-type]
    raise ValueError(
        f"unknown format {spec!r}; choose from {', '.join(f.name for f in NAMED)}, an everyday name like "
        "'fp16' or 'bf16', 'eXmY' with X exponent and Y fraction bits, 'binary8p4se', or make a Format"
    )


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _BY_NAME and dtype is not None:  # numpy reads None as float64
        try:
            name = np.dtype(dtype).name
        except TypeError:
            pass
    if name not in _BY_NAME:
        raise TypeError(f"a format is given by name, as a Format or by a floating-point dtype, got {dtype!r}")
    return name
