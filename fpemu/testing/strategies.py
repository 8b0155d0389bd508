"""hypothesis strategies for tests of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats import NAMED, Format, Specials, as_format
from ..kernels.rules import carried
from ..reference import decode
from .inputs import NANS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def _hypothesis(name: str) -> Any:
    try:
        from hypothesis import strategies
    except ImportError:
        raise ImportError(
            f"fpemu.testing.{name}() needs hypothesis; install it: pip install 'fpemu[test]'"
        ) from None
    return strategies


P3109 = tuple(
    f"binary{bits}p{precision}{sign}{domain}"
    for bits in (4, 6, 8, 15)
    for precision in (1, 2, 3, 4)
    for sign in "su"
    for domain in "ef"
    if 1 <= bits - precision + (sign == "u") <= 7  # float32 holds them
)


def formats() -> SearchStrategy[Format]:
    """Formats that float32 carries: named, of IEEE P3109, and made up.

    Raises:
        ImportError: hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(formats())
        ... def test(fmt):
        ...     assert fmt.max <= np.finfo(np.float32).max
        >>> test()
    """
    st = _hypothesis("formats")
    named = [fmt for fmt in map(as_format, (*NAMED, *P3109)) if _is_carried(fmt)]

    @st.composite
    def custom(draw: Any) -> Format | None:
        specials: Specials = draw(st.sampled_from(["ieee", "fn", "fnuz", "finite", "p3109e", "p3109f"]))
        exponent_bits, precision = draw(st.integers(1, 8)), draw(st.integers(1, 24))
        top = 2**exponent_bits - 1 - (specials == "ieee")
        low, high = top - 127, 127
        bias = draw(st.integers(low, high)) if low <= high else None
        subnormal, signed = draw(st.booleans()), draw(st.booleans())
        try:
            fmt = Format("custom", exponent_bits, precision, bias, specials, subnormal, signed)
        except ValueError:
            return None
        return fmt if _is_carried(fmt) else None

    strategy: SearchStrategy[Format] = st.one_of(
        st.sampled_from(named), custom().filter(lambda fmt: fmt is not None)
    )
    return strategy


def _is_carried(fmt: Format) -> bool:
    try:
        return carried(fmt) == fmt
    except ValueError:
        return False


def values(fmt: str | Format) -> SearchStrategy[float]:
    """Values of a format, and what else it has: infinities, NaN, -0.0; float32 holds each.

    Args:
        fmt: A format that float32 carries, or its name.

    Raises:
        ImportError: hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(values("e2m1"))
        ... def test(x):
        ...     assert abs(x) in (0, 0.5, 1, 1.5, 2, 3, 4, 6)
        >>> test()
    """
    st = _hypothesis("values")
    target = carried(as_format(fmt))
    strategy: SearchStrategy[float] = st.builds(
        lambda magnitude, sign: decode(magnitude | sign, target),
        st.one_of(
            st.integers(0, ((1 << target.bits) - 1) & ~target.sign_code), st.sampled_from(_edges(target))
        ),
        st.sampled_from([0, target.sign_code]),
    )
    return strategy


def _edges(fmt: Format) -> list[int]:
    """Codes of the smallest and largest, subnormal and normal magnitudes."""
    normal = 1 << (fmt.precision - 1)
    codes = (0, 1, normal - 1, normal, normal + 1, fmt.max_code - 1, fmt.max_code)
    return [code for code in codes if 0 <= code <= fmt.max_code]


def hard_inputs(fmt: str | Format) -> SearchStrategy[np.float32]:
    """float32 numbers where rounding to a format goes wrong.

    Values and midpoints of two, the float32 numbers next to both, NaNs and infinities, and any pattern.

    Args:
        fmt: A format that float32 carries, or its name.

    Raises:
        ImportError: hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(hard_inputs("fp16"))
        ... def test(x):
        ...     assert x.dtype == np.float32
        >>> test()
    """
    st = _hypothesis("hard_inputs")
    target = carried(as_format(fmt))

    def point(code: int, half: bool, step: int, sign: int) -> np.float32:
        low, high = target.magnitude(code), target.magnitude(code + 1)
        with np.errstate(over="ignore"):
            near = np.float32((low + high) / 2 if half else low)
        # Past either end the next pattern is no number: there the point itself.
        pattern = int(near.view(np.uint32)) + step
        return _from_bits(pattern if 0 <= pattern <= 0x7F80_0000 else pattern - step, sign)

    signs = st.sampled_from([0, 1])
    codes = st.one_of(
        st.integers(0, target.max_code), st.sampled_from([*_edges(target), target.max_code + 1])
    )
    strategy: SearchStrategy[np.float32] = st.one_of(
        st.builds(point, codes, st.booleans(), st.integers(-1, 1), signs),
        st.builds(_from_bits, st.sampled_from([0, 0x7F80_0000, *NANS]), signs),
        st.builds(_from_bits, st.integers(0, 0x7FFF_FFFF), signs),
    )
    return strategy


def _from_bits(pattern: int, sign: int) -> np.float32:
    return np.uint32(pattern | sign << 31).view(np.float32)
