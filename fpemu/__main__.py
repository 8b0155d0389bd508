"""The `fpemu` command."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, NoReturn

import typer

from . import reference
from .columns import aligned
from .formats import ALIASES, NAMED, OVERFLOWS, ROUNDINGS, Format, as_format
from .random import Key

app = typer.Typer(
    name="fpemu",
    help="Emulate floating-point formats and see what a network loses in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_FormatName = Annotated[str, typer.Argument(metavar="FORMAT", help="fp16, bf16, e4m3fn, e5m10 ...")]


def _fail(message: object) -> NoReturn:
    typer.echo(f"fpemu: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turn an error about what the user gave into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        _fail(error)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the terminal; called with how many runs are done, and of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("")

    def show(done: int, total: int) -> None:
        bar.start()  # not before: bad input gives one line, without a bar
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@app.command()
def ablate(
    data: Annotated[
        str, typer.Option(help="digits, or fashion-mnist:DIRECTORY of the four .gz files")
    ] = "digits",
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B,FILE", help="built-in names and .toml or .yaml files; default: all built in"
        ),
    ] = "",
    lr: Annotated[float, typer.Option(help="learning rate of SGD")] = 0.003,
    momentum: Annotated[float, typer.Option(help="momentum of SGD")] = 0.0,
    batch: Annotated[int, typer.Option(help="images a step")] = 32,
    epochs: Annotated[int, typer.Option(help="passes over the training images")] = 200,
    seeds: Annotated[int, typer.Option(help="runs of each strategy")] = 1,
    out: Annotated[str, typer.Option(metavar="DIR", help="where results and figures go")] = "fpemu-ablate",
    workers: Annotated[int, typer.Option(help="processes, one thread each")] = 2,
) -> None:
    """Train a small network under several strategies and show what each costs.

    Writes results.json, gradients.png and losses.png to DIR. Runs that DIR already holds are not run again.
    """
    from rich.console import Console

    from .experiments.ablate import ablate as compare
    from .experiments.ablate import table
    from .experiments.strategies import STRATEGIES, load_strategies
    from .experiments.train import Settings

    with _bad_input():
        chosen = load_strategies(strategies or ",".join(STRATEGIES))
        settings = Settings(data, lr, momentum, batch, epochs)
    with _bad_input(), _progress() as progress:
        results = compare(chosen, settings, seeds=seeds, out=out, workers=workers, progress=progress)
    console = Console()
    console.print(table(results))
    spread = "" if seeds == 1 else f" Means of {seeds} seeds, ± sample standard deviation."
    console.print(
        f"results.json, gradients.png and losses.png are in {out}/.{spread}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if settings.lr < 0.01 and settings.momentum == 0:
        console.print(
            "The learning rate is low on purpose, so that updates fall below half an ulp of the weights; "
            "an ordinary one hides it: --lr 0.1 --momentum 0.9.",
            soft_wrap=True,
            highlight=False,
        )


@app.command()
def doctor() -> None:
    """Say what is installed, whether kernels compile, and whether a GPU agrees with the CPU."""
    from .doctor import lines

    for name, text in lines():
        typer.echo(f"{name:<9} {text}")


@app.command()
def bench(
    size_log2: Annotated[
        int | None,
        typer.Option(
            min=10, max=30, help="elements, as a power of two: 24, with --gemm 20; not for --training"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="rounds; medians are compared")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    training: Annotated[
        bool, typer.Option("--training", help="measure training steps with rounding, beside FP32")
    ] = False,
    gemm: Annotated[
        bool, typer.Option("--gemm", help="measure matrix products rounded as they accumulate, on the CPU")
    ] = False,
) -> None:
    """Measure rounding beside the copies it cannot beat, on one thread of a CPU or on a GPU."""
    from .bench import run, run_cuda

    with _bad_input():
        if device not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {device!r}; choose from cpu, cuda")
        if gemm:
            from .bench_gemm import run as run_gemm

            if training or device != "cpu":
                raise ValueError("bench --gemm runs on the CPU, and without --training")
            run_gemm(size_log2 or 20, repeats)
        elif training:
            from .bench_training import run as run_training

            run_training(repeats, device)
        elif device == "cpu":
            run(size_log2 or 24, repeats)
        else:
            run_cuda(size_log2 or 24, repeats)


@app.command()
def check(
    quantizer: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="of one float32 numpy array")],
    fmt: _FormatName,
    rounding: Annotated[str, typer.Option(help=", ".join(ROUNDINGS))] = "nearest_even",
    overflow: Annotated[str, typer.Option(help=", ".join(OVERFLOWS))] = "ieee",
    exhaustive: Annotated[
        int, typer.Option(metavar="16|32", help="float32 patterns, as a power of two; default: hard inputs")
    ] = 0,
) -> None:
    """Compare a quantizer, found in the current directory or installed, with the exact reference.

    The exit code is 1 if any result is wrong, 2 if the quantizer cannot be checked.
    """
    from .testing import check as compare

    with _bad_input():
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


@app.command()
def formats() -> None:
    """List the named formats."""
    rows = [("name", "bits", "largest", "smallest normal", "smallest", "eps", "also called")]
    for f in NAMED:
        limits = (f"{f.max:.6g}", _power(f.smallest_normal), _power(f.smallest_subnormal), _power(f.eps))
        rows.append((f.name, str(f.bits), *limits, " ".join(ALIASES[f.name])))
    for line in aligned(rows):
        typer.echo(line)


@app.command()
def show(fmt: _FormatName) -> None:
    """Show one format: its fields and limits and, up to 8 bits, all its values."""
    with _bad_input():
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


@app.command(name="round", context_settings={"ignore_unknown_options": True})
def round_(
    value: Annotated[str, typer.Argument(help="a decimal, a fraction, a hexadecimal float, inf or nan")],
    fmt: _FormatName,
    rounding: Annotated[str, typer.Option(help=", ".join(ROUNDINGS))] = "nearest_even",
    overflow: Annotated[str, typer.Option(help=", ".join(OVERFLOWS))] = "ieee",
    seed: Annotated[int, typer.Option(help="of the random word that stochastic rounding draws")] = 0,
) -> None:
    """Round one number, exactly as it is written, and show its code and what was lost."""
    with _bad_input():
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


if __name__ == "__main__":
    app()
