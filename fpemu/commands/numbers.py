"""`fpemu formats`, `fpemu show` and `fpemu round`: formats, and single numbers in them."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Annotated

import typer

from .. import reference
from ..columns import aligned
from ..formats import ALIASES, NAMED, OVERFLOWS, ROUNDINGS, Format, as_format
from ..random import Key
from .common import FormatName, bad_input


def formats() -> None:
    """List the named formats."""
    rows = [("name", "bits", "largest", "smallest normal", "smallest", "eps", "also called")]
    for f in NAMED:
        limits = (f"{f.max:.6g}", _power(f.smallest_normal), _power(f.smallest_subnormal), _power(f.eps))
        rows.append((f.name, str(f.bits), *limits, " ".join(ALIASES[f.name])))
    for line in aligned(rows):
        typer.echo(line)


def show(fmt: FormatName) -> None:
    """Show one format: its fields and limits and, up to 8 bits, all its values."""
    with bad_input():
        f = as_format(fmt)
    yes = {True: "yes", False: "no"}
    lines = {
        "bits": f"{f.bits}: {int(f.signed)} sign, {f.exponent_bits} exponent, {f.precision - 1} fraction",
        "precision": f"{f.precision} significand bits",
        "bias": str(f.bias),
        "exponents": f"{f.emin} to {f.emax}",
        "largest": repr(f.max),
        "smallest normal": f"{_power(f.smallest_normal)} = {f.smallest_normal!r}",
        "smallest": f"{_power(f.smallest_subnormal)} = {f.smallest_subnormal!r}",
        "eps": f"{_power(f.eps)} = {f.eps!r}",
        "specials": f.specials,
        "infinity": yes[f.has_infinity],
        "NaN": yes[f.has_nan],
        "-0.0": yes[f.has_negative_zero],
        "subnormals": yes[f.subnormal],
    }
    typer.echo(f.name)
    for name, text in lines.items():
        typer.echo(f"  {name:<15}  {text}")
    if f.bits <= 8:
        typer.echo("\ncode  value")
        for code in range(2**f.bits):
            typer.echo(f"{code:#04x}  {reference.decode(code, f)!r}")


def round_(
    value: Annotated[str, typer.Argument(help="a decimal, a fraction, a hexadecimal float, inf or nan")],
    fmt: FormatName,
    rounding: Annotated[str, typer.Option(help=", ".join(ROUNDINGS))] = "nearest_even",
    overflow: Annotated[str, typer.Option(help=", ".join(OVERFLOWS))] = "ieee",
    seed: Annotated[int, typer.Option(help="of the random word that stochastic rounding draws")] = 0,
) -> None:
    """Round one number, exactly as it is written, and show its code and what was lost."""
    with bad_input():
        f = as_format(fmt)
        x = _parse(value)
        for name, given, known in (("rounding", rounding, ROUNDINGS), ("overflow", overflow, OVERFLOWS)):
            if given not in known:
                raise ValueError(f"unknown {name} {given!r}; choose from {', '.join(known)}")
        word = Key(seed).word(0) if rounding == "stochastic" else None
    y = reference.round_value(x, f, rounding, overflow=overflow, word=word)
    typer.echo(f"value  {y!r}{'' if y == 0 or not math.isfinite(y) else f' = {y.hex()}'}")
    typer.echo(f"code   {_code(y, f)}")
    if isinstance(x, Fraction) and math.isfinite(y):
        error = Fraction(y) - x
        relative = f", {_short(abs(error / x), 3)} of the value" if x else ""
        typer.echo(f"error  {_short(error, 6)}{relative}")


def _short(x: Fraction, digits: int) -> str:
    if x == 0 or 1e-300 < abs(x) < 1e300:
        return f"{float(x):.{digits}g}"
    return f"{Decimal(x.numerator) / Decimal(x.denominator):.{digits}g}"  # beyond the range of float


def _code(y: float, f: Format) -> str:
    """Hexadecimal, then sign, exponent and fraction in binary."""
    if y != y and not f.has_nan:
        return f"none: {f.name} has no NaN"
    code = reference.encode(y, f)
    bits = f"{code:0{f.bits}b}"
    parts = (
        bits[: f.signed],
        bits[f.signed : f.signed + f.exponent_bits],
        bits[f.signed + f.exponent_bits :],
    )
    return f"{code:#0{2 + -(-f.bits // 4)}x} = {' '.join(part for part in parts if part)}"


def _parse(text: str) -> Fraction | float:
    """A number as it is written, no rounding; a float for infinities, NaN and -0."""
    word = text.strip().lower()
    if re.fullmatch(r"[+-]?(inf|infinity|nan)", word):
        return float(word)
    if re.search(r"[ep][+-]?\d{6,}$", word):
        raise ValueError(f"the exponent of {text!r} is out of reach; write at most five digits")
    try:
        x = _parse_hexadecimal(word) if "0x" in word else Fraction(word)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is no number; write 0.1, 1/3, -2e-8, 0x1.8p-3, inf or nan") from None
    return -0.0 if x == 0 and word.startswith("-") else x


def _parse_hexadecimal(word: str) -> Fraction:
    """As ``float.fromhex``, but exact with any number of digits."""
    match = re.fullmatch(r"([+-]?)0x([0-9a-f]*)(?:\.([0-9a-f]*))?(?:p([+-]?\d+))?", word)
    if match is None:
        raise ValueError(word)
    sign, whole, part, exponent = (group or "" for group in match.groups())
    return int(f"{sign}{whole}{part}", 16) * Fraction(2) ** (int(exponent or 0) - 4 * len(part))


def _power(x: float) -> str:
    return f"2^{math.frexp(x)[1] - 1}"
