"""`observe` in three lines, as in a notebook."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from fpemu import observe, tally


def test_three_lines_give_histograms_and_a_table():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(5, 6)
    with observe(model) as obs:
        model(x).sum().backward()
    assert obs.records.select("0", "activation").tally() == tally(model[0](x).detach())
    assert obs.records.select("2", "weight").tally() == tally(model[2].weight.detach()) + tally(
        model[2].bias.detach()
    )
    assert obs.records.select("2", "weight_gradient").tally() == tally(model[2].weight.grad) + tally(
        model[2].bias.grad
    )
    ax = obs.histogram("2", "gradient", ax=Figure().subplots())
    assert ax.get_title() == "0.0 % of nonzero values become zero in binary16"
    assert str(obs.report()).splitlines()[1].split()[:4] == ["0", "activation", "1", "40"]
    assert not any(m._forward_hooks for m in model.modules())
    model(x)
    assert obs.records.select("0", "activation").tally().count == 40


def test_steps_are_kept_apart_and_the_optimizer_is_seen():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(model, optimizer, formats=["e4m3fn"]) as obs:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(5, 4)).sum().backward()
            optimizer.step()
            obs.step()
    assert obs.records.steps == [0, 1, 2]
    assert obs.records.select(role="update").seen("e4m3fn").count == 3 * 10
    with pytest.raises(RuntimeError, match="the observation has ended"):
        obs.step()


def test_a_forward_without_gradients_is_seen_too():
    model = nn.Linear(4, 2).eval()
    with observe(model) as obs, torch.no_grad():
        model(torch.ones(5, 4))
    assert obs.records.select(role="activation").tally().count == 10


def test_an_error_inside_leaves_the_model_as_it_was():
    model = nn.Linear(4, 2)
    with pytest.raises(ZeroDivisionError), observe(model):
        raise ZeroDivisionError
    assert not model._forward_hooks


def test_wrong_use_is_refused():
    with pytest.raises(TypeError, match=r"observe needs a torch.nn.Module, got str"):
        observe("model")
    with pytest.raises(ValueError, match=r"pattern 'x' matches none"):
        observe(nn.Linear(2, 2), modules="x")
