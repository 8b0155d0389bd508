"""`fpemu check` and `fpemu doctor`: is this right, and is this machine."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..formats import OVERFLOWS, ROUNDINGS
from .common import FormatName, bad_input


def doctor() -> None:
    """Say what is installed, whether kernels compile, and whether a GPU agrees with the CPU."""
    from ..doctor import lines

    for name, text in lines():
        typer.echo(f"{name:<9} {text}")


def check(
    quantizer: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="of one float32 numpy array")],
    fmt: FormatName,
    rounding: Annotated[str, typer.Option(help=", ".join(ROUNDINGS))] = "nearest_even",
    overflow: Annotated[str, typer.Option(help=", ".join(OVERFLOWS))] = "ieee",
    exhaustive: Annotated[
        int, typer.Option(metavar="16|32", help="float32 patterns, as a power of two; default: hard inputs")
    ] = 0,
) -> None:
    """Compare a quantizer, found in the current directory or installed, with the exact reference.

    The exit code is 1 if any result is wrong, 2 if the quantizer cannot be checked.
    """
    from ..testing import check as compare

    with bad_input():
        function = _import(quantizer)
        report = compare(function, fmt, rounding, overflow=overflow, exhaustive=exhaustive or None)  # type: ignore[arg-type]
    typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


def _import(target: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"a quantizer is given as package.module:function, got {target!r}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"cannot import {module!r}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module!r} has no {name!r}; give the name of a function in it")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{target!r} is no function but {found!r}")
    return found
