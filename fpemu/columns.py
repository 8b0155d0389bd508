"""Rows of text as a table with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines whose cells are padded to the width of their column, two spaces between.

    Args:
        rows: Rows of as many cells each.
        right: Which columns are aligned to the right.

    Example:
        >>> aligned([("a", "bits"), ("fp16", "16")], right=[1])
        ['a     bits', 'fp16    16']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
