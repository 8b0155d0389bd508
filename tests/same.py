"""Equality of floating-point results, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def same(a: npt.ArrayLike, b: npt.ArrayLike) -> bool:
    """Whether both hold the same values: -0.0 told from 0.0, any NaN the same as any other.

    Shapes and dtypes must agree too. Numbers and lists become the array that numpy makes of them.
    """
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and not differ(a, b).any()


def differ(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Where two arrays of one shape and dtype are not the same."""
    a, b = np.asarray(a), np.asarray(b)
    bits = f"u{a.dtype.itemsize}"
    return (a.view(bits) != b.view(bits)) & ~(np.isnan(a) & np.isnan(b))
