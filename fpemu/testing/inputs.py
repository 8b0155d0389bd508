"""float32 numbers where rounding to a format goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..formats import Format

CHUNK = 1 << 22  # patterns at a time, about 350 MB at work
# Quiet; signalling, which a quantizer that cuts bits off takes for infinity; all ones.
NANS = (0x7FC0_0000, 0x7F80_0001, 0x7FFF_FFFF)


def patterns(fmt: Format, exhaustive: int | None, seed: int) -> Iterator[npt.NDArray[np.uint32]]:
    """Bits of the float32 inputs, in chunks, by sign and then by magnitude."""
    if exhaustive is None:
        yield hard_patterns(fmt, np.random.default_rng(seed))
    elif exhaustive == 16:
        yield np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    else:
        for start in range(0, 1 << 32, CHUNK):
            yield np.uint32(start) + np.arange(CHUNK, dtype=np.uint32)


def hard_patterns(fmt: Format, rng: np.random.Generator) -> npt.NDArray[np.uint32]:
    """Bits of values, midpoints, the numbers next to both, ends, NaNs and random numbers."""
    codes = _codes(fmt, rng)
    values = np.array([fmt.magnitude(code) for code in codes])
    above = np.array([fmt.magnitude(code + 1) for code in codes])  # also the one after the largest
    with np.errstate(over="ignore"):
        points = np.concatenate([values, (values + above) / 2, above[-1:]]).astype(np.float32)
        beside = [np.nextafter(points, np.float32(toward)) for toward in (math.inf, -math.inf)]
    points = np.abs(np.concatenate([points, *beside]))
    info = np.finfo(np.float32)
    ends = np.array([0, info.smallest_subnormal, info.smallest_normal, info.max, math.inf], np.float32)
    one_sign = np.concatenate([points.view(np.uint32), ends.view(np.uint32), np.array(NANS, np.uint32)])
    random = rng.integers(0, 1 << 32, 1 << 12, np.uint32)
    return np.unique(np.concatenate([one_sign, one_sign | np.uint32(1 << 31), random]))


def _codes(fmt: Format, rng: np.random.Generator) -> list[int]:
    """Codes of finite magnitudes, ascending: all, or of many both ends, every binade's and a sample."""
    count = fmt.max_code + 1
    if count <= 1 << 16:
        return list(range(count))
    near = 1 << 12
    binades = np.arange(0, count, 1 << (fmt.precision - 1))
    chosen = [np.arange(near), np.arange(count - near, count), rng.integers(0, count, 1 << 15)]
    chosen += [np.clip(binades + step, 0, count - 1) for step in (-1, 0, 1)]
    return np.unique(np.concatenate(chosen)).tolist()
