"""`every_op`: the result of every operation is a value of the format, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fpemu import Key, LowPrecision, Policy, Quantizer, emulate, is_representable, quantize


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


class Seen(TorchDispatchMode):
    """Checks, above the rounding, what operations return."""

    def __init__(self, fmt):
        super().__init__()
        self.fmt, self.names, self.wrong = fmt, set(), set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.names.add(op._schema.name)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                if not is_representable(x.detach().numpy(), self.fmt).all():
                    self.wrong.add(op._schema.name)
        return result


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2"])
def test_every_result_is_a_value_of_the_format(fmt):
    net, x, target = model(), quantize(normal(8, 1, 8, 8), fmt), torch.arange(8) % 3
    for p in net.parameters():
        p.data = quantize(p.data, fmt)
    seen = Seen(fmt)
    with emulate(net, Policy(every_op=fmt)) as emulation, seen:
        loss = F.cross_entropy(net(x), target)
        loss.backward()
    assert seen.wrong == set()
    assert {"aten::convolution", "aten::_log_softmax", "aten::convolution_backward", "aten::mm"} <= seen.names
    assert all(is_representable(p.grad.numpy(), fmt).all() for p in net.parameters())
    assert all(is_representable(b.numpy(), fmt).all() for b in net.buffers() if b.is_floating_point())
    assert emulation.tallies()["aten.convolution", "every_op"].count == 8 * 4 * 36


def test_a_hand_written_chain_has_the_same_bits():
    class Chain(nn.Module):
        def forward(self, x):
            return ((x * 3.1).exp() + x).sum()

    x = normal(50).requires_grad_()
    with emulate(Chain(), Policy(every_op="fp16")) as emulation:
        y = emulation.model(x)
        y.backward()

    def q(t):
        return quantize(t.detach(), "fp16")

    e = q(q(x * 3.1).exp())
    assert torch.equal(y.detach(), q(q(e + x).sum()))
    assert torch.equal(x.grad, q(torch.ones(50) + q(e * 3.1)))


def test_steps_of_optimizers_are_left_alone():
    w = nn.Parameter(torch.ones(3))
    net, expected = nn.Identity(), torch.full((3,), 1 - 1e-5)
    optimizer = torch.optim.SGD([w], lr=1e-5)
    with emulate(net, Policy(every_op="fp16")) as emulation:
        w.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(w.detach(), expected)
        assert emulation.tallies().keys() == {("aten.ones", "every_op")}


def test_after_removal_nothing_is_rounded():
    net, x = model().eval(), normal(8, 1, 8, 8)
    expected = net(x)
    with emulate(net, Policy(every_op="e5m2")):
        assert not torch.equal(net(x), expected)
    assert torch.equal(net(x), expected)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_excepted_operations_keep_float32_and_unknown_ones_are_refused():
    net, x = model(), normal(8, 1, 8, 8)
    with emulate(net, Policy(every_op="e5m2", except_ops=["aten.convolution", "*batch_norm*"])) as emulation:
        net(x)
    rounded = {name for name, _ in emulation.tallies()}
    assert "aten.addmm" in rounded and not any("batch_norm" in n or n == "aten.convolution" for n in rounded)
    with pytest.raises(ValueError, match=r"no operation of torch is named 'aten.conv7d'; they look like"):
        emulate(net, Policy(every_op="e5m2", except_ops="aten.conv7d"))
    with pytest.raises(ValueError, match="except_ops= is read with every_op= only"):
        Policy(weight="fp16", except_ops="aten.mm")


def test_in_place_operations_round_what_they_write():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x.clone()
            y.mul_(1.1)
            y[0].add_(0.3)
            return y

    with emulate(InPlace(), Policy(every_op="e4m3fn")) as emulation:
        y = emulation.model(normal(3, 4))
    assert torch.equal(y, quantize(y, "e4m3fn"))


def test_stochastic_words_change_with_the_step_and_repeat_with_the_key():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 1.1

    q, x = Quantizer("e4m3fn", rounding="stochastic"), normal(1000)
    runs = []
    for _ in range(2):
        with emulate(Scale(), Policy(every_op=q), key=Key(5)) as emulation:
            runs.append([emulation.model(x), emulation.model(x)])
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert abs(float((runs[0][0] - x * 1.1).sum())) < 5 * float((x * 1.1 / 8).square().sum().sqrt())


def test_it_goes_with_other_roles_and_with_low_precision_weights():
    net, x = model(), normal(8, 1, 8, 8)
    optimizer = LowPrecision(torch.optim.SGD(net.parameters(), lr=0.1), weight="fp16")
    with emulate(net, Policy(every_op="fp16", input="fp16", weight_gradient="fp16")):
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(8) % 3).backward()
            optimizer.step()
    assert all(is_representable(p.detach().numpy(), "fp16").all() for p in net.parameters())


def values(x):
    return bool(is_representable(x.detach().numpy(), "e4m3fn").all())


def test_a_closure_is_rounded_and_what_follows_a_failed_step():
    net, seen = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with emulate(net, Policy(every_op="e4m3fn")):

        def closure():
            optimizer.zero_grad()
            y = net(torch.ones(3, 4))
            y.square().mean().backward()
            seen.extend([values(y), values(net.weight.grad)])
            return y.sum()

        optimizer.step(closure)
        optimizer.step(closure=closure)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        seen.append(values(net(torch.ones(3, 4))))
    assert seen == [True] * 5


def test_emulations_end_in_any_order():
    x = normal(50)
    first = emulate(nn.Identity(), Policy(every_op="e2m1"))
    second = emulate(nn.Identity(), Policy(every_op="bf16"))
    first.remove()
    assert torch.equal(x * 1.1, quantize(x * 1.1, "bf16"))
    second.remove()
    assert not values(x * 1.1)


def test_a_mode_left_out_of_order_is_an_error_and_not_silence():
    outer = Seen("fp16")
    net = nn.Identity()
    with outer:
        emulation = emulate(net, Policy(every_op="fp16"))
    with pytest.raises(RuntimeError, match="every_op no longer rounds: a mode that was entered"):
        net(normal(3))
    emulation.remove()
    while torch.utils._python_dispatch._len_torch_dispatch_stack():
        torch.utils._python_dispatch._pop_mode()


def test_operations_on_lists_are_rounded_and_empty_memory_is_not_counted():
    with emulate(nn.Identity(), Policy(every_op="e4m3fn")) as emulation:
        several = [normal(4), normal(5)]
        torch._foreach_mul_(several, 1.1)
        torch.empty(1000)
    assert all(map(values, several))
    assert ("aten.empty", "every_op") not in emulation.tallies()


def test_an_audit_knows_what_every_op_rounds_and_counts_nothing():
    net, x = model(), normal(8, 1, 8, 8).requires_grad_()
    with emulate(net, Policy(every_op="fp16", weight="fp16", input="fp16")) as emulation:
        found = emulation.audit(x)
        assert emulation.tallies()["", "input"].count == 0
        assert not any(role == "every_op" for _, role in emulation.tallies())
    assert x.grad is None
    assert [row.op for row in found.uncovered] == []
