"""Block formats where formats are taken: tallies, casts, quantizers, policies, training."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from same import same
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from fpemu import (
    BlockFormat,
    Key,
    LowPrecision,
    Policy,
    Quantizer,
    as_block_format,
    cast,
    emulate,
    quantize,
    tally,
)
from fpemu.blocks import MXFP4, NAMED
from fpemu.emulation.products import ROWS, contracted
from fpemu.quantizer import quantizer_of

WHOLE = BlockFormat("whole", "e4m3fn", "fp32", None, None, "round")
PARTS = BlockFormat("parts", "e4m3fn", "fp32", (None, 3), (1, 0), "round")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- tallies ---


@pytest.mark.parametrize(
    "name, largest, threshold, share", [("mxfp4", 6, 7, 0.0234), ("mxfp8", 448, 464, 0.0086)]
)
def test_how_many_elements_saturate(name, largest, threshold, share):
    x = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    blocks = np.abs(x.reshape(-1, 32)).astype(np.float64)
    scales = 2.0 ** (np.frexp(blocks.max(1, keepdims=True))[1] - math.frexp(largest)[1])
    assert abs((blocks > largest * scales).mean() - share) < 0.0002
    # Those half a quantum and more beyond the largest value are what rounding to nearest takes past it; of
    # e2m1 6 is odd and 7 a tie, of e4m3fn 448 is even and 464 a tie.
    past = blocks >= threshold * scales if name == "mxfp4" else blocks > threshold * scales
    assert tally(x, name).overflow == past.sum() > 0
    assert tally(x, replace(as_block_format(name), scale_rule="ceil")).overflow == 0


def test_a_tally_counts_by_the_scale_of_an_elements_block():
    x = np.zeros((2, 32), np.float32)
    x[0, :5] = [7.5, 0.3, 0.2, 0.6, 5]  # scale 1: saturates, subnormal, to zero, subnormal, normal
    x[1] = 1000 * x[0]
    x[1, 0] = 4096  # scale 1024
    t = tally(x, "mxfp4")
    assert (t.count, t.overflow, t.underflow, t.zero) == (64, 1, 2, 54)
    assert t.subnormal == 4
    assert t.fmt is MXFP4 and t.amax == 5000
    error = x.astype(np.float64) - quantize(x, "mxfp4")
    assert t.sqnr() == pytest.approx(10 * math.log10((x.astype(np.float64) ** 2).sum() / (error**2).sum()))
    assert tally(torch.tensor(x), "mxfp4") == t == tally(torch.tensor(x.T.copy()).T, "mxfp4")
    assert (t + tally(x, "mxfp4")).overflow == 2
    assert tally(np.zeros((0, 3), np.float32), "mxfp4").count == 0


# --- quantizers and casts ---


@pytest.mark.parametrize("fmt", [*NAMED, WHOLE, PARTS], ids=str)
def test_a_quantizer_comes_back_from_its_spec_and_from_files(fmt, tmp_path):
    quantizer = Quantizer(fmt, "stochastic", random_bits=7)
    assert quantizer_of(quantizer.spec) == quantizer
    policy = Policy(forward_a=fmt, gradient=quantizer)
    for end in ("toml", "json", "yaml"):
        policy.save(tmp_path / f"p.{end}")
        assert Policy.load(tmp_path / f"p.{end}") == policy


def test_a_quantizer_rounds_like_quantize():
    x = numbers(3, 40)
    key = Key(4)
    assert same(Quantizer("mxfp8")(x).numpy(), quantize(x, "mxfp8").numpy())
    assert same(Quantizer("nvfp4", "stochastic")(x, key=key), quantize(x, "nvfp4", "stochastic", key=key))


def test_what_blocks_do_not_go_with_is_refused():
    with pytest.raises(ValueError, match="mxfp8_e4m3 has scales of its own; leave out scaling='tensor'"):
        Quantizer("mxfp8", scaling="tensor")
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(
        ValueError, match="weights are kept in formats of single numbers, and mxfp4 has blocks"
    ):
        LowPrecision(torch.optim.SGD([weight], 0.1), weight="mxfp4")


def test_cast_rounds_values_and_gradients_in_blocks():
    x, g = numbers(4, 64).requires_grad_(), numbers(4, 64, seed=1)
    key = Key(2)
    y = cast(x, "mxfp8", Quantizer(as_block_format("mxfp4", axis=0), "stochastic"), key=key)
    y.backward(g)
    assert same(y.detach().numpy(), quantize(x.detach(), "mxfp8").numpy())
    wanted = quantize(g, "mxfp4", "stochastic", key=key.fold_in("backward"), axis=0)
    assert same(x.grad.numpy(), wanted.numpy())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_cast_gives_the_bits_of_the_eager_one():
    quantizer = Quantizer("nvfp4")
    compiled = torch.compile(lambda x: cast(x, "mxfp8", quantizer), backend="aot_eager", fullgraph=True)
    x, g = numbers(4, 64).requires_grad_(), numbers(4, 64, seed=1)
    y = compiled(x)
    y.backward(g)
    assert same(y.detach().numpy(), quantize(x.detach(), "mxfp8").numpy())
    assert same(x.grad.numpy(), quantize(g, "nvfp4").numpy())


def test_under_vmap_each_array_has_its_own_blocks():
    x = numbers(5, 3, 32)
    for fmt in ("nvfp4", as_block_format("mxfp4", axis=0)):
        got = torch.vmap(lambda part, fmt=fmt: cast(part, fmt))(x)
        assert same(got.numpy(), torch.stack([quantize(part, fmt) for part in x]).numpy())


def test_the_operator_is_a_proper_one():
    x = numbers(3, 40).requires_grad_()
    torch.library.opcheck(torch.ops.fpemu.round, (x, Quantizer("nvfp4").spec, None))


# --- factors of products ---


def test_blocks_run_along_what_a_layer_sums_over():
    layer, x = nn.Linear(48, 40, bias=False), numbers(2, 33, 48).requires_grad_()
    g = numbers(2, 33, 40, seed=1)
    roles = "forward_a forward_w dgrad_g dgrad_w wgrad_g wgrad_a".split()
    with emulate(layer, Policy(**dict.fromkeys(roles, "mxfp4"))):
        y = layer(x)
        y.backward(g)
    w, a = layer.weight.detach(), x.detach()

    def q(t, axis):
        return quantize(t, "mxfp4", axis=axis)

    assert same(y.detach().numpy(), F.linear(q(a, -1), q(w, 1)).numpy())
    assert same(x.grad.numpy(), (q(g, -1) @ q(w, 0)).numpy())
    rows_a, rows_g = q(a.reshape(66, 48), 0), q(g.reshape(66, 40), 0)
    torch.testing.assert_close(layer.weight.grad, rows_g.T @ rows_a)
    assert not torch.allclose(layer.weight.grad, q(g.reshape(66, 40), -1).T @ rows_a, rtol=1e-3)


def test_blocks_run_along_channels_and_the_batch_of_a_convolution():
    layer, x = nn.Conv2d(40, 36, 3, bias=False), numbers(34, 40, 5, 5).requires_grad_()
    g = numbers(34, 36, 3, 3, seed=1)
    roles = "forward_a forward_w dgrad_g dgrad_w wgrad_g wgrad_a".split()
    with emulate(layer, Policy(**dict.fromkeys(roles, "mxfp8"))):
        y = layer(x)
        y.backward(g)

    def q(t, axis):
        return quantize(t.detach(), "mxfp8", axis=axis)

    w = layer.weight
    torch.testing.assert_close(y.detach(), F.conv2d(q(x, 1), q(w, 1)))
    torch.testing.assert_close(x.grad, torch.nn.grad.conv2d_input(x.shape, q(w, 0), q(g, 1)))
    torch.testing.assert_close(w.grad, torch.nn.grad.conv2d_weight(q(x, 0), w.shape, q(g, 0)))


@pytest.mark.parametrize(
    "product, dims, wanted",
    [
        ("matmul", (3, 3), (-1, -2, -1, -1, -2, -2)),
        ("matmul", (3, 2), (-1, -2, -1, -1, ROWS, ROWS)),
        ("mv", (2, 1), (-1, -1, -1, -1, -1, -2)),
        ("conv_transpose1d", (3, 3), (-2, 0, -2, 1, 0, 0)),
        ("conv1d", (2, 3), (-2, 1, -2, 0, -1, -1)),
    ],
)
def test_which_dimension_each_product_sums_over(product, dims, wanted):
    assert tuple(contracted(product, *dims).values()) == wanted


def test_a_product_that_sums_otherwise_leaves_blocks_where_the_format_has_them():
    assert contracted("einsum", 2, 2) == {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(numbers(40, 40))

        def forward(self, x):
            return torch.einsum("bi,io->bo", x, self.weight)

    model, x = Model(), numbers(3, 40, seed=1)
    with emulate(model, Policy(forward_a="mxfp4", forward_w=as_block_format("mxfp4", axis=0))):
        y = model(x)
    wanted = quantize(x, "mxfp4") @ quantize(model.weight.detach(), "mxfp4", axis=0)
    torch.testing.assert_close(y.detach(), wanted)


def test_attention_has_blocks_in_both_its_products():
    layer = nn.MultiheadAttention(64, 2, batch_first=True)
    x = numbers(2, 33, 64)
    policy = Policy(forward_a="mxfp4", forward_w="mxfp4", dgrad_g="mxfp4")
    with emulate(layer, policy) as emulation:
        layer(x, x, x)[0].sum().backward()
    assert emulation.tallies()[("", "forward_a")].count > 3 * 2 * 33 * 64


# --- training ---


def train(policy, steps=150):
    """Accuracy on held-out digits after a few steps of a small network."""
    torch.manual_seed(0)
    data = load_digits()
    x = torch.tensor(data.data / 16, dtype=torch.float32)
    y = torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    emulation = None if policy is None else emulate(model, policy, key=Key(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps):
        rows = torch.arange(step * 64, (step + 1) * 64) % 1500
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    if emulation is not None:
        assert emulation.tallies()[("2", "dgrad_g" if policy.dgrad_g else "gradient")].count > 0
    return accuracy


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_digits_are_learnt_in_blocks_with_stochastic_gradients(name):
    gradient = Quantizer(name, "stochastic")
    policy = Policy(
        forward_a=name, forward_w=name, dgrad_g=gradient, dgrad_w=name, wgrad_g=gradient, wgrad_a=name
    )
    assert train(policy) > train(None) - 0.04 > 0.8


def test_digits_are_learnt_with_plain_roles_in_blocks():
    policy = Policy(weight="mxfp8", activation="mxfp8", gradient="mxfp8_e5m2")
    assert train(policy) > 0.8
