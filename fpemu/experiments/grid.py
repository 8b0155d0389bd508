"""The ablation of 16-bit training: one part of a step at a time in low precision, then all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..files import replace_whole
from ..formats import as_format
from .models import build
from .result import Result, Run
from .runs import finish
from .settings import Settings
from .strategies import Strategy, check_names
from .train import check_model

Scale = float | Literal["dynamic"] | None

AXES = ("weights", "activations", "gradients", "accumulator", "momentum", "statistics")
FORMATS = ("fp16", "bf16")
ROUNDINGS = ("nearest", "stochastic", "kahan")
_HOW: dict[str, dict[str, Any]] = {  # of LowPrecision
    "nearest": {},
    "stochastic": {"rounding": "stochastic"},
    "kahan": {"kahan": True},
}
SCALES: tuple[Scale, ...] = (None, 8.0, 128.0, 32768.0, "dynamic")

# Rates at which the updates of 16-bit weights are lost; higher ones hide it.
PRESETS = {
    "mlp": Settings(lr=0.0003, momentum=0.9, batch=32, epochs=100),
    "resnet8": Settings(lr=0.0001, momentum=0.9, batch=16, epochs=100, model="resnet8", steps=3000),
    "gru": Settings("pydoc", lr=0.02, momentum=0.9, batch=16, model="gru", steps=800),
    "transformer": Settings("pydoc", lr=0.001, batch=16, model="transformer", optimizer="adam", steps=800),
}
QUICK = {
    "mlp": dataclasses.replace(PRESETS["mlp"], lr=0.001, batch=16, epochs=15),
    **{name: dataclasses.replace(PRESETS[name], steps=60) for name in ("resnet8", "gru", "transformer")},
}


def grid(
    settings: Settings,
    formats: Sequence[str] = FORMATS,
    roundings: Sequence[str] = ROUNDINGS,
    scales: Sequence[Scale] = SCALES,
) -> Iterator[Strategy]:
    """The strategies of the ablation: FP32, each axis alone, gradients and everything by loss scale.

    Args:
        settings: Tell whether there is momentum, and batch normalization's statistics, to round.
        formats: Names of the formats beside FP32.
        roundings: Of ``ROUNDINGS``. Kahan's compensation is for weights; the rest is then rounded to nearest.
        scales: As a Strategy's ``loss_scale``.

    Yields:
        Strategies with names such as ``"weights fp16 kahan"`` and ``"all bf16 nearest x128"``. Where
        everything is rounded, Adam's moments are scaled, each tensor by a power of two of its own.

    Raises:
        ValueError: an unknown format or rounding, a bad scale, or none of one.

    Example:
        >>> [s.name for s in grid(Settings(), ["bf16"], ["nearest"], [None, 8])]  # doctest: +ELLIPSIS
        ['fp32', 'weights bf16 nearest', 'activations bf16 nearest', ..., 'all bf16 nearest x8']
    """
    _check(formats, roundings, scales)
    axes = [
        axis
        for axis in AXES
        if (axis != "momentum" or settings.states) and (axis != "statistics" or settings.model == "resnet8")
    ]
    # Sums as short as these networks' hardly lose, and rounding each addition takes longest of all.
    stored = [axis for axis in axes if axis != "accumulator"]
    adam = settings.optimizer == "adam"
    yield Strategy("fp32")
    for axis in axes:
        for fmt in formats:
            for rounding in roundings:
                if rounding != "kahan" or axis == "weights":
                    yield _strategy(axis, [axis], fmt, rounding, None, adam)
    for fmt in formats:
        for scale in scales:
            if scale is not None and "nearest" in roundings:
                yield _strategy("gradients", ["gradients"], fmt, "nearest", scale, adam)
    for fmt in formats:
        for rounding in roundings:
            for scale in scales:
                yield _strategy("all", stored, fmt, rounding, scale, adam)


def parse_scale(text: str) -> Scale:
    """A loss scale as it is written: a number, ``dynamic`` or ``none``.

    Example:
        >>> [parse_scale(text) for text in ("none", "128", "dynamic")]
        [None, 128.0, 'dynamic']
    """
    if text in ("none", "dynamic"):
        return None if text == "none" else "dynamic"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a loss scale is a number, none or dynamic; got {text!r}") from None


def _check(formats: Sequence[str], roundings: Sequence[str], scales: Sequence[Scale]) -> None:
    for name, given in (("format", formats), ("rounding", roundings), ("loss scale", scales)):
        if not given:
            raise ValueError(f"a grid needs at least one {name}, got none")
    for fmt in formats:
        as_format(fmt)
    for rounding in roundings:
        if rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {rounding!r} of a grid; choose from {', '.join(ROUNDINGS)}")


def _role(fmt: str, rounding: str) -> dict[str, str]:
    return {"format": fmt, "rounding": "stochastic" if rounding == "stochastic" else "nearest_even"}


def _strategy(axis: str, axes: list[str], fmt: str, rounding: str, scale: Scale, adam: bool) -> Strategy:
    named = "" if scale is None else " dynamic" if scale == "dynamic" else f" x{scale:g}"
    role = _role(fmt, rounding) if rounding == "stochastic" else fmt
    roles = {"activations": ("activation",), "gradients": ("gradient", "weight_gradient")}
    accumulator = {"accumulate": fmt, "rounding": role["rounding"]} if isinstance(role, dict) else fmt
    kept = {"weights": "weight", "momentum": "state"}
    optimizer: dict[str, Any] = {kept[part]: fmt for part in axes if part in kept}
    if "state" in optimizer and adam and axis == "all":
        # Plain, second moments of fp16 vanish, and the rest of the row would show nothing else.
        optimizer["state"] = {**_role(fmt, rounding), "scaling": "tensor"}
    return Strategy(
        f"{axis} {fmt} {rounding}{named}",
        policy={name: role for part in axes if part in roles for name in roles[part]}
        | ({"accumulate": accumulator} if "accumulator" in axes else {}),
        optimizer={**optimizer, **_HOW[rounding]} if optimizer else None,
        loss_scale=scale,
        statistics=role if "statistics" in axes else None,
    )


def ablate_grid(
    settings: Settings,
    strategies: Iterable[Strategy],
    *,
    warmup: int = 0,
    seeds: int = 1,
    out: str | Path,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Train the strategies of a grid, and write one table and one figure.

    Args:
        settings: What they share.
        strategies: As ``grid`` gives them.
        warmup: Steps of warm-up with which FP32 and the strategies that round everything are trained once
            more; 0: they are not.
        seeds: Seeds 0 to ``seeds - 1``.
        out: Directory for results.parquet, which is written anew after each run, and grid.png; and for the
            results.json of ``ablate``, from which a later call goes on.
        workers: Processes, one thread each; 1 trains in this process.
        progress: Called with the number of finished runs and of all runs.

    Returns:
        The results.

    Raises:
        ValueError: a strategy that does not go with the model, bad data, seeds or workers, or a results.json
            that is not ours.
        OSError: the directory cannot be written.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds!r}")
    strategies = list(strategies)
    check_names(strategies)
    model = build(settings.model, 64, 2, (8, 8))
    for strategy in strategies:
        check_model(strategy, model)
    warm = dataclasses.replace(settings, warmup=warmup)
    pairs = [(strategy, settings) for strategy in strategies]
    if warmup:
        pairs += [(s, warm) for s in strategies if s.name.split()[0] in ("fp32", "all")]
    runs: list[Run] = [(*pair, seed) for pair in pairs for seed in range(seeds)]
    write = partial(_write_table, Path(out))
    results = finish(runs, out=out, workers=workers, progress=progress, after=write)
    _draw(Path(out), results)
    return results


def row(result: Result) -> dict[str, Any]:
    """A result as a row of the table: the axes, the settings, the seed and what came out."""
    strategy, settings = result.strategy, result.settings
    optimizer = strategy.optimizer or {}
    kept = "kahan" if optimizer.get("kahan") else optimizer.get("rounding", "nearest_even")
    parts = {
        "weights": (optimizer.get("weight"), kept),
        "activations": (strategy.policy.get("activation"), None),
        "gradients": (strategy.policy.get("gradient"), None),
        "accumulator": (strategy.policy.get("accumulate"), None),
        "momentum": (optimizer.get("state"), optimizer.get("rounding", "nearest_even")),
        "statistics": (strategy.statistics, None),
    }
    nonzero = result.gradients.count - result.gradients.zero
    return {
        "strategy": strategy.name,
        **{name: cell for axis in AXES for name, cell in _axis(axis, *parts[axis]).items()},
        "loss_scale": "none" if strategy.loss_scale is None else f"{strategy.loss_scale}".removesuffix(".0"),
        "warmup": settings.warmup,
        "model": settings.model,
        "data": settings.data,
        "optimizer": settings.optimizer,
        "lr": settings.lr,
        "sgd_momentum": settings.momentum,
        "batch": settings.batch,
        "epochs": settings.epochs,
        "step_limit": settings.steps,
        "seed": result.seed,
        "accuracy": result.accuracy,
        "train_loss": result.train_loss,
        "updates_lost": None if not result.updates else (result.lost_updates or 0) / result.updates,
        "gradients_to_zero": result.gradients.underflow / nonzero if nonzero else None,
        "steps": result.steps,
        "skipped_steps": result.skipped_steps,
    }


def _axis(name: str, role: Any, rounding: str | None) -> dict[str, Any]:
    """Format and rounding of an axis, as two cells."""
    if role is None:
        return {name: "fp32", f"{name}_rounding": None}
    if isinstance(role, dict):
        role, rounding = role.get("format") or role["accumulate"], role.get("rounding")
    return {name: role, f"{name}_rounding": (rounding or "nearest_even").replace("nearest_even", "nearest")}


def _write_table(directory: Path, results: list[Result]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    types = {
        "strategy": text,
        **{name: text for axis in AXES for name in (axis, f"{axis}_rounding")},
        **{"loss_scale": text, "warmup": whole, "model": text, "data": text, "optimizer": text},
        **{"lr": real, "sgd_momentum": real, "batch": whole, "epochs": whole, "step_limit": whole},
        **{"seed": whole, "accuracy": real, "train_loss": real, "updates_lost": real},
        **{"gradients_to_zero": real, "steps": whole, "skipped_steps": whole},
    }
    table = pa.Table.from_pylist([row(result) for result in results], pa.schema(types))
    replace_whole(directory / "results.parquet", lambda path: parquet.write_table(table, path))


def _draw(directory: Path, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    from .grid_figure import draw

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    draw(figure, [row(result) for result in results])
    replace_whole(directory / "grid.png", partial(figure.savefig, dpi=150))
