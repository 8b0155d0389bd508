"""Models whose products are rounded as they accumulate, forward and in the backward pass."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fpemu import Accumulator, Format, Key, Policy, Quantizer, emulate, matmul, quantize
from fpemu.accumulation import accumulator_of, product, spec_of
from fpemu.emulation import convolve
from fpemu.experiments.data import load_data
from fpemu.experiments.models import mlp

HOWS = [
    Accumulator("fp16"),
    Accumulator("e5m4", product="e5m4", chunk=3, chunk_accumulate="bf16"),
    Accumulator("bf16", rounding="stochastic"),
    Accumulator(Format("mine", 6, 5), chunk=2, overflow="saturate"),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def key_of(how):
    return Key(4) if how.rounding == "stochastic" else None


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_all_three_products_are_matmuls(how):
    x, w, g = normal(40, 30).requires_grad_(), normal(30, 20, seed=1).requires_grad_(), normal(40, 20, seed=2)
    key = key_of(how)

    def plain(a, b, fold):
        return how(a.detach(), b.detach(), key=key and key.fold_in(fold))

    y = product(x, w, how, key=key)
    y.backward(g)
    assert torch.equal(y, plain(x, w, "forward"))
    assert torch.equal(x.grad, plain(g, w.T, "forward dgrad"))
    assert torch.equal(w.grad, plain(x.T, g, "forward wgrad"))
    assert accumulator_of(spec_of(how)) == how


def test_batches_vectors_and_their_gradients_are_torchs():
    # Small integers: every sum is exact, whatever its order.
    for left, right in (
        ((5,), (5,)),
        ((3, 5), (5,)),
        ((5,), (5, 2)),
        ((4, 1, 3, 5), (2, 5, 6)),
        ((2, 3, 5), (5, 4)),
    ):
        a, b = (normal(*s, seed=i).mul(2).round() for i, s in enumerate((left, right)))
        grads = []
        for of in (torch.matmul, lambda a, b: product(a, b, Accumulator("fp16", product="fp16"))):
            x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
            z = of(x, y)
            z.backward(torch.ones_like(z))
            grads.append((z, x.grad, y.grad))
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_gradients_are_right_in_float64():
    # Rounded to 48 bits; gradcheck's steps are of 2**-20, so that products of factors stay exact.
    a, b, g = (
        normal(*s, seed=i).mul(64).round().div(64).double() for i, s in enumerate(((3, 4), (4, 2), (3, 2)))
    )
    a, b = a.requires_grad_(), b.requires_grad_()
    how = Accumulator("e10m47")

    def of(a, b):
        return product(a, b, how)

    assert torch.autograd.gradcheck(of, (a, b), eps=2**-20, atol=1e-6)
    assert torch.autograd.gradgradcheck(of, (a, b), (g.requires_grad_(),), eps=2**-20, atol=1e-6)


CONVOLUTIONS = [
    (F.conv1d, (2, 4, 9), (3, 4, 3), {}),
    (F.conv1d, (4, 9), (3, 4, 3), {"padding": "same", "dilation": 2}),
    (F.conv1d, (2, 4, 10), (6, 2, 4), {"padding": "same", "groups": 2, "dilation": 2}),
    (F.conv2d, (3, 4, 7, 8), (6, 4, 3, 3), {"padding": 1}),
    (F.conv2d, (3, 4, 7, 8), (6, 4, 3, 2), {"stride": 2, "padding": (1, 0)}),
    (F.conv2d, (2, 4, 11, 10), (6, 2, 3, 3), {"stride": (3, 2), "dilation": 2, "groups": 2}),
    (F.conv2d, (2, 4, 5, 5), (4, 1, 1, 1), {"padding": 2, "groups": 4, "stride": 2}),
    (F.conv2d, (2, 4, 5, 5), (3, 4, 5, 5), {"padding": "valid"}),
    (F.conv3d, (1, 2, 5, 4, 6), (2, 2, 2, 3, 2), {"padding": (0, 1, 2), "stride": (1, 2, 1)}),
    (F.conv2d, (0, 4, 5, 5), (3, 4, 2, 2), {}),
]


def case(x, w, options):
    x, w = normal(*x), normal(*w, seed=1)
    return x, w, normal(w.shape[0], seed=2), options


@pytest.mark.parametrize("tile", [1, 1 << 22])
@pytest.mark.parametrize("function, x, w, options", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_torchs_where_nothing_is_lost(
    function, x, w, options, tile, monkeypatch
):
    monkeypatch.setattr(convolve, "TILE", tile)
    x, w, bias, options = case(x, w, options)
    how = spec_of(Accumulator("fp16", product="fp16"))
    results = []
    for of in (function, lambda *args, **more: convolve.convolve(*args, **more, how=how, key=None)):
        leaves = [t.mul(2).round().requires_grad_() for t in (x, w, bias)]
        y = of(*leaves, **options)
        y.backward(normal(*y.shape, seed=3).round())
        results.append([y, *(t.grad for t in leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_convolution_is_matmul_of_its_windows(how, monkeypatch):
    x, w = normal(5, 4, 6, 6).requires_grad_(), normal(3, 4, 3, 3, seed=1).requires_grad_()
    g, key = normal(5, 3, 4, 4, seed=2), key_of(how)
    tensor = None if key is None else torch.tensor([key.seed, key.stream, key.step, key.offset])
    rows = F.unfold(x.detach(), 3).mT.reshape(-1, 36)
    columns = g.permute(0, 2, 3, 1).reshape(-1, 3)
    folded = {name: key and key.fold_in(name) for name in ("forward", "forward wgrad")}
    wanted = how(rows, w.detach().reshape(3, 36).T, key=folded["forward"])
    of_weight = how(rows.T, columns, key=folded["forward wgrad"])
    found = []
    for tile in (1, 1 << 22):
        monkeypatch.setattr(convolve, "TILE", tile)
        x.grad = w.grad = None
        y = convolve.convolve(x, w, how=spec_of(how), key=tensor)
        y.backward(g)
        assert torch.equal(y.permute(0, 2, 3, 1).reshape(-1, 3), wanted)
        assert torch.equal(w.grad.reshape(3, 36).T, of_weight)
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_second_derivative_of_a_convolution_is_refused():
    x, w = normal(1, 1, 4).requires_grad_(), normal(1, 1, 2).requires_grad_()
    y = convolve.convolve(x, w, how=spec_of(Accumulator()), key=None)
    (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_x.sum().backward()


class Net(nn.Module):
    """A convolution, attention, a layer, and products by functions of all kinds."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)
        self.free = nn.Parameter(normal(8, 8))

    def forward(self, x):
        h = self.conv(x).mT
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.head(h) @ self.free
        flat = torch.addmm(self.free[0], h[0], mat2=self.free, beta=2, alpha=0.5)
        return torch.bmm(h, h.mT).sum() + torch.mv(flat, self.free[1]).sum() + torch.dot(flat[0], flat[1])


def net():
    torch.manual_seed(0)
    return Net(), normal(3, 4, 10, seed=1)


def test_the_audit_finds_every_sum_of_a_model_covered():
    model, x = net()
    policy = Policy(accumulate=Accumulator("fp16", chunk=4))
    with emulate(model, policy) as emulation:
        found = emulation.audit(x, strict=True)
        assert not emulation.report().skipped
    assert {row.op for row in found.products if row.phase == "forward"} == {"fpemu.matmul"}
    assert "activation -, weight -, sums binary16" in str(found)
    assert len(found.products) > 20
    with emulate(model, Policy(accumulate="fp16", exclude="head")) as emulation:
        assert {row.module for row in emulation.audit(x).uncovered} == {"head"}


def test_a_model_is_as_before_when_emulation_ends():
    model, x = net()
    before = model(x)
    with emulate(model, Policy(accumulate="e5m2")):
        assert model(x) != before
    assert torch.equal(model(x), before)


def test_sums_in_float32_change_little_and_in_e5m2_much():
    model, x = net()
    grads = []
    for fmt in (None, "fp32", "e5m2"):
        model.zero_grad()
        if fmt is None:
            model(x).backward()
        else:
            with emulate(model, Policy(accumulate=fmt)):
                model(x).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    plain, single, coarse = grads
    assert (single - plain).norm() < 1e-5 * plain.norm() < 0.05 * (coarse - plain).norm()


def test_a_layers_three_products_have_rounded_factors_and_sums():
    layer, x, g = nn.Linear(30, 20), normal(40, 30), normal(40, 20, seed=1)
    how, e4, e5 = Accumulator("fp16", chunk=8), Quantizer("e4m3fn"), Quantizer("e5m2")
    policy = Policy(forward_a="e4m3fn", forward_w="e4m3fn", dgrad_g="e5m2", wgrad_a="e5m2", accumulate=how)
    x.requires_grad_()
    with emulate(layer, policy):
        y = layer(x)
        y.backward(g)
    w, of = layer.weight.detach(), x.detach()
    assert torch.equal(y, how(e4(of), e4(w).T) + layer.bias)
    assert torch.equal(x.grad, how(e5(g), w))
    assert torch.equal(layer.weight.grad, how(e5(of).T, g).T)


def test_what_is_not_reached_is_listed():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 3)

        def forward(self, x):
            return torch.einsum("ij,kj->ik", self.lstm(x)[0], x)

    model, x = Other(), normal(4, 3)
    with emulate(model, Policy(accumulate="fp16")) as emulation:
        found = emulation.audit(x)
        model(x)
        with torch.autocast("cpu"):
            torch.manual_seed(0)
        skipped = emulation.report().skipped
    assert {row.op for row in found.uncovered} >= {"aten.bmm"}
    assert skipped["sums of einsum"] == "torch adds them up itself"
    assert skipped["lstm.sums"] == "torch computes a recurrent layer in one"
    layer = nn.Linear(3, 3)
    with emulate(layer, Policy(accumulate="fp16")) as emulation, torch.autocast("cpu"):
        layer(x)
        assert emulation.report().skipped["sums of linear"] == "autocast chooses the dtype"


def test_random_sums_are_new_in_each_step_and_the_same_for_the_same_key():
    layer, x = nn.Linear(64, 8), normal(4, 64)
    policy = Policy(accumulate=Accumulator("e5m4", rounding="stochastic"))
    runs = []
    for _ in range(2):
        with emulate(layer, policy, key=Key(1)):
            runs.append([layer(x), layer(x)])
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(*runs[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile asks, and hides it
def test_copies_pickles_and_compiled_models_give_the_same_bits():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(64, 5)), normal(3, 4, 10)
    policy = Policy(accumulate=Accumulator("e5m4", chunk=4))
    with emulate(model, policy):
        y = model(x)
        y.sum().backward()
        for same_model in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(same_model(x), y)
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with emulate(model, policy):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        z = compiled(x)
        z.sum().backward()
    assert torch.equal(z, y)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))


def test_the_operator_passes_torchs_checks():
    args = normal(3, 4), normal(4, 2), spec_of(Accumulator()), None, "forward", 0
    torch.library.opcheck(torch.ops.fpemu.matmul.default, args)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_policy_with_an_accumulator_comes_back_from_a_file(how, tmp_path):
    policy = Policy(weight="fp16", accumulate=how, rules={"head": Policy(accumulate="bf16")})
    for end in ("toml", "yaml", "json"):
        policy.save(tmp_path / f"policy.{end}")
        assert Policy.load(tmp_path / f"policy.{end}") == policy
    assert Policy(accumulate="fp16") == Policy(accumulate=Accumulator("fp16"))
    assert Policy.from_dict({"accumulate": "fp16"}) == Policy(accumulate="fp16")


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="how must be an Accumulator"):
        product(normal(2, 2), normal(2, 2), "fp16")
    with pytest.raises(TypeError, match="product needs torch tensors, got ndarray"):
        product(np.ones(2), np.ones(2), Accumulator())
    with pytest.raises(ValueError, match="needs key="):
        product(normal(2, 2), normal(2, 2), Accumulator("bf16", rounding="stochastic"))
    with pytest.raises(ValueError, match="no_such"):
        Policy(accumulate="no_such")
    layer = nn.Linear(2, 2)
    with emulate(layer, Policy(accumulate="fp16")), pytest.raises(RuntimeError, match="emulated already"):
        emulate(layer, Policy(weight="fp16"))


def test_long_fp16_sums_lose_half_and_chunks_of_64_a_thousandth():
    uniform = np.random.default_rng(0).random((20, 16384))
    x = quantize((1 + (uniform - 0.5) * 12**0.5).astype(np.float32), "fp16")  # mean 1, deviation 1
    ones, exact = np.ones((16384, 1), np.float32), x.sum(1, dtype=np.float64)

    def error(**more):
        sums = matmul(x, ones, **more)[:, 0]
        return np.mean(np.abs(sums - exact) / exact)

    assert round(error(), 2) == 0.50
    assert round(error(chunk=64, chunk_accumulate="fp16"), 3) == 0.001
    assert error(chunk=64) < 0.002
    assert 0.004 < error(rounding="stochastic", key=Key(0)) < 0.04  # known: 0.012


def test_the_weight_gradient_of_a_convolution_needs_chunks():
    # 16 images of 32 x 32 pixels: each element of it is a sum of 16,384 terms, of activations after ReLU.
    x, w = normal(16, 4, 32, 32).relu(), normal(8, 4, 3, 3, seed=1).requires_grad_()
    g = normal(16, 8, 32, 32, seed=2) + 0.3
    exact = torch.nn.grad.conv2d_weight(x.double(), w.shape, g.double(), padding=1)
    errors = []
    for how in (Accumulator("fp16"), Accumulator("fp16", chunk=64)):
        w.grad = None
        convolve.convolve(x, w, padding=1, how=spec_of(how), key=None).backward(g)
        errors.append(float((w.grad - exact).norm() / exact.norm()))
    assert errors[0] > 5 * errors[1]  # seen: 0.023 and 0.0018


def accuracy(how):
    """Of a perceptron on the digits after 150 steps, its sums rounded forward and backward."""
    data = load_data("digits")
    model, draw = mlp(data.inputs, data.classes), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with emulate(model, Policy(accumulate=how), count=False):
        for _ in range(150):
            chosen = torch.randint(len(data.train_x), (128,), generator=draw)
            optimizer.zero_grad()
            F.cross_entropy(model(data.train_x[chosen]), data.train_y[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def test_training_in_three_significand_bits_needs_chunks():
    # Sums of 2 fraction bits; 8 bits of exponent are range enough.
    assert accuracy("e8m2") < 0.5  # seen: 0.10, as good as guessing
    assert accuracy(Accumulator("e8m2", chunk=16)) > 0.9  # seen: 0.95; in float32 0.97


@pytest.mark.slow
def test_training_in_four_significand_bits_gains_from_chunks():
    sequential, chunks = accuracy("e8m3"), accuracy(Accumulator("e8m3", chunk=16))
    assert 0.85 < sequential < chunks  # seen: 0.942 and 0.961
