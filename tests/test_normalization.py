"""Batch normalization with rounded statistics, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fpemu import Key, Quantizer, quantize
from fpemu.experiments.normalization import BatchNorm2d, RoundedStatistics


def made(cls: type[nn.BatchNorm2d]) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    module = cls(3)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    return module.double()


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return (5 * torch.randn(4, 3, 6, 6, dtype=torch.float64) + 2).requires_grad_()


def test_with_rounding_that_changes_nothing_it_is_torchs():
    plain, ours = made(nn.BatchNorm2d), made(BatchNorm2d)
    ours.round_statistic = lambda name, x: x
    results = []
    for module in (plain, ours):
        x = images()
        y = module(x)
        (y**3).sum().backward()
        results.append([y, x.grad, module.weight.grad, module.bias.grad, *module.buffers()])
    for expected, found in zip(*(parts[:-1] for parts in results), strict=True):
        # In float64: another order of the same operations.
        assert torch.allclose(expected, found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2"])
def test_a_batch_is_normalized_by_rounded_statistics_and_the_running_ones_are_made_of_them(fmt):
    module, x = made(BatchNorm2d).float(), images().float()
    RoundedStatistics(module, Quantizer(fmt), Key(0))
    y = module(x)
    mean, var = (quantize(s, fmt) for s in (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)))
    scale = module.weight / (var + 1e-5).sqrt()
    expected = (x - mean[:, None, None]) * scale[:, None, None] + module.bias[:, None, None]
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    count = 4 * 6 * 6
    assert torch.allclose(module.running_mean, 0.1 * mean, rtol=1e-6)
    assert torch.allclose(module.running_var, 0.9 + 0.1 * var * count / (count - 1), rtol=1e-6)
    assert not torch.allclose(y, made(nn.BatchNorm2d).float()(x), rtol=1e-5, atol=1e-5)


def test_stochastic_rounding_draws_other_words_each_step_and_is_right_on_average():
    module, x = made(BatchNorm2d).float(), images().detach().float()
    statistics = RoundedStatistics(module, Quantizer("e5m2", "stochastic"), Key(0))
    exact, found = x.mean((0, 2, 3)), []
    keep = module.round_statistic

    def spy(name, value):
        rounded = keep(name, value)
        found.append((name, rounded.detach()))
        return rounded

    module.round_statistic = spy
    for step in range(1, 1001):
        module(x)
        statistics.round_running(step)
    assert torch.equal(module.running_mean, quantize(module.running_mean, "e5m2"))
    means = torch.stack([value for name, value in found if name == "batch_mean"])
    assert all(len(column.unique()) == 2 for column in means.T)
    sigma = means.std(0) / len(means) ** 0.5
    assert ((means.mean(0) - exact).abs() < 5 * sigma).all()


def test_in_evaluation_it_is_torchs_to_the_bit():
    plain, ours = made(nn.BatchNorm2d).float().eval(), made(BatchNorm2d).float().eval()
    RoundedStatistics(ours, Quantizer("e5m2"), Key(0))
    x = images().float()
    assert torch.equal(plain(x), ours(x))
