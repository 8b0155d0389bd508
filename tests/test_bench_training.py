"""What the benchmark of training steps compares, and that it trains."""

from __future__ import annotations

import pytest
import torch

from fpemu import bench_training
from fpemu.bench_training import StepTimes


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_both_models_are_measured_and_the_ratio_is_that_of_their_times():
    times = bench_training.measure(1, images=2, texts=2)
    assert list(times) == ["resnet8", "transformer"]
    for step in times.values():
        assert min(step.fp32, step.fp16, step.uncounted) > 0
        assert step.ratio == step.fp16 / step.fp32
        assert step.uncounted_ratio == step.uncounted / step.fp32
    assert [step.batch for step in times.values()] == [
        "2 images of 28 x 28 pixels",
        "2 texts of 64 characters",
    ]


@pytest.mark.parametrize("name", ["resnet8", "transformer"])
def test_a_step_trains_the_plain_model_and_rounds_only_in_its_copy(name):
    workload = bench_training._workloads(2, 1)[name]
    cases = bench_training._cases(workload, "cpu")
    plain, rounded = (cases[fmt].args[0] for fmt in ("fp32", "fp16"))
    first = {key: value.clone() for key, value in plain.state_dict().items()}
    assert all(torch.equal(value, first[key]) for key, value in rounded.state_dict().items())
    with torch.no_grad():
        exact, low = plain(workload.inputs), rounded(workload.inputs)
    assert torch.equal(low, low.half().float()) and not torch.equal(exact, exact.half().float())
    for model, case in ((plain, cases["fp32"]), (rounded, cases["fp16"])):
        case()
        weights = dict(model.named_parameters())
        assert all(not torch.equal(weight, first[key]) for key, weight in weights.items())


def test_the_table_shows_milliseconds_their_ratio_and_what_is_counted(monkeypatch, capsys):
    times = {
        "resnet8": StepTimes("64 images", 0.02, 0.05, 0.03),
        "transformer": StepTimes("16 texts", 0.01, 0.01, 0.01),
    }
    monkeypatch.setattr(bench_training, "measure", lambda repeats, device: times)
    bench_training.run(3)
    assert capsys.readouterr().out.splitlines() == [
        "training steps on cpu, torch threads: 1, medians of 3",
        "model        fp32 ms  fp16 ms  ratio  not counted ms  ratio",
        "resnet8        20.00    50.00   2.50           30.00   1.50",
        "transformer    10.00    10.00   1.00           10.00   1.00",
        "a step: forward, loss, backward, SGD; fp16: weights, activations and gradients rounded",
        "a batch: resnet8, 64 images; transformer, 16 texts",
    ]
