"""Random words from an explicit key: the same on any device, thread count, chunking or rank.

The map, written down here once. With ``i`` the global index of an element (row-major, counted from the
key's ``offset``), ``b, r = divmod(i, 1024)``, ``t, h = divmod(r % 512, 4)`` and
``w, s = divmod(h, 2)``, the upper 16 bits of the element's 32-bit word are bits ``16 * s`` and up of word
``w + 2 * (r >= 512)`` of

    Philox4x32-10(counter=(j mod 2**32, j >> 32, step mod 2**32, step >> 32), key=(seed, stream))

with ``j = 256 * b + t``; the lower 16 bits are those of ``j = 256 * b + 128 + t``. So one call serves the
elements ``4t`` to ``4t + 3`` and ``512 + 4t`` to ``515 + 4t`` of a block of 1024: two 64-bit lanes for a
CPU's vectors, two 128-bit accesses for a GPU's thread. The upper half nearly always decides by itself; a
kernel computes the lower half where it matters, and so half as many words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, in units of 2**-32
MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four words of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

    Args:
        counter: Four integers below 2**32.
        key: Two integers below 2**32.

    Returns:
        Four integers below 2**32.

    Example:
        >>> [f"{word:08x}" for word in philox4x32((0, 0, 0, 0), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & MASK, (low >> 32) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class Key:
    """Which random numbers a call draws: a pure value, no hidden state.

    Attributes:
        seed: First word of the Philox key, below 2**32.
        stream: Second word of the Philox key, below 2**32; ``fold_in`` changes both.
        step: Upper half of the Philox counter, below 2**64: a fresh set of words a training step.
        offset: Global index of a call's first element: a shard draws the slice of the whole.

    Raises:
        TypeError: a field is not an int.
        ValueError: a field is out of range.

    Example:
        >>> Key(1).word(0) == Key(1, offset=0).word(0) != Key(1, step=1).word(0)
        True
        >>> Key(1, offset=5).word(0) == Key(1).word(5)
        True
    """

    seed: int
    stream: int = 0
    step: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("seed", 32), ("stream", 32), ("step", 64), ("offset", 63)):
            value = getattr(self, name)
            if isinstance(value, np.integer):
                value = int(value)
                object.__setattr__(self, name, value)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Key needs an int for {name}, got {value!r}")
            if not 0 <= value < 2**bits:
                raise ValueError(f"Key needs 0 <= {name} < 2**{bits}, got {value}")

    def fold_in(self, data: int | str) -> Key:
        """A key of its own for a rank, a step or a name: same data, same key, and else independent.

        Args:
            data: A string, or an int from 0 to 2**64 - 1.

        Returns:
            A key with another seed and stream, the same step and offset.

        Example:
            >>> Key(0).fold_in("layer1.weight") == Key(0).fold_in("layer1.weight") != Key(0).fold_in("layer2")
            True
        """
        if isinstance(data, str):
            digest = hashlib.blake2b(data.encode(), digest_size=12).digest()
            low, middle, high = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
        elif isinstance(data, (int, np.integer)) and not isinstance(data, bool) and 0 <= data < 2**64:
            low, middle, high = int(data) & MASK, int(data) >> 32, 0
        else:
            raise ValueError(f"fold_in needs a string or an int with 0 <= data < 2**64, got {data!r}")
        # The fourth counter word keeps folds of ints and of names apart, and both from most steps.
        seed, stream, _, _ = philox4x32(
            (low, middle, high, MASK - isinstance(data, str)), (self.seed, self.stream)
        )
        return replace(self, seed=seed, stream=stream)

    def at(self, step: int) -> Key:
        """This key at another step."""
        return replace(self, step=step)

    def word(self, index: int) -> int:
        """The 32-bit word that element ``index`` of a call draws: the map, in Python, for checking."""
        block, place = divmod(self.offset + index, 1024)
        call, half = divmod(place % 512, 4)
        word, side = divmod(half, 2)
        upper, lower = (
            philox4x32(
                (counter & MASK, counter >> 32, self.step & MASK, self.step >> 32), (self.seed, self.stream)
            )[word + 2 * (place >= 512)]
            >> (16 * side)
            & 0xFFFF
            for counter in (256 * block + call, 256 * block + 128 + call)
        )
        return upper << 16 | lower
