"""The meter of weight updates, against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from fpemu import LowPrecision, as_format, quantize, tally, ulp
from fpemu.updates import Meter, Updates


def metered(steps=1, fmt="bf16", **options):
    """A LowPrecision after some steps on random numbers of all sizes, and what it was given and gave."""
    rng = np.random.default_rng(0)
    w = nn.Parameter(torch.tensor(rng.standard_normal(2000).astype(np.float32)))
    w.data[:100] = 0.0
    optimizer = LowPrecision(SGD([("w", w)], lr=0.5), weight=fmt, **options)
    history = []
    for _ in range(steps):
        sizes = 2.0 ** rng.integers(-20, 2, 2000)
        gradient = (rng.standard_normal(2000) * sizes * rng.integers(0, 2, 2000)).astype(np.float32)
        before = w.detach().numpy().copy()
        w.grad = torch.tensor(gradient)
        optimizer.step()
        history.append((before, gradient, w.detach().numpy().copy()))
    return optimizer, history


def counted(history, fmt):
    """The same counts, by numpy and fpemu.ulp."""
    total = Updates()
    for before, gradient, after in history:
        update = (before - np.float32(0.5) * gradient) - before
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = tally(np.abs(before.astype(np.float64) / update))
        small = np.abs(gradient.astype(np.float64)) < ulp(before, fmt) / 2
        moved = update != 0
        total += Updates(
            int(moved.sum()),
            int((moved & (after == before)).sum()),
            ratios,
            int((gradient != 0).sum()),
            int((small & (gradient != 0)).sum()),
        )
    return total


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "e4m3fn", "e5m2"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_counts_are_those_of_numpy(fmt, rounding):
    optimizer, history = metered(3, fmt, rounding=rounding)
    assert optimizer.measured == {"w": counted(history, fmt)}
    found = optimizer.measured["w"]
    assert 0 < found.lost < found.count and 0 < found.below_half_ulp < found.gradients
    assert (optimizer.updates, optimizer.lost) == (found.count, found.lost)
    assert found.lost_share == found.lost / found.count
    assert found.below_half_ulp_share == found.below_half_ulp / found.gradients


def test_ratios_are_counted_by_binade_with_zero_weights_and_updates_apart():
    w = nn.Parameter(torch.tensor([1.0, 1.5, 0.0, 1.0, 0.0]))
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="fp16")
    w.grad = torch.tensor([2.0**-5, 2.0**-5, 1.0, 0.0, 0.0])
    optimizer.step()
    ratios = optimizer.measured[0].ratios
    assert dict(zip(ratios.exponents, ratios.histogram, strict=True))[5] == 2 == ratios.histogram.sum()
    assert (ratios.zero, ratios.positive_infinity, ratios.nan, ratios.count) == (1, 1, 1, 5)


def test_every_tenth_step_is_measured_and_the_bits_are_the_same():
    (every, history), (tenth, sparse), (none, blind) = (metered(25, measure_every=n) for n in (1, 10, 0))
    assert tenth.measured == {"w": counted([history[0], history[10], history[20]], "bf16")}
    assert none.measured == {"w": Updates()} and none.lost_share == 0.0
    for a, b, c in zip(history, sparse, blind, strict=True):
        assert np.array_equal(a[2], b[2]) and np.array_equal(a[2], c[2])
    assert every.updates > 2 * tenth.updates


@pytest.mark.parametrize("wrong", [-1, 1.5, None])
def test_steps_between_measurements_are_a_number(wrong):
    with pytest.raises(ValueError, match="measure_every must be a number of steps, or 0 for none, got"):
        metered(measure_every=wrong)


def test_sparse_gradients_count_as_zero_where_they_have_nothing():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = LowPrecision(SGD(embedding.parameters(), lr=1.0), weight="bf16")
    embedding(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    assert (optimizer.updates, optimizer.measured[0].gradients) == (2, 2)


ODD = [0.0, -0.0, 1.0, -1.5, 2.0**-130, 2.0**-149, 2.0**127, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "e4m3fn"])
def test_the_loop_counts_as_torch_does_whatever_the_numbers_and_their_order(fmt):
    """The loop is the CPU's; on other devices torch's operations count."""
    rng = np.random.default_rng(1)
    shape = (3, 2, 40, 20)  # more than two blocks, the last one not full
    parts = [rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 3, shape) for _ in range(4)]
    parts[2] = np.where(rng.random(shape) < 0.5, parts[0], parts[2])  # half of the weights stay
    grid = np.array(list(itertools.product(ODD, repeat=3))).T
    for part, odd in zip((0, 1, 3), grid, strict=True):
        parts[part].reshape(-1)[:1000] = odd
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    by_loop, by_torch = (Meter(as_format(fmt), torch.device("cpu")) for _ in range(2))
    by_torch._add_by_torch(*tensors)
    by_loop.add(tensors[0].to(memory_format=torch.channels_last), *tensors[1:])
    assert by_loop.read() == by_torch.read()
    assert torch.equal(by_loop.sums, by_torch.sums)


def test_a_weight_without_a_gradient_still_has_its_update_counted():
    meter = Meter(as_format("fp16"), torch.device("cpu"))
    meter.add(torch.ones(3), torch.tensor([1.0, 2.0**-12, 0.0]), torch.tensor([2.0, 1.0, 1.0]), None)
    found = meter.read()
    assert (found.count, found.lost, found.gradients, found.below_half_ulp) == (2, 1, 0, 0)


def test_the_counts_of_parts_add_up_and_of_other_things_do_not():
    optimizer, history = metered(2)
    assert counted(history[:1], "bf16") + counted(history[1:], "bf16") == optimizer.measured["w"]
    with pytest.raises(TypeError):
        Updates() + 1


def test_names_leave_out_what_wraps_a_model():
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.ModuleDict({"module": torch.compile(model, backend="eager")})
    optimizer = LowPrecision(Adam(wrapped.named_parameters()), weight="bf16")
    assert list(optimizer.measured) == ["0.weight", "0.bias"]


def test_a_converged_weight_sees_gradients_below_half_its_ulp():
    """What "Mixed Precision Training" gives as a reason for master copies: updates 2**11 below the weight."""
    w = nn.Parameter(torch.full((100,), 1.0))
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="fp16")
    w.grad = torch.full((100,), -(2.0**-12))
    optimizer.step()
    found = optimizer.measured[0]
    assert found.lost_share == found.below_half_ulp_share == 1.0
    assert quantize(w.detach(), "fp16").equal(w.detach())
