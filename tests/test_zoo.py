"""Whole architectures: emulation gives the bits of casts written by hand, and the audit misses none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from same import same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fpemu import Policy, cast, emulate, quantize

POLICY = Policy(
    input="e4m3fn", weight="e4m3fn", activation="e4m3fn", gradient="e5m2", weight_gradient="e4m3fn"
)
VOCABULARY = 11


@dataclass(frozen=True)
class Case:
    """An architecture.

    Attributes:
        make_model: Makes it; its weights are seeded by the caller.
        make_inputs: From a seed, what it takes.
        by_hand: From a Reader and the inputs, what the emulated model returns.
        exceptions: Module, operation and phase of the products that the audit lists as not covered.
        fullgraph: Whether it compiles without a break.
    """

    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[int], tuple[Tensor, ...]]
    by_hand: Callable[..., Any]
    exceptions: tuple[tuple[str, str, str], ...] = ()
    fullgraph: bool = True


@dataclass(frozen=True)
class Reader:
    """Parameters by name, each rounded anew wherever it is read."""

    raw: dict[str, Tensor]

    def __call__(self, name: str) -> Tensor:
        return cast(self.raw[name], forward="e4m3fn", backward="e4m3fn")

    def of(self, layer: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of a layer."""
        return self(f"{layer}.weight"), self(f"{layer}.bias")


# The casts that the documentation promises, and the layers that end in one.


def both(x):
    return cast(x, forward="e4m3fn", backward="e5m2")


def linear(w, name, x):
    return both(F.linear(x, *w.of(name)))


def conv(w, name, x, **options):
    return both(F.conv2d(x, *w.of(name), **options))


def conv_transpose(w, name, x, **options):
    return both(F.conv_transpose2d(x, *w.of(name), **options))


def layer_norm(w, name, x):
    return both(F.layer_norm(x, x.shape[-1:], *w.of(name)))


def batch_norm(w, name, x):
    return both(F.batch_norm(x, None, None, *w.of(name), training=True))


def relu(x):
    return both(F.relu(x))


def heads_first(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def normal(*shape):
    return lambda seed: (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),)


def tokens(*shape):
    return lambda seed: (torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)),)


# The architectures, each followed by its casts written by hand.


def perceptron():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 5), nn.Tanh())


def perceptron_by_hand(w, x):
    h = relu(linear(w, "0", x))
    return both(torch.tanh(linear(w, "3", both(F.dropout(h, 0.5)))))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def convolutional_by_hand(w, x):
    x = both(F.conv2d(x, w("0.weight"), padding=1))
    x = both(F.max_pool2d(relu(batch_norm(w, "1", x)), 2))
    x = relu(conv(w, "4", x, groups=2))
    return linear(w, "7", both(x.flatten(1)))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x):
        h = self.relu(self.first_norm(self.first(x)))
        return self.relu(self.second_norm(self.second(h)) + self.shortcut(x))


def residual():
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2), pool, nn.Flatten(), nn.Linear(8, 3))


def residual_by_hand(w, x):
    for block, stride in (("0", 1), ("1", 2)):
        h = conv(w, f"{block}.first", x, stride=stride, padding=1)
        h = relu(batch_norm(w, f"{block}.first_norm", h))
        h = batch_norm(w, f"{block}.second_norm", conv(w, f"{block}.second", h, padding=1))
        x = relu(h + (conv(w, f"{block}.shortcut", x, stride=stride) if stride > 1 else both(x)))
    return linear(w, "4", both(both(F.adaptive_avg_pool2d(x, 1)).flatten(1)))


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.body = layer(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x):
        h, state = self.body(self.embedding(x))
        return self.head(h), state


def recurrent_by_hand(function, states):
    def by_hand(w, x):
        x = both(F.embedding(x, w("embedding.weight")))
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = [w(f"body.{kind}_l{layer}") for layer in (0, 1) for kind in kinds]
        start = [x.new_zeros(2, len(x), 8)] * states
        h, *state = function(x, start if states > 1 else start[0], weights, True, 2, 0.0, True, False, True)
        return linear(w, "head", both(h)), *map(both, state)

    return by_hand


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Linear(8, 3))


def encoder_by_hand(w, x):
    projected = both(F.linear(x, w("0.self_attn.in_proj_weight"), w("0.self_attn.in_proj_bias")))
    q, k, v = (heads_first(part, 2) for part in projected.chunk(3, -1))
    h = both(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)
    x = layer_norm(w, "0.norm1", x + both(linear(w, "0.self_attn.out_proj", h)))
    h = both(F.relu(linear(w, "0.linear1", x)))
    return linear(w, "1", layer_norm(w, "0.norm2", x + both(linear(w, "0.linear2", h))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.gelu, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x) + self.position
        q, k, v = (heads_first(part, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        x = x + self.down(self.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


def decoder_by_hand(w, x):
    x = both(F.embedding(x, w("embedding.weight"))) + w("position")
    projected = linear(w, "qkv", layer_norm(w, "norms.0", x))
    q, k, v = (heads_first(part, 2) for part in projected.chunk(3, -1))
    h = both(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    x = x + linear(w, "out", h.transpose(1, 2).flatten(2))
    x = x + linear(w, "down", both(F.gelu(linear(w, "up", layer_norm(w, "norms.1", x)))))
    return both(F.linear(layer_norm(w, "norms.2", x), w("embedding.weight")))


def autoencoder():
    down = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1)
    up = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, stride=2)
    return nn.Sequential(*down, *up, nn.Sigmoid())


def autoencoder_by_hand(w, x):
    x = relu(conv(w, "0", x, stride=2, padding=1))
    x = conv(w, "2", x, stride=2, padding=1)
    x = relu(conv_transpose(w, "3", x, stride=2))
    return both(torch.sigmoid(conv_transpose(w, "5", x, stride=2)))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.tokens, self.channels = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(8, 8))
        self.gelu = nn.GELU()

    def forward(self, x):
        x = x + self.gelu(torch.einsum("btc,ts->bsc", self.norms[0](x), self.tokens))
        return x + self.gelu(torch.einsum("btc,cd->btd", self.norms[1](x), self.channels))


def mixer():
    return nn.Sequential(Mixer(), Mixer(), nn.LayerNorm(8), nn.Linear(8, 3))


def mixer_by_hand(w, x):
    for block in ("0", "1"):
        h = layer_norm(w, f"{block}.norms.0", x)
        x = x + both(F.gelu(both(torch.einsum("btc,ts->bsc", h, w(f"{block}.tokens")))))
        h = layer_norm(w, f"{block}.norms.1", x)
        x = x + both(F.gelu(both(torch.einsum("btc,cd->btd", h, w(f"{block}.channels")))))
    return linear(w, "3", layer_norm(w, "2", x))


class Experts(nn.Module):
    """Each token goes to two experts; to the last one goes none."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.gate.bias[3] = -100

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            y = expert(x.index_select(0, token)) * weights[token, place, None]
            total = total.index_add(0, token, y)
        return self.head(self.norm(x + total))


def experts_by_hand(w, x):
    weights, chosen = linear(w, "gate", x).softmax(-1).topk(2)
    total = torch.zeros_like(x)
    for number in range(4):
        token, place = (chosen == number).nonzero(as_tuple=True)
        y = linear(w, f"experts.{number}", x.index_select(0, token)) * weights[token, place, None]
        total = total.index_add(0, token, y)
    assert 3 not in chosen
    return linear(w, "head", layer_norm(w, "norm", x + total))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        fine = self.relu(self.first(x))
        coarse = self.relu(self.middle(self.pool(fine)))
        return self.last(torch.cat([self.up(coarse), fine], 1))


def unet_by_hand(w, x):
    fine = relu(conv(w, "first", x, padding=1))
    coarse = relu(conv(w, "middle", both(F.max_pool2d(fine, 2)), padding=1))
    return conv(w, "last", torch.cat([conv_transpose(w, "up", coarse, stride=2), fine], 1), padding=1)


class Heads(nn.Module):
    """A leaf: its products are rounded, and all that it returns in a dict."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        return {"mean": F.linear(x, self.mean), "parts": [(x @ self.scale.T).exp(), x * 0.3], "name": "heads"}


def heads():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Heads())


def heads_by_hand(w, x):
    x = relu(linear(w, "0", x))
    scale = both(both(x @ w("2.scale").T).exp())
    return {"mean": both(F.linear(x, w("2.mean"))), "parts": [scale, both(x * 0.3)], "name": "heads"}


class Checkpointed(nn.Module):
    """What is run again multiplies, and reads a parameter that is no factor of a matrix product too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.norm = nn.LayerNorm(6)

    def mix(self, x):
        return self.norm((x @ self.first).relu() @ self.second * self.scale)

    def forward(self, x):
        return checkpoint(self.mix, x, use_reentrant=False)


def checkpointed():
    return nn.Sequential(Checkpointed(), Checkpointed())


def checkpointed_by_hand(w, x):
    for block in ("0", "1"):
        first, second, scale = (w(f"{block}.{name}") for name in ("first", "second", "scale"))
        x = layer_norm(w, f"{block}.norm", both(both(x @ first).relu() @ second) * scale)
    return x


def normed():
    return nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 3)))


def normed_by_hand(w, x):
    def weight(name):
        g, v = (w.raw[f"{name}.parametrizations.weight.original{i}"] for i in (0, 1))
        return cast(torch._weight_norm(v, g, 0), forward="e4m3fn", backward="e4m3fn")

    x = both(torch.tanh(both(F.linear(x, weight("0"), w("0.bias")))))
    return both(F.linear(x, weight("2"), w("2.bias")))


ZOO = {
    "perceptron": Case(perceptron, normal(5, 6), perceptron_by_hand),
    "convolutional": Case(convolutional, normal(2, 3, 8, 8), convolutional_by_hand),
    "residual": Case(residual, normal(2, 4, 6, 6), residual_by_hand),
    "lstm": Case(lambda: Recurrent(nn.LSTM), tokens(3, 5), recurrent_by_hand(torch.lstm, 2)),
    "gru": Case(lambda: Recurrent(nn.GRU), tokens(3, 5), recurrent_by_hand(torch.gru, 1)),
    "encoder": Case(encoder, normal(2, 5, 8), encoder_by_hand),
    "decoder": Case(Decoder, tokens(2, 6), decoder_by_hand),
    "autoencoder": Case(autoencoder, normal(2, 1, 8, 8), autoencoder_by_hand),
    "mixer": Case(mixer, normal(2, 4, 8), mixer_by_hand),
    "experts": Case(Experts, normal(7, 8), experts_by_hand, fullgraph=False),
    "unet": Case(UNet, normal(2, 1, 8, 8), unet_by_hand),
    "heads": Case(heads, normal(5, 6), heads_by_hand),
    "checkpointed": Case(checkpointed, normal(4, 6), checkpointed_by_hand),
    "normed": Case(normed, normal(5, 6), normed_by_hand),
}


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ZOO[name].make_model()


def tensors(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def trained(name, run, parameters, after_backward=lambda: None):
    """Outputs of two batches, and the gradients that accumulate from them."""
    for parameter in parameters:
        parameter.grad = None
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            outputs = tensors(run(*ZOO[name].make_inputs(seed)))
            sum(x.square().mean() for x in outputs).backward()
        after_backward()
        found += [x.detach() for x in outputs]
    found += [parameter.grad.clone() for parameter in parameters]
    assert all(x.isfinite().all() for x in found)
    return found


def by_hand(name: str, model: nn.Module) -> list[Tensor]:
    raw = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}

    def run(*inputs):
        rounded = [quantize(x, "e4m3fn") if x.is_floating_point() else x for x in inputs]
        return ZOO[name].by_hand(Reader(raw), *rounded)

    def round_sums():
        for parameter in raw.values():
            parameter.grad = quantize(parameter.grad, "e4m3fn")

    return trained(name, run, list(raw.values()), round_sums)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same(x.numpy(), y.numpy()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_emulation_gives_the_bits_of_casts_written_by_hand(name):
    model = made(name)
    expected = by_hand(name, model)
    with emulate(model, POLICY):
        assert equal(trained(name, model, list(model.parameters())), expected)


@pytest.mark.parametrize("name", ZOO)
def test_the_audit_finds_no_product_that_is_not_covered(name):
    with emulate(made(name), POLICY) as emulation:
        found = emulation.audit(*ZOO[name].make_inputs(0))
    assert found.products
    assert tuple((row.module, row.op, row.phase) for row in found.uncovered) == ZOO[name].exceptions, found


@pytest.mark.parametrize("name", ZOO)
def test_after_removal_the_bits_and_keys_are_those_before(name):
    model = made(name)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    before = trained(name, model, parameters)
    with emulate(model, POLICY):
        during = trained(name, model, parameters)
        assert list(model.state_dict()) == keys
    assert not equal(during, before)
    assert equal(trained(name, model, parameters), before)
    assert list(model.state_dict()) == keys


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile asks, and hides it
@pytest.mark.parametrize("name", ["perceptron", "convolutional", "decoder", "mixer", "experts"])
def test_a_compiled_model_gives_the_bits_of_an_eager_one(name):
    model = made(name)
    parameters = list(model.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=ZOO[name].fullgraph)
    with emulate(model, POLICY):
        expected = trained(name, model, parameters)
    with emulate(compiled, POLICY):
        assert equal(trained(name, compiled, parameters), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile asks, and hides it
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["perceptron", "decoder"])
def test_a_compiled_model_gives_the_same_bits_without_gradients(name, mode):
    model, inputs = made(name).eval(), ZOO[name].make_inputs(0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with emulate(model, POLICY):
        expected = model(*inputs).detach()
    with mode(), emulate(compiled, POLICY):
        assert equal([compiled(*inputs)], [expected])
