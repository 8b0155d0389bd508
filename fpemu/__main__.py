"""The `fpemu` command."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    model: Annotated[
        str, typer.Option(help="mlp or resnet8 for images, gru or transformer for text")
    ] = "mlp",
    data: Annotated[
        str,
        typer.Option(help="digits, pydoc, or fashion-mnist:DIRECTORY; default: digits, or pydoc for text"),
    ] = "",
    data_dir: Annotated[
        str, typer.Option(metavar="DIR", help="of Fashion-MNIST's four files: fashion-mnist:DIR for short")
    ] = "",
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B,FILE", help="built-in names and .toml or .yaml files; default: all built in"
        ),
    ] = "",
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate; the mlp's default is 0.003")] = None,
    momentum: Annotated[float | None, typer.Option(help="momentum of SGD; the mlp's default is 0")] = None,
    batch: Annotated[int | None, typer.Option(help="images or texts a step; 32")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the training data; 200")] = None,
    steps: Annotated[int | None, typer.Option(help="most steps of a run")] = None,
    warmup: Annotated[
        int | None, typer.Option(help="steps in which the rate rises; with --grid, of the runs with warm-up")
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="each part of a step alone in low precision, then all of them")
    ] = False,
    formats: Annotated[str, typer.Option(metavar="A,B", help="of the grid; fp16,bf16")] = "",
    roundings: Annotated[str, typer.Option(metavar="A,B", help="of the grid; nearest,stochastic,kahan")] = "",
    scales: Annotated[
        str, typer.Option(metavar="A,B", help="loss scales of the grid; none,8,128,32768,dynamic")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="short runs of the grid: the mlp's take minutes")
    ] = False,
    seeds: Annotated[int, typer.Option(help="runs of each strategy")] = 1,
    out: Annotated[str, typer.Option(metavar="DIR", help="where results and figures go")] = "fpemu-ablate",
    workers: Annotated[int, typer.Option(help="processes, one thread each")] = 2,
) -> None:
    """Train a small network under several strategies and show what each costs.

    Writes results.json, gradients.png and losses.png to DIR; with --grid, results.json, results.parquet and
    grid.png. Runs that DIR already holds are not run again.
    """
    from .experiments.grid import FORMATS, PRESETS, QUICK, ROUNDINGS, SCALES, ablate_grid, parse_scale
    from .experiments.grid import grid as strategies_of
    from .experiments.settings import Settings
    from .experiments.strategies import STRATEGIES, load_strategies

    with _bad_input():
        given: dict[str, Any] = {
            "data": _data(data, data_dir),
            "optimizer": optimizer,
            "lr": lr,
            "momentum": momentum,
            "batch": batch,
            "epochs": epochs,
            "steps": steps,
            "warmup": None if grid else warmup,
        }
        _refuse_without_grid(grid, strategies, formats, roundings, scales, quick)
        if model not in PRESETS:
            raise ValueError(f"unknown model {model!r}; choose from {', '.join(PRESETS)}")
        preset = (QUICK if quick else PRESETS)[model] if grid or model != "mlp" else Settings()
        if optimizer == "adam" and momentum is None:
            preset = replace(preset, momentum=0.0)
        settings = replace(preset, **{name: value for name, value in given.items() if value is not None})
        if grid:
            scales_of_grid = [parse_scale(text) for text in _words(scales)] or SCALES
            chosen = list(
                strategies_of(
                    settings, _words(formats) or FORMATS, _words(roundings) or ROUNDINGS, scales_of_grid
                )
            )
        else:
            chosen = load_strategies(strategies or ",".join(STRATEGIES))
    with _bad_input(), _progress() as progress:
        if grid:
            warm = (100 if quick else 500) if warmup is None else warmup
            results = ablate_grid(
                settings, chosen, warmup=warm, seeds=seeds, out=out, workers=workers, progress=progress
            )
        else:
            from .experiments.ablate import ablate as compare

            results = compare(chosen, settings, seeds=seeds, out=out, workers=workers, progress=progress)
    _report(results, grid, seeds, out)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _data(data: str, directory: str) -> str | None:
    if data and directory:
        raise ValueError(f"--data {data} and --data-dir {directory} both name data; give one")
    return f"fashion-mnist:{directory}" if directory else data or None


def _refuse_without_grid(
    grid: bool, strategies: str, formats: str, roundings: str, scales: str, quick: bool
) -> None:
    """Options that would be ignored."""
    if grid and strategies:
        raise ValueError("--grid has strategies of its own; leave out --strategies")
    for name, value in {
        "--formats": formats, "--roundings": roundings, "--scales": scales, "--quick": quick
    }.items():  # fmt: skip
        if value and not grid:
            raise ValueError(f"{name} is for --grid; add it")


def _report(results: list[Any], grid: bool, seeds: int, out: str) -> None:
    """What to look at."""
    from rich.console import Console

    from .experiments.ablate import table

    console = Console()
    if grid:
        files = f"results.parquet, of {len(results)} runs, and grid.png are in {out}/."
    else:
        console.print(table(results))
        spread = "" if seeds == 1 else f" Means of {seeds} seeds, ± sample standard deviation."
        files = f"results.json, gradients.png and losses.png are in {out}/.{spread}"
    console.print(files, soft_wrap=True, highlight=False, markup=False)
    settings = results[0].settings
    # Without momentum, the rate at which weights move.
    if (
        settings.model == "mlp"
        and settings.optimizer == "sgd"
        and settings.lr / (1 - settings.momentum) < 0.011
    ):
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
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="directory of a Recorder, or a pattern of such")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="the HTML file")] = "report.html",
    fmt: Annotated[str, typer.Option("--format", help="whose losses are shown")] = "fp16",
) -> None:
    """Write what was recorded of a run to one HTML page that needs no network."""
    from .records import load
    from .report import summary, write_report

    with _bad_input():
        records = load(run)
        lines = summary(records, fmt)
        write_report(records, out, fmt)
    for line in lines:
        typer.echo(line)
    typer.echo(f"The page is {out}.")


@app.command()
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="directory that a Recorder writes to")],
    fmt: Annotated[str, typer.Option("--format", help="whose losses are shown")] = "fp16",
    every: Annotated[float, typer.Option(min=0.1, help="seconds from one look to the next")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="look once")] = False,
) -> None:
    """Show a run in the terminal while it trains: the last recorded step, until the run ends or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from .terminal import view

    with _bad_input():
        as_format(fmt)
        shown, finished = view(run, fmt)
    console = Console()
    if once or finished:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False) as live:
        try:
            while not finished:
                time.sleep(every)
                shown, finished = view(run, fmt)
                live.update(shown, refresh=True)
        except KeyboardInterrupt:
            return


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
