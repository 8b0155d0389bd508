"""What the audit lists, that it leaves all as it was, and `strict`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fpemu import Policy, Quantizer, emulate

WAG = Policy(weight="e4m3fn", activation="e4m3fn", gradient="e5m2", input="e4m3fn")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def test_the_table_of_a_perceptron_is_right():
    with emulate(perceptron(), Policy(weight="fp16", activation="bf16", gradient="e5m2")) as emulation:
        found = emulation.audit(normal(2, 4))
    assert str(found).splitlines() == [
        "module  operation   phase     factors",
        "0       aten.addmm  forward   input -, weight binary16",
        "2       aten.addmm  forward   activation bfloat16, weight binary16",
        "2       aten.mm     backward  gradient e5m2, weight binary16",
        "2       aten.mm     backward  gradient e5m2, activation bfloat16",
        "0       aten.mm     backward  gradient e5m2, input -",
        "5 matrix products, 0 not covered",
    ]


@pytest.mark.parametrize(
    "policy, missing",
    [
        (WAG, 0),
        (Policy(activation="fp16", exclude=["0", "1"]), 2),  # the second layer's input, forward and backward
        (Policy(weight="fp16", exclude="2"), 2),
        (Policy(gradient="fp16", include="0"), 2),  # what arrives at the output
    ],
)
def test_what_is_not_covered_is_what_the_policy_leaves_out(policy, missing):
    with emulate(perceptron(), policy) as emulation:
        found = emulation.audit(normal(2, 4))
    assert len(found.uncovered) == missing
    assert str(found).count("not covered\n") == missing


def test_strict_raises_with_the_table():
    with emulate(perceptron(), Policy(activation="fp16", exclude=["0", "1"])) as emulation:
        with pytest.raises(RuntimeError, match=r"2 matrix products are not covered:\n(.|\n)*activation -"):
            emulation.audit(normal(2, 4), strict=True)
    with emulate(perceptron(), WAG) as emulation:
        assert emulation.audit(normal(2, 4), strict=True).uncovered == ()


def test_a_product_outside_any_policy_is_listed_as_uncovered():
    class Escapes(nn.Module):
        def forward(self, x):
            with torch._C.DisableTorchFunction():
                return (x @ x.T) @ x

    with emulate(Escapes(), Policy(activation="fp16")) as emulation:
        rows = emulation.audit(normal(3, 3)).uncovered
    assert [(row.op, row.phase) for row in rows] == [("aten.mm", "forward")]


def test_all_is_as_before_an_audit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))
    x = normal(5, 4)
    random = Quantizer("e4m3fn", rounding="stochastic")
    with emulate(model, Policy(weight=random, activation=random, weight_gradient="fp16")) as emulation:
        model(x).sum().backward()
        state = copy.deepcopy(model.state_dict())
        gradients = [p.grad.clone() for p in model.parameters()]
        tallies, report, generator = emulation.tallies(), str(emulation.report()), torch.get_rng_state()
        emulation.audit(x)
        assert all(
            torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True)
        )
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        assert emulation.tallies() == tallies and str(emulation.report()) == report
        assert torch.equal(torch.get_rng_state(), generator)
        after = model(x)
    torch.manual_seed(0)
    again = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))
    with emulate(again, Policy(weight=random, activation=random, weight_gradient="fp16")):
        again(x).sum().backward()
        assert torch.equal(again(x), after)


def test_an_error_in_the_model_leaves_all_as_before():
    model = perceptron()
    with emulate(model, WAG) as emulation:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            emulation.audit(normal(2, 5))
        assert all(p.grad is None for p in model.parameters())
        assert emulation.tallies()["0", "weight"].count == 0
        assert emulation.audit(normal(2, 4)).uncovered == ()


def test_parts_of_fused_operations_are_listed_as_such():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 4)

        def forward(self, x):
            h = self.rnn(x)[0]
            return F.scaled_dot_product_attention(h, h, h)

    with emulate(Model(), WAG) as emulation:
        found = emulation.audit(normal(3, 2, 4))
    assert found.uncovered == ()
    assert {row.inside for row in found.products} == {"LSTM", "attention"}
    assert "inside LSTM" in str(found) and "inside attention" in str(found)


def test_values_that_are_only_moved_count_as_rounded():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(16, 3)

        def forward(self, x):
            h = F.max_pool2d(F.relu(self.first(x)), 2)
            h = torch.cat([h, h.flip(-1)], 1).permute(0, 2, 3, 1)
            h = F.pad(h, (1, 1)).masked_fill(h.new_zeros(h.shape[-1] + 2).bool(), 0)[..., 1:-1]
            return self.second(h.reshape(h.shape[0], -1, 16).clone())

    with emulate(Moves(), WAG) as emulation:
        found = emulation.audit(normal(2, 1, 4, 8))
    assert {f.fmt for row in found.products if row.phase == "forward" for f in row.factors} == {"e4m3fn"}


def test_an_audit_after_removal_or_without_gradients():
    model = perceptron()
    emulation = emulate(model, WAG)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        assert {row.phase for row in emulation.audit(normal(2, 4)).products} == {"forward"}
    emulation.remove()
    with pytest.raises(RuntimeError, match="the emulation is removed; audit the model before remove"):
        emulation.audit(normal(2, 4))


def test_a_buffer_that_a_forward_replaces_is_put_back():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            self.mean = 0.9 * self.mean + x.mean().detach()
            return self.linear(x)

    with emulate(Average(), WAG) as emulation:
        emulation.audit(torch.ones(3, 2))
    assert emulation.model.mean == 0
