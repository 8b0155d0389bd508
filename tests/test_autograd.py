from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from same import same
from torch import nn
from torch.utils.checkpoint import checkpoint

from fpemu import Key, Quantizer, cast, quantize, tally
from fpemu.autograd import key_tensor, new_tally, round_with_gradient
from fpemu.stats import Tally

STOCHASTIC = Quantizer("e4m3fn", rounding="stochastic")


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of floats have the same bits."""
    return same(a.detach().numpy(), b.detach().numpy())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# 0.3 lies between 0.28125 and 0.3125 in e4m3fn, between 0.25 and 0.3125 in e5m2; 0.55 between 0.5 and 0.5625,
# and between 0.5 and 0.625.
@pytest.mark.parametrize(
    "forward, backward, value, gradient",
    [
        ("e4m3fn", "e5m2", 0.5625, 0.5),
        ("e5m2", "e4m3fn", 0.5, 0.5625),
        ("e4m3fn", None, 0.5625, np.float32(0.55)),
        (None, "e5m2", np.float32(0.55), 0.5),
        (None, None, np.float32(0.55), np.float32(0.55)),
        (Quantizer("e5m2", rounding="toward_positive"), "e2m1", 0.625, 0.5),
    ],
)
def test_value_and_gradient_are_rounded_each_by_its_own(forward, backward, value, gradient):
    x = torch.tensor([0.55], requires_grad=True)
    y = cast(x, forward=forward, backward=backward)
    y.backward(torch.tensor([0.55]))
    assert y.item() == value and x.grad.item() == gradient
    assert x.item() == np.float32(0.55)


def test_three_tenths_is_0_3125_both_ways():
    x = torch.tensor([0.3], requires_grad=True)
    y = cast(x, forward="e4m3fn", backward="e5m2")
    y.backward(torch.tensor([0.3]))
    assert (y.item(), x.grad.item()) == (0.3125, 0.3125)


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "to_odd"])
@pytest.mark.parametrize("overflow", ["ieee", "saturate", "propagate"])
def test_a_cast_has_the_bits_of_quantize(rounding, overflow):
    x = normal(37, 5) * 2.0 ** torch.arange(-20, 17).view(37, 1)
    x[0] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e30])
    quantizer = Quantizer("e4m3fn", rounding, overflow)
    assert equal(cast(x, quantizer), quantize(x, "e4m3fn", rounding, overflow=overflow))


@pytest.mark.parametrize("forward", [None, "fp16"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_result_is_always_a_new_tensor(forward, requires_grad):
    x = torch.ones(4).requires_grad_(requires_grad)
    y = cast(x, forward=forward)
    assert not y._is_view()
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    with torch.no_grad():
        y.zero_()
    assert x.tolist() == [1.0] * 4


def test_in_place_relu_after_a_cast_gets_the_right_gradient():  # scenario 1
    linear = nn.Linear(3, 4)
    x = normal(5, 3)
    seen = []
    y = cast(linear(x), "fp16", "fp16")
    y.register_hook(seen.append)
    nn.ReLU(inplace=True)(y).backward(torch.ones(5, 4))
    positive = quantize(linear(x).detach(), "fp16") > 0
    assert equal(linear.bias.grad, positive.sum(0).float())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_and_bools_pass(dtype):
    x = torch.tensor([0, 1, 3]).to(dtype)
    y = cast(x, "e2m1", "e2m1")
    assert y.dtype == dtype and torch.equal(y, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype_is_rounded_once_and_kept(dtype):
    x = torch.tensor([0.55, -0.3, 1 + 2**-4 + 2**-30, 1e4], dtype=dtype, requires_grad=True)
    y = cast(x, "e4m3fn", "e5m2")
    y.backward(torch.tensor([0.55, 0.3, 1, 2], dtype=dtype))
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(y[:3], quantize(x.detach(), "e4m3fn")[:3]) and y[3].isnan()
    assert x.grad.tolist() == [0.5, 0.3125, 1.0, 2.0]


def test_float64_is_not_rounded_by_way_of_float32():
    x = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert cast(x, "fp16").item() == 1 + 2**-10


class Plain(torch.Tensor):
    """A subclass that nothing is known of."""


class Wrapper(torch.Tensor):
    """A tensor class that holds another tensor, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [a.inner if isinstance(a, Wrapper) else a for a in args]
        result = function(*args, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("forward", ["fp16", None])
@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: torch.ones(2, dtype=torch.complex64), "complex64"),
        (lambda: torch.ones(2).to(torch.float8_e5m2), "float8_e5m2"),
        (lambda: torch.ones(2, 2).to_sparse(), r"sparse_coo.*values\(\)"),
        (lambda: torch.ones(2).as_subclass(Plain), "got Plain; unwrap"),
        (lambda: Wrapper(torch.ones(2)), "got Wrapper; unwrap"),
        (lambda: torch.ones(2, device="meta"), r"on meta.*\.cpu\(\)"),
        (lambda: np.ones(2, np.float32), "torch tensor.*quantize takes numpy"),
        (lambda: [1.0], "torch tensor, got list"),
    ],
    ids=["complex", "float8", "sparse", "subclass", "wrapper", "meta", "numpy", "list"],
)
def test_other_things_are_refused_with_a_sentence(make, match, forward):
    with pytest.raises(TypeError, match=match):
        cast(make(), forward=forward, backward="fp16")


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_unknown_formats_are_refused_in_both_roles(role):
    with pytest.raises(ValueError, match="unknown format 'fp17'"):
        cast(torch.ones(2), **{role: "fp17"})
    with pytest.raises(TypeError, match="given by name"):
        cast(torch.ones(2), **{role: 16})


@pytest.mark.parametrize("roles", [(STOCHASTIC, None), (None, STOCHASTIC), (STOCHASTIC, STOCHASTIC)])
def test_stochastic_needs_a_key(roles):
    with pytest.raises(ValueError, match=r"stochastic.*needs key=.*Key\(0\)"):
        cast(torch.ones(2), *roles)


def test_same_key_same_bits_and_other_step_other_bits():
    x = normal(1000)
    y = cast(x, STOCHASTIC, key=Key(3))
    assert equal(y, quantize(x, "e4m3fn", "stochastic", key=Key(3)))
    assert equal(y, cast(x.clone(), STOCHASTIC, key=Key(3)))
    assert not equal(y, cast(x, STOCHASTIC, key=Key(3, step=1)))
    assert not equal(y, cast(x, STOCHASTIC, key=Key(4)))


def test_the_gradient_draws_other_words_than_the_value():
    x = normal(1000).requires_grad_()
    cast(x, STOCHASTIC, STOCHASTIC, key=Key(3)).backward(x.detach())
    folded = Key(3).fold_in("backward")
    assert equal(x.grad, quantize(x.detach(), "e4m3fn", "stochastic", key=folded))
    assert not equal(x.grad, cast(x, STOCHASTIC, key=Key(3)))


def test_the_gradient_is_rounded_where_only_it_is_stochastic():
    x = normal(100).requires_grad_()
    cast(x, None, STOCHASTIC, key=Key(3)).backward(x.detach())
    folded = Key(3).fold_in("backward")
    assert equal(x.grad, quantize(x.detach(), "e4m3fn", "stochastic", key=folded))


# Layout, shape.


@pytest.mark.parametrize(
    "x",
    [
        normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
        normal(6, 4).t(),
        normal(6, 4)[::2],
        normal(6, 4)[:, 1::2],
        normal(1, 4).expand(3, 4),
        normal(0, 8),
        normal(1)[0],
        normal(2, 2, 2).permute(2, 0, 1),
    ],
    ids=["channels_last", "transposed", "rows", "columns", "expanded", "empty", "0-d", "permuted"],
)
@pytest.mark.parametrize("quantizer", [Quantizer("e4m3fn"), STOCHASTIC], ids=["nearest", "stochastic"])
def test_strides_change_nothing_but_the_memory_format(x, quantizer):
    key = Key(1) if quantizer.stochastic else None
    y = cast(x, quantizer, key=key)
    assert equal(y, cast(x.contiguous(), quantizer, key=key))
    assert y.stride() == torch.empty_like(x).stride()


def test_channels_last_is_kept_for_the_gradient_too():
    x = normal(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = cast(x, "fp16", "fp16")
    y.square().sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


# The operators.

INPUTS = {
    "plain": lambda: normal(3, 4),
    "requires_grad": lambda: normal(3, 4).requires_grad_(),
    "non-contiguous": lambda: normal(4, 6).t()[::2],
    "channels_last": lambda: normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "empty": lambda: torch.empty(0, 3),
    "0-d": lambda: torch.tensor(0.3),
    "double": lambda: normal(3, 4).double(),
}
SPECS = {
    "e4m3fn": (Quantizer("e4m3fn"), None),
    "scaled": (Quantizer("e5m2", overflow="saturate", scaling="tensor"), None),
    "stochastic": (STOCHASTIC, key_tensor(Key(1, step=5))),
    "few bits": (Quantizer("bf16", "stochastic", random_bits=4, variant="A"), key_tensor(Key(1))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("x", INPUTS)
def test_opcheck_is_clean(x, spec):
    quantizer, key = SPECS[spec]
    tensor = INPUTS[x]()
    torch.library.opcheck(torch.ops.fpemu.round.default, (tensor, quantizer.spec, key))
    arguments = (tensor, quantizer.spec, key, *new_tally(quantizer))
    torch.library.opcheck(torch.ops.fpemu.round_tally.default, arguments)


def test_round_tally_counts_and_rounds_like_tally_and_quantize():
    x = normal(50, 7) * 1e-3
    counts, sums = new_tally(Quantizer("e4m3fn"))
    for _ in range(2):
        y = torch.ops.fpemu.round_tally(x, Quantizer("e4m3fn").spec, None, counts, sums)
    one = tally(x, "e4m3fn")
    assert equal(y, quantize(x, "e4m3fn"))
    assert Tally(counts.numpy(), sums.numpy(), one.fmt) == one + one
    assert sums[0] == one.amax


# torch.func.


def test_vmap_gives_the_bits_of_a_loop():
    x = normal(5, 3)
    expected = torch.stack([cast(row, "e4m3fn", "e5m2") for row in x])
    assert equal(torch.func.vmap(lambda row: cast(row, "e4m3fn", "e5m2"))(x), expected)
    columns = torch.func.vmap(lambda row: cast(row, "e4m3fn"), in_dims=1, out_dims=1)(x)
    assert equal(columns, cast(x, "e4m3fn"))


def test_vmap_scales_each_example_by_itself():
    x = torch.tensor([[1.0, 2.0**-10], [1000.0, 0.3]])
    quantizer = Quantizer("e4m3fn", scaling="tensor")
    expected = torch.stack([cast(row, quantizer) for row in x])
    assert equal(torch.func.vmap(lambda row: cast(row, quantizer))(x), expected)


def test_grad_and_jacrev_round_the_gradient():
    x = normal(4, 3)
    y = cast(x, "e4m3fn")
    gradient = torch.func.grad(lambda x: cast(x, "e4m3fn", "e5m2").square().sum())(x)
    assert equal(gradient, quantize(2 * y, "e5m2"))
    jacobian = torch.func.jacrev(lambda x: cast(x, "e4m3fn", "e5m2") * 0.55)(x[0])
    assert equal(jacobian, 0.5 * torch.eye(3))


def test_per_example_gradients_are_those_of_a_loop():
    x = normal(6, 3)
    gradient = torch.func.grad(lambda x: cast(x, "e4m3fn", "e5m2").square().sum())
    assert equal(torch.func.vmap(gradient)(x), torch.stack([gradient(row) for row in x]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_forward_mode_is_refused():
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: cast(x, "fp16"), (torch.ones(2),), (torch.ones(2),))


# torch.compile.


@pytest.fixture
def recompiling_is_an_error():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_cast_gives_the_same_bits(recompiling_is_an_error):
    compiled = torch.compile(
        lambda x: cast(x.sin(), "e4m3fn", "e5m2") * 3, fullgraph=True, backend="aot_eager"
    )
    for seed in range(2):
        x, z = normal(5, 3, seed=seed).requires_grad_(), normal(5, 3, seed=seed).requires_grad_()
        y = compiled(x)
        y.sum().backward()
        expected = cast(z.sin(), "e4m3fn", "e5m2") * 3
        expected.sum().backward()
        assert equal(y, expected) and equal(x.grad, z.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_another_step_of_the_key_does_not_recompile(recompiling_is_an_error):
    spec = STOCHASTIC.spec

    def function(x, forward, backward):
        return round_with_gradient(x * 2, spec, forward, None, None, spec, backward, None, None)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = normal(50).requires_grad_()
        keys = Key(1, step=step), Key(1, step=step).fold_in("backward")
        y = compiled(x, *map(key_tensor, keys))
        y.backward(x.detach())
        assert equal(y, cast(x * 2, STOCHASTIC, key=keys[0]))
        assert equal(x.grad, 2 * quantize(x.detach(), "e4m3fn", "stochastic", key=keys[1]))


# One scale for a tensor.


def by_hand(x: torch.Tensor, name: str, overflow: str = "ieee") -> torch.Tensor:
    """x * 2**k rounded and scaled back, with the largest k at which the largest finite magnitude fits."""
    wide = x.double()
    finite = wide[wide.isfinite()].abs()
    amax = finite.max().item() if finite.numel() else 0.0
    if amax == 0:
        return quantize(x, name, overflow=overflow)
    fmt = Quantizer(name).format
    k = math.frexp(fmt.max)[1] - math.frexp(amax)[1] + 1
    while math.ldexp(amax, k) > fmt.max:
        k -= 1
    return (quantize(wide * 2.0**k, name, overflow=overflow) * 2.0**-k).float()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1", "e4m3"])
@pytest.mark.parametrize("exponent", [-90, -40, -9, -1, 0, 1, 8, 40, 90])
def test_tensor_scaling_is_scaling_rounding_and_scaling_back(name, exponent):
    quantizer = Quantizer(name, scaling="tensor")
    for amax in (1.0, 1.25, 1.5, 1.75, 1.76, 1.875, 1 + 7 / 8 + 2**-23, 2 - 2**-23):
        x = (normal(200) / 8).clamp(-1, 1) * 2.0**exponent
        x[17] = -amax * 2.0**exponent
        y = cast(x, quantizer)
        assert equal(y, by_hand(x, name))
        assert y.isfinite().all()


@pytest.mark.parametrize("exponent", [-149, -140, -130, -120, 120, 127])
def test_tensor_scaling_reaches_the_ends_of_float32(exponent):
    x = torch.tensor([1.0, 0.3, -0.01, 0.7]) * 2.0**exponent
    assert equal(cast(x, Quantizer("e4m3fn", scaling="tensor")), by_hand(x, "e4m3fn"))


@pytest.mark.parametrize("overflow", ["ieee", "saturate", "propagate"])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_tensor_scaling_leaves_zeros_infinities_and_nans_out_of_the_scale(name, overflow):
    quantizer = Quantizer(name, overflow=overflow, scaling="tensor")
    zeros = torch.tensor([0.0, -0.0])
    assert equal(cast(zeros, quantizer), zeros)
    mixed = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3e-5, -1e-5])
    assert equal(cast(mixed, quantizer), by_hand(mixed, name, overflow))
    none = torch.tensor([math.inf, math.nan, 0.0])
    assert equal(cast(none, quantizer), quantize(none, name, overflow=overflow))
    assert cast(torch.empty(0, 3), quantizer).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensor_scaling_works_for_every_dtype(dtype):
    x = (normal(100) * 0.01).to(dtype)
    expected = by_hand(x, "e5m2")
    assert torch.equal(cast(x, Quantizer("e5m2", scaling="tensor")).float(), expected)


def test_tensor_scaling_keeps_what_the_bare_format_loses():
    x = torch.tensor([2.0**-20, 2.0**-21])
    assert cast(x, "e4m3fn").tolist() == [0.0, 0.0]
    assert equal(cast(x, Quantizer("e4m3fn", scaling="tensor")), x)


def test_tensor_scaling_is_chosen_anew_for_the_gradient():
    x = normal(50).requires_grad_()
    cast(x, None, Quantizer("e4m3fn", scaling="tensor")).backward(x.detach() * 1e-8)
    assert equal(x.grad, by_hand(x.detach() * 1e-8, "e4m3fn"))


# Recomputation and second derivatives.


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_bits_again(use_reentrant):  # scenario 40
    def run(x):
        return cast(x.sin(), STOCHASTIC, STOCHASTIC, key=Key(5)).square().sum()

    x, z = normal(100).requires_grad_(), normal(100).requires_grad_()
    checkpoint(run, x, use_reentrant=use_reentrant, preserve_rng_state=False).backward()
    run(z).backward()
    assert equal(x.grad, z.grad)


def test_second_derivatives_pass_straight_through_where_the_gradient_is_left_alone():
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    y = cast(x, "e4m3fn")
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert equal(second, 6 * y)


# The rounding of the gradient is straight-through as well, so that 6 y arrives at the cast, and is rounded.
def test_second_derivatives_pass_straight_through_a_rounded_gradient():
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    y = cast(x, "e4m3fn", "e5m2")
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert equal(second, quantize(6 * y.detach(), "e5m2"))


def test_second_derivatives_of_torch_func_are_not_silently_zero():
    x = torch.tensor(0.3)
    second = torch.func.grad(torch.func.grad(lambda x: cast(x, "e4m3fn", "e5m2") ** 3))(x)
    assert equal(second, quantize(6 * cast(x, "e4m3fn"), "e5m2"))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_channel_scaling_is_tensor_scaling_of_each_slice(axis, rounding):
    x = normal(3, 4, 5) * 2.0 ** torch.arange(-30, 30).reshape(3, 4, 5)
    key = Key(1) if rounding == "stochastic" else None
    y = cast(x, Quantizer("e4m3fn", rounding, scaling="channel", axis=axis), key=key)
    assert y.shape == x.shape
    slices, size = x.movedim(axis, 0), x.numel() // x.shape[axis]
    for i, (got, one) in enumerate(zip(y.movedim(axis, 0), slices, strict=True)):
        own = key and replace(key, offset=i * size)
        assert equal(got, cast(one.contiguous(), Quantizer("e4m3fn", rounding, scaling="tensor"), key=own))


def test_channel_scaling_of_a_vector_is_tensor_scaling():
    x = normal(6)
    for axis in (0, 1):
        channel = Quantizer("e4m3fn", scaling="channel", axis=axis)
        assert equal(cast(x, channel), cast(x, Quantizer("e4m3fn", scaling="tensor")))


def test_cast_refuses_delayed_scaling():
    with pytest.raises(ValueError, match="needs the steps of an emulated model; cast has no memory"):
        cast(normal(3), Quantizer("e4m3fn", scaling="delayed"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_cast_of_what_needs_no_gradient_gives_the_same_bits():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: cast(x, "e4m3fn", "e5m2") * 3, fullgraph=True, backend="aot_eager")
    x = normal(50)
    assert equal(compiled(x), cast(x, "e4m3fn") * 3)
