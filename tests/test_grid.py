"""The ablation by parts: its strategies, its table, its figure, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from pyarrow import parquet

import fpemu
from fpemu.experiments import Result, Settings, Strategy, train
from fpemu.experiments.grid import PRESETS, QUICK, ablate_grid, grid, row
from fpemu.experiments.grid_figure import draw

ROOT = pathlib.Path(fpemu.__file__).parent.parent
TINY = Settings(lr=0.1, momentum=0.9, batch=256, epochs=1)
FEW = list(grid(TINY, ["bf16"], ["nearest"], [None]))


def names(settings: Settings, *options) -> list[str]:
    return [strategy.name for strategy in grid(settings, *options)]


def test_a_grid_has_each_part_alone_then_gradients_and_everything_by_loss_scale():
    assert names(TINY, ["fp16"], ["nearest", "kahan"], [None, 8.0, "dynamic"]) == [
        "fp32",
        "weights fp16 nearest",
        "weights fp16 kahan",
        "activations fp16 nearest",
        "gradients fp16 nearest",
        "accumulator fp16 nearest",
        "momentum fp16 nearest",
        "gradients fp16 nearest x8",
        "gradients fp16 nearest dynamic",
        *(f"all fp16 {how}{scale}" for how in ("nearest", "kahan") for scale in ("", " x8", " dynamic")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings, alone",
    [
        (Settings(), ["weights", "activations", "gradients", "accumulator"]),
        (PRESETS["mlp"], ["weights", "activations", "gradients", "accumulator", "momentum"]),
        (
            PRESETS["resnet8"],
            ["weights", "activations", "gradients", "accumulator", "momentum", "statistics"],
        ),
        (PRESETS["transformer"], ["weights", "activations", "gradients", "accumulator", "momentum"]),
    ],
    ids=["plain SGD", "mlp", "resnet8", "transformer"],
)
def test_a_grid_has_the_parts_that_there_are(settings, alone):
    strategies = list(grid(settings))
    first = [s.name.split()[0] for s in strategies]
    assert list(dict.fromkeys(first)) == ["fp32", *alone, "all"]
    # fp32; two formats, in three roundings of weights and two of the rest; four scales; two, three, five.
    assert len(strategies) == 1 + 2 * 3 + (len(alone) - 1) * 2 * 2 + 2 * 4 + 2 * 3 * 5
    assert len(set(first)) == len(alone) + 2 and len({s.name for s in strategies}) == len(strategies)
    everything = strategies[-1]
    assert (everything.statistics is not None) == (settings.model == "resnet8")
    assert ("state" in everything.optimizer) == (settings.states > 0)


def test_adams_moments_are_scaled_where_everything_is_rounded_and_plain_alone():
    by_name = {s.name: s for s in grid(PRESETS["transformer"], ["fp16"], scales=[None])}
    assert by_name["momentum fp16 nearest"].optimizer == {"state": "fp16"}
    state = by_name["all fp16 stochastic"].optimizer["state"]
    assert state == {"format": "fp16", "rounding": "stochastic", "scaling": "tensor"}
    found = row(result_of(by_name["all fp16 stochastic"]))
    assert (found["momentum"], found["momentum_rounding"]) == ("fp16", "stochastic")
    assert next(s for s in grid(PRESETS["mlp"]) if s.name == "all fp16 nearest").optimizer["state"] == "fp16"


@pytest.mark.parametrize("presets", [PRESETS, QUICK])
def test_there_is_a_preset_for_every_model(presets):
    assert {settings.model for settings in presets.values()} == set(presets)
    assert set(presets) == {"mlp", "resnet8", "gru", "transformer"}


@pytest.mark.parametrize(
    "options, match",
    [
        (([], ["nearest"], [None]), "a grid needs at least one format, got none"),
        ((["fp16"], [], [None]), "a grid needs at least one rounding, got none"),
        ((["fp16"], ["nearest"], []), "a grid needs at least one loss scale, got none"),
        ((["fp17"], ["nearest"], [None]), "'fp17'"),
        ((["fp16"], ["up"], [None]), "unknown rounding 'up' of a grid; choose from nearest, stoch"),
        ((["fp16"], ["nearest"], [-1.0]), 'must be a positive number or "dynamic", got -1.0'),
    ],
)  # fmt: skip
def test_a_bad_grid_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        list(grid(TINY, *options))


def result_of(strategy: Strategy, **changes) -> Result:
    settings = dataclasses.replace(TINY, warmup=7, steps=5)
    tally = fpemu.tally(np.float32([0.0, 2.0**-30, 1.0, 2.0, 3.0]), "fp16")
    return dataclasses.replace(
        Result(strategy, settings, 3, 0.9, 0.5, (0.7,), tally, 200, 50, 5, 1, 1000), **changes
    )


def test_a_row_tells_format_and_rounding_of_each_part_and_what_came_out():
    by_name = {s.name: s for s in grid(PRESETS["resnet8"])}
    found = row(result_of(by_name["all fp16 kahan x128"]))
    assert found["strategy"] == "all fp16 kahan x128"
    axes = ("weights", "activations", "gradients", "accumulator", "momentum", "statistics")
    assert [found[axis] for axis in axes] == ["fp16"] * 3 + ["fp32"] + ["fp16"] * 2
    assert [found[f"{axis}_rounding"] for axis in axes] == [
        "kahan",
        "nearest",
        "nearest",
        None,
        "nearest",
        "nearest",
    ]
    assert (found["loss_scale"], found["warmup"], found["step_limit"], found["seed"]) == ("128", 7, 5, 3)
    assert (found["accuracy"], found["train_loss"], found["skipped_steps"]) == (0.9, 0.5, 1)
    assert (found["updates_lost"], found["gradients_to_zero"]) == (0.25, 0.25)
    found = row(result_of(by_name["all bf16 stochastic dynamic"], updates=0, lost_updates=0))
    assert [found[f"{axis}_rounding"] for axis in axes] == ["stochastic"] * 3 + [None] + ["stochastic"] * 2
    assert (found["loss_scale"], found["updates_lost"]) == ("dynamic", None)
    found = row(result_of(by_name["momentum fp16 stochastic"]))
    assert [found[axis] for axis in axes] == ["fp32"] * 4 + ["fp16", "fp32"]
    assert [found[f"{axis}_rounding"] for axis in axes] == [None] * 4 + ["stochastic", None]
    found = row(result_of(by_name["fp32"], updates=None, gradients=fpemu.Tally()))
    assert [found[axis] for axis in axes] == ["fp32"] * 6 and found["loss_scale"] == "none"
    assert found["updates_lost"] is found["gradients_to_zero"] is None


@pytest.fixture
def trained(monkeypatch):
    """Fills up with the strategy and warm-up of every training run in this process."""
    runs = []

    def spy(strategy, settings, seed, data):
        runs.append((strategy.name, settings.warmup))
        return train(strategy, settings, seed, data)

    monkeypatch.setattr(sys.modules["fpemu.experiments.runs"], "train", spy)
    return runs


def test_a_grid_gives_one_table_and_one_figure_and_goes_on_where_it_stopped(tmp_path, trained):
    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablate_grid(TINY, FEW, warmup=4, out=tmp_path, workers=1, progress=stop)
    table = parquet.read_table(tmp_path / "results.parquet")
    assert table["strategy"].to_pylist() == ["fp32", "weights bf16 nearest", "activations bf16 nearest"]
    results = ablate_grid(TINY, FEW, warmup=4, out=tmp_path, workers=1)
    everything = "all bf16 nearest"
    assert trained == [*((s.name, 0) for s in FEW), ("fp32", 4), (everything, 4)]
    assert [(r.strategy.name, r.settings.warmup) for r in results] == trained
    table = parquet.read_table(tmp_path / "results.parquet")
    assert table.to_pylist() == [row(result) for result in results]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grid.png", "results.json", "results.parquet"]
    assert image.imread(tmp_path / "grid.png").shape[:2] == (1125, 1800)
    trained.clear()
    again = ablate_grid(TINY, FEW, warmup=4, out=tmp_path, workers=1)
    assert trained == [] and [r.as_dict() for r in again] == [r.as_dict() for r in results]


KILLED = """
import json, os, signal, sys
from fpemu.experiments import Settings
from fpemu.experiments.grid import ablate_grid, grid

def stop(done, total):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    settings = Settings(**json.loads(sys.argv[2]))
    ablate_grid(settings, grid(settings, ["bf16"], ["nearest"], [None]), out=sys.argv[1], progress=stop)
"""


def test_a_killed_grid_keeps_what_is_finished_and_its_workers_end(tmp_path, trained):
    (tmp_path / "killed.py").write_text(KILLED)
    out = tmp_path / "out"
    # Its workers hold the pipe of its output: to wait for the end of that is to wait for them.
    ended = subprocess.run(
        [sys.executable, tmp_path / "killed.py", out, json.dumps(dataclasses.asdict(TINY))],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert ended.returncode == -9
    kept = json.loads((out / "results.json").read_text())["results"]
    assert len(kept) == 2 and parquet.read_table(out / "results.parquet").num_rows == 2
    ablate_grid(TINY, FEW, out=out, workers=1)
    missing = {s.name for s in FEW} - {entry["strategy"]["name"] for entry in kept}
    assert sorted(name for name, _ in trained) == sorted(missing)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"strategies": [Strategy("x", statistics="fp16")]}, "'x' rounds statistics, but the model has no"),
        ({"strategies": []}, "no strategy given"),
        ({"strategies": [FEW[0], FEW[0]]}, "two strategies are called 'fp32'"),
    ],
)
def test_a_bad_ablation_is_refused_before_a_directory_is_made(tmp_path, changes, match):
    options = {"settings": TINY, "strategies": FEW, "out": tmp_path / "out"} | changes
    with pytest.raises(ValueError, match=match):
        ablate_grid(**options)
    assert not (tmp_path / "out").exists()


def test_the_figure_marks_what_diverged_and_shows_every_run():
    strategies = list(grid(TINY))
    runs = [result_of(strategy, train_loss=0.4 + 0.01 * i) for i, strategy in enumerate(strategies)]
    runs[1] = dataclasses.replace(runs[1], train_loss=float("nan"))
    runs[-1] = dataclasses.replace(runs[-1], train_loss=float("inf"))
    figure = Figure()
    draw(figure, [row(run) for run in runs])
    alone, *panels = figure.axes
    assert [text.get_text() for text in alone.get_yticklabels()] == [
        s.name for s in strategies if s.loss_scale is None and s.name.split()[0] not in ("fp32", "all")
    ]
    assert [ax.get_title() for ax in panels] == ["fp16", "bf16"]
    crosses = [
        line for ax in figure.axes for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())
    ]
    assert len(crosses) == 2
