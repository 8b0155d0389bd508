"""From the formats of products and sums to the loop of `gemm` that is exact for them, and its rules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats import BINARY16, BINARY32, BINARY64, Format
from . import gemm
from .rules import Plan, carried, plan
from .scalar import Rule
from .sums import F16C

# Of operands of up to p bits, a float32 sum rounds to p bits like the exact one if 24 >= 2p + 2. Where one of
# them has more than p bits, as an exact product does, the sum must be rounded to odd.
INNOCUOUS = 11
WIDEST = BINARY64.precision - 2  # what a float64 rounded to odd rounds to like the exact number
WIDEST_RANDOM = BINARY64.precision - 1 - 32  # and with 32 bits of fraction left
LARGEST = 1000  # exponent of sums below which float64 does not overflow


class Rounding(NamedTuple):
    """How one kind of operation is rounded."""

    fmt: Format
    rounding: str
    overflow: str

    def plan(self, carrier: Format) -> Plan:
        """See `rules.plan`."""
        return plan(self.fmt, self.rounding, self.overflow, carrier)

    @property
    def random(self) -> bool:
        """Whether it draws random words."""
        return self.rounding == "stochastic"


class Sums(NamedTuple):
    """How `gemm` carries out a product: see its ``multiply``."""

    way: int
    outer_way: int
    rules: npt.NDArray[np.uint32]
    rules64: npt.NDArray[np.uint64]
    random: npt.NDArray[np.bool_]  # whether products, sums, and sums of chunks are rounded so
    short: npt.NDArray[np.bool_]  # whether `stochastic_short` does for them


@cache
def sums(
    product: Rounding | None, inner: Rounding, outer: Rounding | None, single: bool, exact: bool
) -> Sums:
    """The fastest exact way.

    Args:
        product: Of each product; None: it stays exact.
        inner: Of each sum of terms.
        outer: Of each sum of chunks; None: there are none.
        single: Whether the factors are stored as float32.
        exact: Whether each product is exact in float32.
    """
    three = (product or inner, inner, outer or inner)
    rules64 = np.stack([one.plan(BINARY64).words for one in three])
    random = np.array([product is not None and product.random, inner.random, three[2].random])
    way, outer_way = gemm.ANY, gemm.ANY
    if single:
        way, outer_way = _way(product, inner, exact), _sum_way(three[2], True)
    if way == gemm.ANY and product is not None:
        way = gemm.ANY_PRODUCT
    rules = np.stack([_words32(one) for one in three])
    return Sums(way, outer_way, rules, rules64, random, np.array([_is_short(one) for one in three]))


def _is_short(one: Rounding) -> bool:
    rule = Rule(*one.plan(BINARY64).words)
    same = rule.infinite == rule.over_positive == rule.over_negative
    usual = one.fmt.signed and one.fmt.subnormal and one.fmt.has_negative_zero
    # The power of two that a sum is scaled by must be a normal float64.
    return bool(same and usual and one.fmt.precision <= WIDEST_RANDOM and one.fmt.emin > -900)


def _words32(one: Rounding) -> npt.NDArray[np.uint32]:
    """The rule in float32; zeros where float32 does not hold the format."""
    if not _held(one.fmt):
        return np.zeros(len(Rule._fields), np.uint32)
    return np.asarray(one.plan(BINARY32).words, np.uint32)


def _held(fmt: Format) -> bool:
    """Whether float32 holds the format's values."""
    try:
        carried(fmt)
    except ValueError:
        return False
    return fmt.precision <= BINARY32.precision


def _way(product: Rounding | None, inner: Rounding, exact: bool) -> int:
    """How terms are added; `gemm.ANY` where only float64 will do."""
    way = _sum_way(inner, exact)
    if product is None or way == gemm.ANY:
        return way
    if way == gemm.SINGLE:
        native = _sum_way(product, exact) == gemm.SINGLE
        return gemm.SINGLE_PRODUCT if native else gemm.ANY
    same = _sum_way(product, exact) == way and product.fmt.precision <= inner.fmt.precision <= INNOCUOUS
    return way + 1 if same else gemm.ANY


def _sum_way(one: Rounding, exact: bool) -> int:
    """How a sum of float32 terms that are exact is rounded."""
    if one.rounding != "nearest_even" or not _held(one.fmt):
        return gemm.ANY
    if carried(one.fmt) == BINARY32:
        return gemm.SINGLE if one.overflow == "ieee" else gemm.ANY
    if not exact or one.fmt.precision > BINARY32.precision - 2:
        return gemm.ANY
    if F16C and one.overflow == "ieee" and replace(one.fmt, name=BINARY16.name) == BINARY16:
        return gemm.HALF
    loops = {"nearest_even_magic": gemm.MAGIC, "nearest_even_wide": gemm.WIDE}
    return loops.get(one.plan(BINARY32).loop, gemm.ANY)
