"""The networks to train: their size, their shapes, and that they learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fpemu.experiments.models import MODELS, build, gru, mlp, resnet8, transformer

VOCABULARY = 11
FACTORIES = [lambda seed: mlp(4, 3, seed=seed), lambda seed: resnet8(seed=seed)]
FACTORIES += [
    lambda seed: transformer(VOCABULARY, 16, seed=seed),
    lambda seed: gru(VOCABULARY, 16, seed=seed),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> list[float]:
    """Those of 20 steps on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("factory", FACTORIES, ids=["mlp", "resnet8", "transformer", "gru"])
def test_a_seed_gives_its_weights_and_leaves_torchs_generator_alone(factory):
    before = torch.get_rng_state()
    one, same, other = (factory(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_resnet8_has_the_parameters_that_its_docstring_states():
    # Convolutions, then scale and shift of each normalization; the last two blocks have a shortcut.
    first = 9 * 16 + 2 * 16
    blocks = 2 * (9 * 16 * 16 + 2 * 16)
    for inputs, outputs in ((16, 32), (32, 64)):
        blocks += 9 * (inputs + outputs) * outputs + inputs * outputs + 3 * 2 * outputs
    assert parameters(resnet8()) == first + blocks + 64 * 10 + 10 == 77754
    assert str(parameters(resnet8())) in resnet8.__doc__


@pytest.mark.parametrize("side, channels, classes", [(28, 1, 10), (32, 3, 7)])
def test_resnet8_takes_images_of_28_and_32_pixels(side, channels, classes):
    model = resnet8(channels, classes)
    assert model(torch.zeros(2, channels, side, side)).shape == (2, classes)
    # The strides are two: 64 channels of 7x7 or 8x8 before the mean.
    assert model[:-3](torch.zeros(2, channels, side, side)).shape == (2, 64, side // 4, side // 4)


def test_transformer_has_the_parameters_that_its_docstring_states():
    width, vocabulary, context = 128, 65, 64
    norm = 2 * width
    attention = (width + 1) * 3 * width + (width + 1) * width
    network = (width + 1) * 4 * width + (4 * width + 1) * width
    rest = context * width + 2 * (2 * norm + attention + network) + norm
    assert parameters(transformer(vocabulary)) == rest + vocabulary * width
    assert rest == 404992 and str(rest) in transformer.__doc__


def test_the_head_of_the_transformer_stays_its_embedding_while_it_trains():
    model = transformer(VOCABULARY, 16)
    tokens = random_tokens(2, 9)
    losses(model, tokens[:, :-1], tokens[:, 1:], lr=0.1)
    assert model.head.weight is model.token.weight


def test_a_later_token_does_not_change_earlier_logits():
    model, tokens, at = transformer(VOCABULARY, 32, context=16), random_tokens(2, 16), 9
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(-1).all()


def test_the_transformer_tells_the_order_of_earlier_tokens():
    model = transformer(VOCABULARY, 32, context=16)
    one, other = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1]
    assert not torch.allclose(one, other)


def test_texts_longer_than_the_context_and_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="at most context=8 tokens, got 9"):
        transformer(VOCABULARY, 16, context=8)(random_tokens(1, 9))
    with pytest.raises(ValueError, match="heads must divide width, got heads=3 and width=16"):
        transformer(VOCABULARY, 16, heads=3)


def test_resnet8_learns_a_random_batch():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 1, 28, 28, generator=random)
    found = losses(resnet8(), x, torch.randint(10, (16,), generator=random), lr=0.1)
    assert found[-1] < 0.75 * found[0]


def test_the_transformer_learns_a_random_batch():
    tokens = random_tokens(4, 17)
    found = losses(transformer(VOCABULARY, 32, context=16), tokens[:, :-1], tokens[:, 1:], lr=0.5)
    assert found[-1] < 0.75 * found[0]


def test_the_gru_learns_a_random_batch_and_no_later_token_changes_earlier_logits():
    tokens, model = random_tokens(4, 17), gru(VOCABULARY, 32)
    found = losses(model, tokens[:, :-1], tokens[:, 1:], lr=0.5)
    assert found[-1] < 0.9 * found[0]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_for_its_data(name):
    x = random_tokens(2, 64) if name in ("gru", "transformer") else torch.zeros(2, 64)
    shape = (2, 64, 12) if name in ("gru", "transformer") else (2, 12)
    one, same, other = (build(name, 64, 12, (8, 8), seed=seed) for seed in (1, 1, 2))
    assert one(x).shape == shape
    assert torch.equal(one(x), same(x)) and not torch.equal(one(x), other(x))
