"""A run that is killed goes on from its checkpoint and ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch

import fpemu
from fpemu.experiments import STRATEGIES, Data, Settings, Strategy, load_data, train
from fpemu.experiments.checkpoint import read_checkpoint
from fpemu.experiments.result import run_id

TESTS = pathlib.Path(__file__).parent
SMALL = Settings(lr=0.1, momentum=0.9, batch=200, epochs=2)
RANDOM = {"format": "fp16", "rounding": "stochastic"}
# All that a step may change: random words of every role, momentum, scale, statistics, rate.
EVERYTHING = Strategy(
    "everything",
    {"activation": RANDOM, "gradient": {**RANDOM, "format": "e5m2"}, "weight_gradient": RANDOM},
    {"weight": "fp16", "state": "bf16", "rounding": "stochastic"},
    "dynamic",
    {"format": "bf16", "rounding": "stochastic"},
)


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits")


def same(a: object, b: object) -> bool:
    """Whether two nests of dicts, lists and tensors are equal."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_run_killed_at_ten_random_steps_ends_as_the_unbroken_one(tmp_path, digits):
    settings = Settings(lr=0.05, momentum=0.9, batch=200, epochs=5, model="resnet8", warmup=10)
    # Of 40 steps; each process goes on after the last checkpoint, one step before it was killed.
    points = sorted(random.Random(0).sample(range(1, 41), 10))
    steps = [b - a + (a > 0) for a, b in zip([0, *points], points, strict=False)]
    job = {
        "strategy": EVERYTHING.as_dict(),
        "settings": dataclasses.asdict(settings),
        "steps": steps,
    }
    ended = subprocess.run(
        [sys.executable, TESTS / "kill.py", tmp_path, json.dumps(job)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert (ended.stdout.split(), ended.stderr) == (["killed"] * 10 + ["ended"], "")
    killed = torch.load(tmp_path / "end.pt", weights_only=True)
    path = tmp_path / "whole.pt"
    whole = train(EVERYTHING, settings, 0, digits, checkpoint=path, every=1)
    assert whole.steps == 40 and whole.train_loss < 0.2
    assert killed["result"] == whole.as_dict()
    assert same(killed["state"], read_checkpoint(path, run_id((EVERYTHING, settings, 0))))


@pytest.mark.parametrize("name", ["fp32", "mixed", "fp16-kahan"])
@pytest.mark.parametrize("limit", [None, 11])
def test_a_run_goes_on_from_any_step_of_it(name, limit, tmp_path, digits, monkeypatch):
    settings = dataclasses.replace(SMALL, steps=limit)
    expected = train(STRATEGIES[name], settings, 0, digits).as_dict()
    path = tmp_path / "run.pt"
    module = sys.modules["fpemu.experiments.train"]
    kept = []
    write = module.write_checkpoint

    def keep(*arguments):
        write(*arguments)
        kept.append(path.read_bytes())

    monkeypatch.setattr(module, "write_checkpoint", keep)
    assert train(STRATEGIES[name], settings, 0, digits, checkpoint=path, every=1).as_dict() == expected
    assert len(kept) == expected["steps"] == (limit or 16)
    for content in kept[:: 5 if limit else 4] + kept[-2:]:
        path.write_bytes(content)
        assert train(STRATEGIES[name], settings, 0, digits, checkpoint=path, every=3).as_dict() == expected


def test_checkpoints_are_written_every_so_many_steps_and_replaced_whole(tmp_path, digits, monkeypatch):
    path = tmp_path / "run.pt"
    train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=path, every=7)
    before = path.read_bytes()
    state = read_checkpoint(path, run_id((STRATEGIES["fp32"], SMALL, 0)))
    assert state["stepper"]["steps"] == 14 and [p.name for p in tmp_path.iterdir()] == ["run.pt"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=path, every=1)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def test_a_file_that_is_not_of_this_run_is_refused_and_left(tmp_path, digits, monkeypatch):
    path = tmp_path / "run.pt"
    for content in (b"", b"no checkpoint", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run\.pt is no checkpoint \(.*; move it away"):
            train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=path)
        assert path.read_bytes() == content
    torch.save({"something": 1}, path)
    with pytest.raises(ValueError, match="is no checkpoint"):
        train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=path)
    path.unlink()
    train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=path, every=4)
    for strategy, settings, seed in (
        (STRATEGIES["mixed"], SMALL, 0),
        (STRATEGIES["fp32"], dataclasses.replace(SMALL, epochs=3), 0),
        (STRATEGIES["fp32"], SMALL, 1),
    ):
        with pytest.raises(ValueError, match=r"run\.pt is of another run, or of fpemu .*; move it away or"):
            train(strategy, settings, seed, digits, checkpoint=path)
    content = torch.load(path, weights_only=True)
    assert content["fpemu"] == fpemu.__version__
    torch.save(content | {"fpemu": "0.0.1"}, path)
    with pytest.raises(ValueError, match=r"or of fpemu 0\.0\.1 where this is"):
        train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=path)


def test_the_distance_of_checkpoints_is_checked_before_training(tmp_path, digits):
    with pytest.raises(ValueError, match="every must be at least 1 step, got 0"):
        train(STRATEGIES["fp32"], SMALL, 0, digits, checkpoint=tmp_path / "run.pt", every=0)
    assert list(tmp_path.iterdir()) == []
