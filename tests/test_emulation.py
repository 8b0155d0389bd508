from __future__ import annotations

import collections
import copy
import dataclasses
import io
import math
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from same import same
from torch import nn
from torch.utils.checkpoint import checkpoint

from fpemu import Key, Policy, Quantizer, cast, emulate, quantize

EVERYTHING = Policy(weight="e4m3fn", activation="fp16", gradient="e5m2", weight_gradient="e5m2")
STOCHASTIC = Quantizer("e4m3fn", rounding="stochastic")


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of floats have the same bits."""
    return same(a.detach().numpy(), b.detach().numpy())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(make, seed: int = 0):
    """What ``make`` makes, with weights from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def perceptron(inplace: bool = False) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=inplace), nn.Linear(5, 2)))


def with_rounded_weights(model: nn.Module, fmt: str) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(quantize(parameter.detach(), fmt))
    return model


class Scale(nn.Module):
    """``x * weight``, where every product with 1 is exact: shows which weight a forward reads."""

    def __init__(self, *weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        return x * self.weight


# What is rounded.


def test_activations_are_values_of_the_format():
    model, x = perceptron(), normal(8, 4)
    hidden = quantize(model[0](x).detach(), "e4m3fn")
    expected = quantize(model[2](hidden.relu()).detach(), "e4m3fn")
    with emulate(model, Policy(activation="e4m3fn")):
        assert equal(model(x), expected)


def test_weights_are_rounded_where_they_are_read():
    model, x = perceptron(), normal(8, 4)
    expected = with_rounded_weights(model, "e4m3fn")(x)
    with emulate(model, Policy(weight="e4m3fn")):
        assert equal(model(x), expected)
    assert not equal(model(x), expected)


def test_parameters_keep_identity_bits_and_names_during_and_after():
    model, x = perceptron(), normal(8, 4)
    before = dict(model.named_parameters())
    bits = {name: value.clone() for name, value in model.state_dict().items()}

    def unchanged():
        now, state = dict(model.named_parameters()), model.state_dict()
        assert now.keys() == before.keys() and all(now[name] is before[name] for name in now)
        assert list(state) == list(bits) and all(equal(state[name], bits[name]) for name in state)

    with emulate(model, EVERYTHING):
        unchanged()
        model(x).sum().backward()
        unchanged()
        with torch.no_grad():
            model(x)
        unchanged()
    unchanged()


def test_gradients_arriving_at_activations_are_rounded():
    model = nn.Identity()
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    with emulate(model, Policy(gradient="e5m2")):
        model(x).backward(torch.tensor([0.55, 0.3]))
    assert x.grad.tolist() == [0.5, 0.3125]


def test_gradients_of_weights_are_rounded():
    model, x = Scale(0.3, 0.7), torch.tensor([0.55, 0.3])
    with emulate(model, Policy(weight_gradient="e5m2")):
        model(x).sum().backward()
    assert model.weight.grad.tolist() == [0.5, 0.3125]


# 1 + 1/8 is no value of e5m2, where 1.25 follows on 1: a tie, which goes to 1.
def test_the_sum_over_micro_batches_is_rounded():
    model = Scale(1.0)
    with emulate(model, Policy(weight_gradient="e5m2")):
        model(torch.tensor([1.0])).sum().backward()
        model(torch.tensor([0.125])).sum().backward()
    assert model.weight.grad.tolist() == [1.0]


def test_the_sum_over_uses_in_one_forward_is_rounded():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = Scale(1.0)

        def forward(self, x):
            return self.scale(x) + self.scale(x / 8)

    model = Twice()
    with emulate(model, Policy(weight_gradient="e5m2")):
        assert model(torch.tensor([1.0])).item() == 1.125
        model(torch.tensor([1.0])).sum().backward()
    assert model.scale.weight.grad.tolist() == [1.0]


def test_stochastic_sums_over_micro_batches_are_unbiased():
    # 3.25 becomes 3 or 3.5, half of the time each; 4 + 3 = 7 is a value, 4 + 3.5 becomes 7 or 8. The mean is
    # 7.25 if both roundings draw words of their own, with variance 3/16.
    lanes = 4096
    model = Scale(*[1.0] * lanes)
    with emulate(model, Policy(weight_gradient=Quantizer("e5m2", rounding="stochastic"))):
        for value in (4.0, 3.25):
            model(torch.full((lanes,), value)).sum().backward()
    assert set(model.weight.grad.tolist()) == {7.0, 8.0}
    assert abs(model.weight.grad.mean().item() - 7.25) < 5 * math.sqrt(3 / 16 / lanes)


def test_a_step_of_sgd_changes_the_true_parameters():
    model, x = Scale(1.0), torch.tensor([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    with emulate(model, Policy(weight="e4m3fn")):
        model(x).sum().backward()
        optimizer.step()
        assert model(x).item() == 1.0
    assert model.weight.item() == 1 - 2.0**-12


def test_frozen_parameters_are_rounded_and_get_no_gradient():
    model, x = perceptron().requires_grad_(False), normal(8, 4)
    with emulate(model, EVERYTHING):
        y = model(x)
    assert not y.requires_grad and all(p.grad is None for p in model.parameters())
    with emulate(model, Policy(weight="e4m3fn")):
        assert equal(model(x), with_rounded_weights(model, "e4m3fn")(x))


def test_parameters_thawed_later_have_their_sums_rounded():
    model = Scale(1.0).requires_grad_(False)
    with emulate(model, Policy(weight_gradient="e5m2")):
        model.requires_grad_(True)
        for value in (1.0, 0.125):
            model(torch.tensor([value])).sum().backward()
    assert model.weight.grad.tolist() == [1.0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_gives_the_same_bits(mode):
    model, x = perceptron(), normal(8, 4)
    with emulate(model, EVERYTHING):
        expected = model(x).detach()
        with mode():
            assert torch.equal(model(x), expected)


def test_an_emulation_made_under_inference_mode_works_outside():
    model, x = Scale(0.3, 0.7), torch.ones(2)
    with torch.inference_mode():
        emulation = emulate(model, Policy(activation=STOCHASTIC))
    model(x)
    model(x).sum().backward()
    assert emulation.tallies()["", "activation"].count == 4


# Left as it was found.


def test_removing_restores_the_bits():
    model, x = perceptron(), normal(8, 4)

    def run():
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y, *(p.grad.clone() for p in model.parameters())]

    before = run()
    with emulate(model, EVERYTHING):
        during = run()
    assert all(map(equal, run(), before))
    assert not any(map(equal, during, before))


def test_nothing_is_left_on_the_model():
    model = perceptron()
    emulation = emulate(model, EVERYTHING, key=Key(1))
    model(normal(2, 4)).sum().backward()
    emulation.remove()
    emulation.remove()
    fresh = perceptron()
    for module, plain in zip(model.modules(), fresh.modules(), strict=True):
        assert module.__dict__.keys() == plain.__dict__.keys()
        for name in module.__dict__:
            if name.endswith(("hooks", "kwargs", "called")):
                assert not module.__dict__[name], name
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_with_block_removes_after_an_exception_too():
    model, x = perceptron(), normal(8, 4)
    expected = model(x)
    with pytest.raises(KeyError), emulate(model, EVERYTHING):
        raise KeyError
    assert equal(model(x), expected)


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.scale = Scale(0.3)
        self.bias = nn.Parameter(torch.tensor([0.7]))
        self.error: BaseException | None = error

    def forward(self, x):
        x = self.scale(x)
        if self.error:
            raise self.error
        return x + self.bias


@pytest.mark.parametrize("error", [ValueError("from forward"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_forward_that_fails_leaves_the_parameters_in_place(error):
    model = Failing(error)
    before = dict(model.named_parameters())
    emulation = emulate(model, EVERYTHING)
    for _ in range(2):
        with pytest.raises(type(error)):
            model(torch.ones(1))
    emulation.remove()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    model.error = None
    assert equal(model(torch.ones(1)), before["scale.weight"] + before["bias"])


def test_a_pre_hook_of_the_user_that_fails_leaves_the_parameters_in_place():
    model = Scale(0.3)
    weight = model.weight
    with emulate(model, EVERYTHING):

        def fail(module, args):
            raise ValueError("from the hook")

        model.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="from the hook"):
            model(torch.ones(1))
        assert model.weight is weight


def test_attaching_twice_is_an_error_and_counts_once():
    model, x = perceptron(), normal(8, 4)
    with emulate(model, EVERYTHING) as emulation:
        for again in (model, model[0]):
            with pytest.raises(RuntimeError, match="is emulated already; remove"):
                emulate(again, EVERYTHING)
        model(x)
    assert emulation.tallies()["0", "activation"].count == 8 * 5
    with emulate(model, EVERYTHING) as emulation:
        model(x)
    assert emulation.tallies()["0", "activation"].count == 8 * 5


def test_two_emulations_share_a_model_by_modules():
    model, x = perceptron(), normal(8, 4)
    hidden = quantize(model[0](x).detach(), "e4m3fn").relu()
    expected = quantize(model[2](hidden).detach(), "e5m2")
    first = emulate(model, Policy(activation="e4m3fn", include="0"))
    second = emulate(model, Policy(activation="e5m2", include="2"))
    assert equal(model(x), expected)
    first.remove()
    assert equal(model(x), quantize(model[2](model[0](x).relu()).detach(), "e5m2"))
    second.remove()


# Which modules.


@pytest.mark.parametrize("name", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["layer*", nn.Conv2d, ["0", "nothing"], "Linear"])
def test_a_pattern_that_matches_nothing_is_an_error_with_names(name, pattern):
    model = perceptron()
    with pytest.raises(ValueError, match=r"matches none of the 4 modules: .*'0' \(Linear\), '1' \(ReLU\)"):
        emulate(model, Policy(activation="fp16", **{name: pattern}))
    assert not model[0]._forward_hooks


@pytest.mark.parametrize(
    "include, exclude, rounded",
    [
        ("*", (), "012"),
        ("0", (), "0"),
        ("[02]", (), "02"),
        (nn.Linear, (), "02"),
        (nn.Module, nn.Linear, "1"),
        ("*", "1", "02"),
        (["0", nn.ReLU], (), "01"),
        (nn.Linear, "2", "0"),
    ],
)
def test_modules_are_chosen_by_name_and_type(include, exclude, rounded):
    model = perceptron()
    with emulate(model, Policy(activation="fp16", include=include, exclude=exclude)) as emulation:
        model(normal(2, 4))
    assert [name for name, _ in emulation.tallies()] == list(rounded)


@pytest.mark.parametrize(
    "model, policy, match",
    [
        (len, EVERYTHING, "needs a torch.nn.Module, got builtin_function"),
        (nn.ReLU(), "fp16", r"needs a Policy, for example Policy\(weight='fp16'\), got 'fp16'"),
    ],
)
def test_other_arguments_are_refused(model, policy, match):
    with pytest.raises(TypeError, match=match):
        emulate(model, policy)


def test_a_root_without_parameters_or_children_is_a_module_too():
    model = nn.ReLU()
    with emulate(model, EVERYTHING) as emulation:
        assert model(torch.tensor([1 + 2**-11])).item() == 1.0
    assert "(model)  activation" in str(emulation.report())


def test_parameters_of_a_module_with_children_are_rounded_and_its_outputs_left():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Scale(0.3)
            self.bias = nn.Parameter(torch.tensor([0.7]))

        def forward(self, x):
            return self.child(x) + self.bias

    model = Parent()
    with emulate(model, Policy(weight="e2m1", activation="e2m1")):
        assert model(torch.ones(1)).item() == 0.5 + 0.5
        assert model(torch.full((1,), 8.0)).item() == 4.0 + 0.5  # 4.5 is no value of e2m1


# Outputs of every kind (scenario 3).


class Pair(NamedTuple):
    y: torch.Tensor
    n: int


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    hidden: tuple | None = None
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: torch.Tensor


@dataclasses.dataclass
class Late:
    y: torch.Tensor
    extra: int = dataclasses.field(default=0, init=False)


def late(y):
    result = Late(y)
    result.extra = 7
    return result


class Returning(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x * 1)


@pytest.mark.parametrize(
    "make, get",
    [
        (lambda y: {"a": y, "n": 3}, lambda o: o["a"]),
        (lambda y: [y, None, 3], lambda o: o[0]),
        (lambda y: (None, y), lambda o: o[1]),
        (lambda y: Pair(y, 3), lambda o: o.y),
        (lambda y: Output(y, (None, 3)), lambda o: o.y),
        (lambda y: Output(torch.tensor(3), (y,)), lambda o: o.hidden[0]),
        (lambda y: Frozen(y), lambda o: o.y),
        (lambda y: {"a": [Output({"b": y})]}, lambda o: o["a"][0].y["b"]),
        (lambda y: collections.OrderedDict(a=y), lambda o: o["a"]),
        (lambda y: y.max(0), lambda o: o.values),
        (late, lambda o: o.y),
    ],
    ids=[
        *(
            "dict",
            "list",
            "tuple",
            "namedtuple",
            "dataclass",
            "in a dataclass",
            "frozen",
            "nested",
            "ordered",
        ),
        *("return type of torch", "field made later"),
    ],
)
def test_tensors_in_any_container_are_rounded_and_so_are_their_gradients(make, get):
    model = Returning(make)
    x = torch.tensor([0.55, 0.3], requires_grad=True)
    plain = make(x.detach())
    with emulate(model, Policy(activation="e4m3fn", gradient="e5m2")) as emulation:
        output = model(x)
        get(output).sum().mul(0.55).backward()
    y = get(plain)
    assert type(output) is type(plain)
    assert equal(get(output), quantize(y, "e4m3fn"))
    assert set(x.grad.tolist()) <= {0.0, 0.5}
    assert emulation.tallies()["", "gradient"].count == y.numel()


def test_what_else_a_container_holds_is_kept():
    for make in (
        lambda y: {"n": 3, "s": "a", "none": None, "i": torch.tensor(3)},
        lambda y: None,
        lambda y: 3,
    ):
        model = Returning(make)
        with emulate(model, Policy(activation="e2m1")):
            assert model(torch.ones(1)) == make(None)
    model = Returning(late)
    with emulate(model, Policy(activation="e2m1")):
        assert model(torch.ones(1)).extra == 7


class Bag(dict):
    """A container that torch's pytree does not open."""


def test_a_container_that_is_not_opened_is_listed():
    model = nn.Sequential(Returning(lambda y: Bag(y=y)))
    with emulate(model, Policy(activation="e2m1")) as emulation:
        y = model(torch.tensor([0.3]))["y"]
    assert y.item() == 0.5 or "left alone: 0.output: " in str(emulation.report())


# Modules of torch.


def test_in_place_relu_gets_fresh_tensors_and_the_right_gradients():  # scenario 1
    plain, inplace = perceptron(), perceptron(inplace=True)
    x = normal(8, 4)
    for model in (plain, inplace):
        with emulate(model, EVERYTHING):
            model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), inplace.parameters(), strict=True):
        assert equal(a.grad, b.grad)


def test_a_module_called_twice_reads_the_same_rounded_weight():  # S7
    layer = Scale(0.3)
    model = nn.Sequential(layer, nn.Identity(), layer)
    with emulate(model, Policy(weight="e2m1")) as emulation:
        assert model(torch.ones(1)).item() == 0.25
    assert model(torch.ones(1)).item() == (torch.tensor(0.3) * torch.tensor(0.3)).item()
    assert emulation.tallies()["0", "weight"].count == 2


def test_shared_weights_are_rounded_in_both_places_and_stay_shared():
    model = nn.Sequential(Scale(0.3), Scale(0.3))
    model[1].weight = model[0].weight
    with emulate(model, Policy(weight="e2m1", weight_gradient="e5m2")):
        y = model(torch.ones(1))
        y.sum().backward()
    assert y.item() == 0.25 and model[0].weight is model[1].weight
    assert model[0].weight.grad.tolist() == [1.0]


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_read_rounded_weights(make):
    model, x = seeded(lambda: make(3, 4, num_layers=2)), normal(5, 2, 3)
    expected = with_rounded_weights(model, "e4m3fn")(x)
    with emulate(model, Policy(weight="e4m3fn", weight_gradient="e5m2")):
        y, _ = model(x)
        assert equal(y, expected[0])
        y.sum().backward()
    for parameter in model.parameters():
        assert equal(parameter.grad, quantize(parameter.grad, "e5m2"))
    assert equal(model(x)[0], copy.deepcopy(model)(x)[0])


def test_a_packed_sequence_is_rounded():
    model = seeded(lambda: nn.LSTM(3, 4))
    packed = nn.utils.rnn.pack_padded_sequence(normal(5, 2, 3), [5, 3])
    with emulate(model, Policy(activation="e4m3fn")):
        output, _ = model(packed)
    assert equal(output.data, quantize(output.data.detach(), "e4m3fn"))


def test_attention_reads_its_own_weights_rounded():
    model, x = seeded(lambda: nn.MultiheadAttention(4, 2)), normal(5, 1, 4)
    rounded = with_rounded_weights(model, "e4m3fn")
    rounded.out_proj.load_state_dict(model.out_proj.state_dict())
    with emulate(model, Policy(weight="e4m3fn", exclude="out_proj")):
        assert equal(model(x, x, x)[0], rounded(x, x, x)[0])


def test_weights_that_another_module_reads_are_rounded_or_listed():  # scenario 5
    model, x = seeded(lambda: nn.MultiheadAttention(4, 2)), normal(5, 1, 4)
    expected = with_rounded_weights(model, "e4m3fn")(x, x, x)[0]
    with emulate(model, Policy(weight="e4m3fn")) as emulation:
        y = model(x, x, x)[0]
    assert equal(y, expected) or "out_proj" in str(emulation.report())


def test_parameters_in_lists_are_rounded_or_listed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.tensor([0.3]))])

        def forward(self, x):
            return x * self.scales[0]

    model = Model()
    with emulate(model, Policy(weight="e2m1")) as emulation:
        y = model(torch.ones(1))
    assert y.item() == 0.5 or "scales" in str(emulation.report())


def test_the_fused_path_of_an_encoder_layer_is_not_taken():  # scenario 6
    model = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = normal(2, 3, 8)
    with emulate(model, Policy(weight="e4m3fn", activation="e4m3fn")) as emulation:
        expected = model(x).detach()
        model.eval()
        with torch.no_grad():
            assert equal(model(x), expected)
    assert emulation.tallies()["linear1", "activation"].count == 2 * 2 * 3 * 16


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_alone_with_a_reason():  # scenario 20
    x = torch.nested.nested_tensor([normal(2, 8), normal(3, 8)])
    with torch.no_grad(), emulate(nn.Linear(8, 8), Policy(activation="e4m3fn")) as emulation:
        assert emulation.model(x).is_nested
    assert "left alone: output: it is nested" in str(emulation.report())


def test_batch_norm_keeps_its_buffers_in_float32_and_integers():
    model, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = normal(8, 3)
    with emulate(model, EVERYTHING):
        y = model(x)
    expected = plain(x)
    assert equal(y, quantize(expected.detach(), "fp16"))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)) and buffer.dtype == plain.get_buffer(name).dtype


def test_an_embedding_takes_integers_and_gives_rounded_rows():
    model, x = seeded(lambda: nn.Embedding(10, 3)), torch.tensor([[1, 2], [2, 9]])
    with emulate(model, EVERYTHING):
        y = model(x)
        y.sum().backward()
    assert equal(y, quantize(model.weight.detach(), "e4m3fn")[x])
    assert model.weight.grad[2].tolist() == [2.0] * 3


def test_sparse_gradients_are_left_alone_and_training_goes_on():
    model = seeded(lambda: nn.Embedding(10, 3, sparse=True))
    with emulate(model, Policy(weight="e4m3fn", weight_gradient="e5m2")) as emulation:
        model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad.is_sparse
    assert "sparse" in str(emulation.report())


def test_outputs_of_a_parametrized_layer_are_rounded():
    model, x = seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))), normal(5, 4)
    with emulate(model, Policy(activation="e4m3fn")):
        y = model(x).detach()
    assert equal(y, quantize(y, "e4m3fn"))


def test_what_is_not_float32_is_left_alone_and_listed():
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Identity())
    with emulate(model, EVERYTHING) as emulation:
        y = model(torch.ones(1, 2, dtype=torch.float64))
        y.sum().backward()
    assert torch.equal(y, model(torch.ones(1, 2, dtype=torch.float64)))
    report = emulation.report()
    assert set(report.skipped) == {"0.weight", "0.bias", "0.output", "1.output"}
    assert "left alone: 0.weight: dtype torch.float64" in str(report)


# Copies.


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved],
    ids=["deepcopy", "pickle", "torch.save"],
)


@COPIES
def test_a_copy_is_emulated_like_the_original(copied):
    model, x = perceptron(), normal(8, 4)
    with emulate(model, Policy(weight=STOCHASTIC, activation=STOCHASTIC, gradient="e5m2")):
        model(x)
        other = copied(model)
        for _ in range(3):
            assert equal(other(x), model(x))
    assert not equal(other(x), model(x))


@COPIES
def test_a_copy_rounds_sums_of_weight_gradients_too(copied):
    model = Scale(1.0)
    with emulate(model, Policy(weight_gradient="e5m2")):
        other = copied(model)
    for value in (1.0, 0.125):
        other(torch.tensor([value])).sum().backward()
    assert other.weight.grad.tolist() == [1.0]


@COPIES
def test_a_copy_has_weights_and_counts_of_its_own(copied):  # scenarios 11, 12
    model, x = perceptron(), normal(8, 4)
    with emulate(model, EVERYTHING) as emulation:
        expected = model(x)
        counts = emulation.tallies()
        other = copied(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert other(x).tolist() == [[0.0, 0.0]] * 8
        assert emulation.tallies() == counts
        assert equal(model(x), expected)
        assert list(other.state_dict()) == list(model.state_dict())


def test_a_copy_made_after_removal_is_plain():
    model, x = perceptron(), normal(8, 4)
    expected = model(x)
    with emulate(model, EVERYTHING):
        model(x)
    assert equal(copy.deepcopy(model)(x), expected)


# torch.compile, torch.func.


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def results(function, model, x):
    """Outputs of three forwards, and the gradients of one backward after them."""
    model.zero_grad()
    outputs = [function(x) for _ in range(3)]
    outputs[-1].square().sum().backward()
    return [*outputs, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_gives_the_bits_of_the_eager_one(compiler, rounding, fullgraph):
    x, model = normal(8, 4), perceptron(inplace=True)
    roles = {role: Quantizer("e4m3fn", rounding) for role in ("weight", "activation", "gradient")}
    policy = Policy(**roles, weight_gradient="e5m2")
    with emulate(model, policy, key=Key(2)) as emulation:
        compiled = results(torch.compile(model, backend="aot_eager", fullgraph=fullgraph), model, x)
        counts = emulation.tallies()
    with emulate(model, policy, key=Key(2)) as emulation:
        assert all(map(equal, compiled, results(model, model, x)))
        assert emulation.tallies() == counts
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_model_compiled_before_is_emulated(compiler):  # scenario 7
    model, x = perceptron(), normal(8, 4)
    compiled = torch.compile(model, backend="aot_eager")
    expected = compiled(x)
    with emulate(compiled, Policy(activation="e2m1")) as emulation:
        y = compiled(x).detach()
        assert list(emulation.tallies()) == [(name, "activation") for name in "012"]
    assert equal(y, quantize(y, "e2m1"))
    assert equal(compiled(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_part_compiled_before_is_emulated(compiler):
    model, x = perceptron(), normal(8, 4)
    model[0] = torch.compile(model[0], backend="aot_eager")
    expected = model(x)
    with emulate(model, Policy(activation="e2m1", include="0")) as emulation:
        y = model(x).detach()
        assert list(emulation.tallies()) == [("0", "activation")]
        assert emulation.tallies()["0", "activation"].count == 8 * model[2].in_features
    assert not equal(y, expected)
    assert equal(model(x), expected)


def test_functional_calls_and_per_example_gradients_are_rounded():
    model, x = perceptron(), normal(6, 4)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradient = torch.func.grad(lambda w, x: torch.func.functional_call(model, w, (x,)).sum())
    with emulate(model, EVERYTHING):
        together = torch.func.vmap(gradient, in_dims=(None, 0))(weights, x)
        for i in range(6):
            for name, one in gradient(weights, x[i]).items():
                assert equal(together[name][i] + 0.0, one + 0.0)  # the sign of zero is the matrix product's
                assert equal(one, quantize(one, "e5m2"))


def test_a_gradient_penalty_is_differentiated_straight_through():
    model, x = Scale(2.0), torch.tensor([0.5], requires_grad=True)
    with emulate(model, Policy(weight="e4m3fn", activation="fp16", gradient="e5m2")):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    # y = w x, d(y^2)/dx = 2 w^2 x = 4; its square 4 w^4 x^2 has the derivative 16 w^3 x^2 = 32 by w.
    assert gradient.item() == 4.0 and model.weight.grad.item() == 32.0


# Random words.


def test_each_forward_draws_new_words_and_the_key_says_which():
    model, x = Scale(*[0.3] * 500), torch.ones(500)
    policy = Policy(activation=STOCHASTIC)

    def run(key):
        with emulate(model, policy, key=key):
            return [model(x).detach() for _ in range(3)]

    first, again, other = run(Key(1)), run(Key(1)), run(Key(2))
    assert all(map(equal, first, again)) and not any(map(equal, first, other))
    assert not equal(first[0], first[1]) and not equal(first[1], first[2])
    assert all(map(equal, run(None), run(Key(0))))


def test_each_module_and_role_draws_its_own_words():
    # 0.3 lies between 0.28125 and 0.3125; the inputs pick one module's value.
    model = nn.ModuleDict({"a": Scale(*[0.3] * 500), "b": Scale(*[0.3] * 500), "c": nn.Identity()})
    x = torch.ones(500)
    with emulate(model, Policy(weight=STOCHASTIC, include=["a", "b"])):
        a, b = model["a"](x), model["b"](x)
    with emulate(model, Policy(activation=STOCHASTIC, include=["a", "c"])):
        a_output, c_output = model["a"](x), model["c"](0.3 * x)
    drawn = [a, b, a_output, c_output]
    assert all({0.28125, 0.3125} == set(y.tolist()) for y in drawn)
    assert not any(equal(drawn[i], drawn[j]) for i in range(4) for j in range(i))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.body = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)


def checkpointed_gradients(use_reentrant):
    model = Checkpointed(use_reentrant)
    before = list(model.parameters())
    x = normal(3, 4).requires_grad_()
    roles = {"weight": STOCHASTIC, "activation": STOCHASTIC, "gradient": STOCHASTIC}
    with emulate(model, Policy(**roles)):
        model(x).square().sum().backward()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    return [x.grad, *(p.grad for p in before)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_a_checkpoint_draws_the_same_bits(use_reentrant):  # scenario 40
    plain, recomputed = checkpointed_gradients(None), checkpointed_gradients(use_reentrant)
    assert all(map(equal, plain, recomputed))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_of_the_whole_model_draws_the_same_bits(use_reentrant):
    model = perceptron()

    def gradients(whole):
        model.zero_grad()
        x = normal(3, 4).requires_grad_()
        with emulate(model, Policy(activation=STOCHASTIC)):
            y = checkpoint(model, x, use_reentrant=use_reentrant) if whole else model(x)
            y.square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters())]

    assert all(map(equal, gradients(False), gradients(True)))


def test_a_later_forward_does_not_change_an_earlier_ones_gradient():
    model = Scale(*[1.0] * 200)
    x = torch.full((200,), 0.3)

    def gradient(another):
        model.zero_grad()
        with emulate(model, Policy(gradient=STOCHASTIC)):
            y = model(x)
            if another:
                model(x)
            y.backward(x)
        return model.weight.grad.clone()

    assert equal(gradient(True), gradient(False))


# Reports and counts.


def test_the_report_of_a_tiny_example_is_right():
    model = nn.Sequential(nn.Identity())
    values = [0.0, 2.0**-25, 2.0**-24, 1.0, 70000.0]  # zero, underflow, subnormal, plain, overflow
    x = torch.tensor(values, requires_grad=True)
    with emulate(model, Policy(activation="fp16", gradient="fp16")) as emulation:
        model(x).backward(torch.full((5,), 2.0**-30))
    tally = emulation.tallies()["0", "activation"]
    assert (tally.count, tally.zero, tally.underflow, tally.subnormal, tally.overflow) == (5, 1, 1, 1, 1)
    assert tally.amax == 70000.0
    gradient = emulation.report().tallies["0", "gradient"]
    assert (gradient.count, gradient.underflow, gradient.amax) == (5, 5, 2.0**-30)
    assert str(emulation.report()).splitlines() == [
        "module  role        format    elements  to zero  subnormal  overflow    NaN   largest  SQNR dB",
        "0       activation  binary16         5   20.00%     20.00%    20.00%  0.00%     7e+04    247.4",
        "0       gradient    binary16         5  100.00%      0.00%     0.00%  0.00%  9.31e-10      0.0",
        "total               binary16        10   60.00%     10.00%    10.00%  0.00%     7e+04    247.4",
    ]
    assert repr(emulation.report()) == str(emulation.report())


def test_the_report_before_a_forward_says_so():
    with emulate(perceptron(), EVERYTHING) as emulation:
        assert str(emulation.report()) == (
            "nothing was counted yet: run the model forward, and backward for gradients"
        )


def test_counts_go_on_over_steps_and_stay_after_removal():
    model = Scale(0.3, 2.0**-20)
    with emulate(model, Policy(weight="e4m3fn", weight_gradient="e5m2")) as emulation:
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
    counts = emulation.tallies()
    assert [(t.count, t.underflow) for t in counts.values()] == [(6, 3), (6, 0)]
    model(torch.ones(2))
    assert emulation.tallies() == counts


def test_a_tally_handed_out_does_not_go_on_counting():
    model = nn.Identity()
    with emulate(model, Policy(activation="fp16")) as emulation:
        model(torch.ones(3))
        tally = emulation.tallies()["", "activation"]
        model(torch.ones(3))
    assert tally.count == 3


def test_counts_of_shards_add_up_to_those_of_the_whole():
    x = normal(8, 5) * 2.0 ** torch.arange(-20, 20, 5).view(8, 1)
    policy = Policy(activation="e4m3fn", gradient="e5m2")

    def counts(x):
        model = nn.Sequential(Scale(0.3, 0.7, 1e-3, 5.0, 100.0), nn.ReLU())
        with emulate(model, policy) as emulation:
            model(x).square().sum().backward()
        return emulation.tallies()

    whole, shards = counts(x), [counts(x[:3]), counts(x[3:])]
    assert {key: shards[0][key] + shards[1][key] for key in whole} == whole
    assert whole["0", "activation"].underflow > 0 < whole["0", "activation"].overflow
    assert all(max(s[key].amax for s in shards) == whole[key].amax for key in whole)


def test_a_thousand_steps_keep_nothing():  # scenario 14
    model, x = perceptron(), normal(2, 4)
    policy = Policy(weight="e4m3fn", activation=STOCHASTIC, gradient="e5m2", weight_gradient="e5m2")
    with emulate(model, policy) as emulation:
        sizes = []
        for steps in (5, 995):
            for _ in range(steps):
                model(x).sum().backward()
                model.zero_grad()
            sizes.append((len(pickle.dumps(model)), len(pickle.dumps(emulation.hooks))))
        assert all(not hooks._kept for hooks in emulation.hooks.values())
    assert emulation.tallies()["0", "activation"].count == 1000 * 2 * 5
    (model_early, hooks_early), (model_late, hooks_late) = sizes
    assert abs(model_late - model_early) < 100 and abs(hooks_late - hooks_early) < 100


# Scales that follow the steps.


def test_delayed_scaling_uses_the_largest_magnitude_of_earlier_steps():
    model, unit = nn.Identity(), normal(50)
    with emulate(model, Policy(activation=Quantizer("e4m3fn", scaling="delayed"))):
        first, larger, again = (model(unit * scale) for scale in (1.0, 2.0**6, 2.0**6))

    def by(amax, x):
        both = torch.cat([torch.tensor([amax]), x])
        return cast(both, Quantizer("e4m3fn", scaling="tensor"))[1:]

    amax = float(unit.abs().max())
    assert equal(first, by(amax, unit))
    assert larger.isnan().any()  # the scale of the first step is too small for it
    assert not equal(again, larger) and equal(again, by(amax * 2.0**6, unit * 2.0**6))


def test_delayed_scaling_forgets_after_sixteen_steps():
    model, unit = nn.Identity(), normal(50)
    with emulate(model, Policy(activation=Quantizer("e4m3fn", scaling="delayed"))):
        model(unit * 2.0**20)
        seen = [model(unit) for _ in range(17)]
    assert equal(seen[0], seen[15]) and not equal(seen[15], seen[16])
    assert equal(seen[16], cast(unit, Quantizer("e4m3fn", scaling="tensor")))


def test_a_checkpoint_recomputes_under_the_same_delayed_scale():
    x = normal(6, 4) * 100
    policy = Policy(activation=Quantizer("e4m3fn", scaling="delayed"), weight="e4m3fn")
    results = []
    for wrapped in (False, True):
        model = perceptron()
        with emulate(model, policy):
            for scale in (1.0, 0.5):
                model.zero_grad()
                y = checkpoint(model, x * scale, use_reentrant=False) if wrapped else model(x * scale)
                y.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(map(equal, *results))


def test_channel_scaling_rounds_weights_row_by_row():
    model = nn.Linear(4, 3)
    model.weight.data *= torch.tensor([[2.0**-30], [1.0], [2.0**30]])
    channel = Quantizer("e4m3fn", scaling="channel")
    with emulate(model, Policy(weight=channel)) as emulation:
        y = model(torch.eye(4))
    expected = torch.stack(
        [cast(row, Quantizer("e4m3fn", scaling="tensor")) for row in model.weight.detach()]
    )
    assert equal(y, torch.nn.functional.linear(torch.eye(4), expected, cast(model.bias.detach(), channel)))
    assert emulation.tallies()["", "weight"].underflow == 0


# With the rest of torch.


def test_under_autocast_what_is_half_is_left_alone_with_a_reason():
    model, x = perceptron(), normal(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with emulate(model, Policy(activation="e2m1")) as emulation:
            y = model(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert "left alone: 0.output: dtype torch.bfloat16" in str(emulation.report())


def test_channels_last_stays_and_is_rounded():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    x = normal(2, 2, 6, 6).contiguous(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    with emulate(model, Policy(weight="e4m3fn", activation="e4m3fn")):
        y = model(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert equal(y, quantize(y.detach(), "e4m3fn"))


def test_states_load_in_both_directions():
    plain, emulated = perceptron(), perceptron()
    plain[0].weight.data.add_(1)
    with emulate(emulated, EVERYTHING):
        emulated.load_state_dict(plain.state_dict())
        assert equal(emulated[0].weight, plain[0].weight)
        emulated[0].weight.data.add_(1)
        plain.load_state_dict(emulated.state_dict())
        emulated.load_state_dict(plain.state_dict(), assign=True)
        emulated(normal(2, 4)).sum().backward()
    assert equal(emulated[0].weight, plain[0].weight)
    assert emulated[0].weight.grad is not None


def test_inputs_of_the_model_are_rounded_in_any_container():
    class Named(nn.Module):
        def forward(self, x, *, options):
            return x + options["shift"], options["count"]

    with emulate(Named(), Policy(input="e4m3fn")) as emulation:
        y, count = emulation.model(torch.tensor([0.3]), options={"shift": torch.tensor([0.1]), "count": 3})
    assert y.item() == 0.3125 + 0.1015625 and count == 3
    assert emulation.tallies()["", "input"].count == 2


def test_the_report_goes_to_pandas_and_to_rich():
    model = nn.Sequential(nn.Identity())
    with emulate(model, Policy(activation="fp16")) as emulation:
        model(torch.tensor([0.0, 2.0**-25, 1.0, 70000.0, math.nan]))
    frame = emulation.report().to_pandas()
    assert frame.loc[0].drop("sqnr").to_dict() == {
        "module": "0",
        "role": "activation",
        "format": "binary16",
        "count": 5,
        "zero": 1,
        "underflow": 1,
        "subnormal": 0,
        "overflow": 1,
        "nan": 1,
        "amax": 70000.0,
    }
    console = Console(width=120, file=io.StringIO())
    console.print(emulation.report())
    assert "70000" in console.file.getvalue() or "7e+04" in console.file.getvalue()


@pytest.mark.parametrize(
    "policy", [EVERYTHING, Policy(every_op="fp16", input="fp16")], ids=["roles", "every_op"]
)
def test_without_counts_the_bits_are_the_same(policy):
    x, results = normal(8, 4), []
    for count in (True, False):
        model = perceptron()
        with emulate(model, policy, count=count) as emulation:
            y = model(x)
            y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
        assert any(t.count for t in emulation.tallies().values()) == count
    assert all(map(equal, *results))
    assert "nothing was counted" in str(emulation.report())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_scripted_models_and_keys_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=r"key must be a fpemu.Key, for example fpemu.Key\(0\), got 5"):
        emulate(nn.Linear(2, 2), EVERYTHING, key=5)
    scripted = torch.jit.trace(nn.Linear(2, 2), normal(1, 2))
    with pytest.raises(TypeError, match="take no hooks; emulate the module that they were made from"):
        emulate(scripted, EVERYTHING)


def test_inputs_that_cannot_be_rounded_are_listed():
    with emulate(nn.Identity(), Policy(input="e4m3fn")) as emulation:
        emulation.model(normal(2).double())
    assert emulation.report().skipped == {"input": "dtype torch.float64"}


# Stopping and going on


@pytest.mark.parametrize(
    "policy",
    [
        Policy(weight=STOCHASTIC, activation=STOCHASTIC, gradient=STOCHASTIC, weight_gradient=STOCHASTIC),
        Policy(activation=Quantizer("e4m3fn", scaling="delayed"), input=STOCHASTIC),
        Policy(every_op=Quantizer("fp16", rounding="stochastic")),
    ],
    ids=["roles", "delayed", "every op"],
)
def test_an_emulation_goes_on_from_its_state_with_the_same_bits_and_counts(policy):
    inputs = [normal(3, 4, seed=seed) for seed in range(6)]
    whole, first, second = (perceptron() for _ in range(3))

    def outputs(model, inputs):
        found = []
        for x in inputs:
            model.zero_grad()
            y = model(x)
            y.sum().backward()
            found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        return found

    with emulate(whole, policy, key=Key(5)) as emulation:
        expected = outputs(whole, inputs)
        counted = emulation.tallies()
    with emulate(first, policy, key=Key(5)) as emulation:
        got = outputs(first, inputs[:2])
        state = emulation.state_dict()
        outputs(first, inputs[4:])  # what comes later does not change it
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    with emulate(second, policy, key=Key(5)) as emulation:
        emulation.load_state_dict(torch.load(buffer, weights_only=True))
        got += outputs(second, inputs[2:])
        tallies = emulation.tallies()
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    assert tallies == counted and all(np.array_equal(tallies[w].sums, counted[w].sums) for w in counted)


def test_a_state_of_other_roles_or_another_rounding_is_refused():
    model = perceptron()
    with emulate(model, Policy(weight="fp16")) as emulation:
        state = emulation.state_dict()
    with (
        emulate(model, Policy(weight="fp16", activation="fp16")) as emulation,
        pytest.raises(ValueError, match=r"only one of the two rounds the activation of 0"),
    ):
        emulation.load_state_dict(state)
    with (
        emulate(model, Policy(weight=Quantizer("fp16", rounding="stochastic"))) as emulation,
        pytest.raises(ValueError, match="needs a state_dict of the same rounding"),
    ):
        emulation.load_state_dict(state)
