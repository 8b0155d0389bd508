from __future__ import annotations

import copy
import gc
import io
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from same import same
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from fpemu import Format, Key, LowPrecision, Quantizer, as_format, quantize


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of floats have the same bits."""
    return same(a.detach().numpy(), b.detach().numpy())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def representable(x: torch.Tensor, fmt: str) -> bool:
    return equal(x, quantize(x.detach(), fmt))


def step(optimizer: torch.optim.Optimizer, *gradients: torch.Tensor | None) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


# Numbers that must come out.


def thousand_times_a_thousandth(fmt: str, lanes: int = 1, **options) -> torch.Tensor:
    w = nn.Parameter(torch.ones(lanes))
    optimizer = LowPrecision(SGD([w], lr=1.0), weight=fmt, **options)
    w.grad = torch.full((lanes,), -0.001)
    for _ in range(1000):
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize(
    "fmt, options, expected",
    [
        ("bf16", {}, 1.0),  # half the distance to the next value is 2**-8
        ("bf16", {"kahan": True}, 2.0),
        ("bf16", {"master": True}, 2.0),
        ("fp16", {}, 1.9765625),
        ("fp16", {"kahan": True}, 2.0),
    ],
)
def test_one_plus_a_thousand_thousandths(fmt, options, expected):
    assert thousand_times_a_thousandth(fmt, **options).tolist() == [expected]


def test_one_plus_a_thousand_thousandths_stochastic_is_right_on_average():
    lanes = 4000
    w = thousand_times_a_thousandth("bf16", lanes, rounding="stochastic").double()
    exact, deviation = 1 + 1000 * float(np.float32(0.001)), 0.083
    assert abs(w.mean().item() - exact) < 5 * deviation / math.sqrt(lanes)
    assert abs(w.std().item() - deviation) < 5 * deviation / math.sqrt(2 * lanes)
    assert len(set(w.tolist())) > 10


@pytest.mark.parametrize("exponent", [-10, -1, 0, 7])
@pytest.mark.parametrize("m", [1.0, 1 + 2**-10, 1.25, 1.5, 2 - 2**-10])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_ratio_above_2048_m_is_lost_in_fp16_and_4096_below_a_power_of_two(m, exponent, direction):
    limit = 4096 if m == 1.0 and direction == "down" else 2048 * m  # |w| / |u| at the tie
    w, tie = m * 2.0**exponent, m * 2.0**exponent / limit
    for closeness, lost in ((1 - 2**-8, 1), (1 + 2**-8, 0)):
        parameter = weight(w)
        optimizer = LowPrecision(SGD([parameter], lr=1.0), weight="fp16")
        step(optimizer, torch.tensor([closeness * (tie if direction == "down" else -tie)]))
        assert (optimizer.updates, optimizer.lost) == (1, lost)
        assert (parameter.item() == w) == bool(lost)


# The figures are given to a tenth of a percent; the statistical error of n weights comes on top.
@pytest.mark.parametrize("fmt, share", [("fp16", 0.539), ("bf16", 0.930)])
def test_lost_share_of_small_updates_to_normal_weights(fmt, share):
    n = 200_000
    w = nn.Parameter(0.05 * normal(n))
    optimizer = LowPrecision(SGD([w], lr=1.0), weight=fmt)
    step(optimizer, 2.0**-16 * normal(n, seed=1))
    assert abs(optimizer.lost_share - share) < 0.0005 + 5 * math.sqrt(share * (1 - share) / n)
    assert optimizer.lost_share == optimizer.lost / optimizer.updates


def descend(lanes: int = 1, round_gradient: bool = False, **options) -> torch.Tensor:
    """The weights of 3000 steps of SGD with lr 0.01 on (w - 1.3)**2 / 2 from 1.0, in bfloat16."""
    w = nn.Parameter(torch.ones(lanes))
    optimizer = LowPrecision(SGD([w], lr=0.01), weight="bf16", **options)
    history = torch.empty(3000, lanes)
    for i in range(3000):
        gradient = w.detach() - 1.3
        w.grad = quantize(gradient, "bf16") if round_gradient else gradient
        optimizer.step()
        history[i] = w.detach()
    return history


BELOW, ABOVE = 1.296875, 1.3046875  # the neighbours of 1.3, the first the nearer one


@pytest.mark.parametrize("round_gradient", [False, True])
def test_descent_in_bfloat16_stays_at_the_start_without_help(round_gradient):
    assert set(descend(round_gradient=round_gradient).ravel().tolist()) == {1.0}


def test_descent_in_bfloat16_ends_next_to_the_minimum_with_a_master_copy():
    assert descend(master=True)[-1].item() == BELOW


@pytest.mark.parametrize("round_gradient", [False, True])
def test_kahan_descent_in_bfloat16_goes_on_between_the_neighbours_of_the_minimum(round_gradient):
    # Two steps in three are below: which one is the 3000th hangs on the smallest rounding on the way.
    end = descend(kahan=True, round_gradient=round_gradient)[-999:, 0]
    assert sorted(end[:3].tolist()) == [BELOW, BELOW, ABOVE]
    assert equal(end, end[:3].repeat(333))


@pytest.mark.parametrize("round_gradient", [False, True])
def test_kahan_has_the_bits_of_the_compensated_sum_in_ml_dtypes(round_gradient):
    def bf16(x):
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    w, lost, history = np.float32(1), np.float32(0), []
    for _ in range(3000):
        gradient = bf16(w - np.float32(1.3)) if round_gradient else w - np.float32(1.3)
        update = bf16(np.float32(w - 0.01 * np.float64(gradient)) - w)
        change = bf16(update - lost)
        new = bf16(w + change)
        w, lost = new, bf16(bf16(new - w) - change)
        history.append(float(w))
    assert descend(kahan=True, round_gradient=round_gradient)[:, 0].tolist() == history


def test_stochastic_descent_in_bfloat16_ends_at_the_minimum_on_average():
    lanes = 2000
    w = descend(lanes, rounding="stochastic")[-1].double()
    assert abs(w.mean().item() - 1.3) < 5 * 0.0038 / math.sqrt(lanes)
    assert abs(w.std().item() - 0.0038) < 5 * 0.0038 / math.sqrt(2 * lanes) + 0.00005


# Weights.


def test_weights_are_rounded_at_once_to_nearest_whatever_the_rounding():
    for options in ({}, {"rounding": "stochastic"}, {"master": True}, {"kahan": True}):
        w = nn.Parameter(normal(100))
        LowPrecision(SGD([w], lr=1.0), weight="e5m2", **options)
        assert equal(w, quantize(normal(100), "e5m2"))


def test_the_new_weight_is_rounded_once_from_float32():
    w = nn.Parameter(normal(1000))
    optimizer = LowPrecision(SGD([w], lr=0.1), weight="bf16")
    before = w.detach().clone()
    step(optimizer, normal(1000, seed=1))
    assert equal(w, quantize(before.add(normal(1000, seed=1), alpha=-0.1), "bf16"))


@pytest.mark.parametrize("fmt", ["fp16", as_format("fp16"), torch.float16, Format("mine", 5, 11)])
def test_the_format_is_a_name_a_format_or_a_dtype(fmt):
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight=fmt)
    step(optimizer, torch.tensor([-(2.0**-11 + 2.0**-20)]))
    assert w.item() == 1 + 2**-10


def test_a_quantizer_given_as_a_format_keeps_its_overflow():
    w = weight(57344.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight=Quantizer("e5m2", overflow="saturate"))
    step(optimizer, torch.tensor([-57344.0]))
    assert w.item() == 57344.0


def test_weights_left_alone_stay_float32_bits():
    w, plain = nn.Parameter(normal(100)), nn.Parameter(normal(100))
    optimizer, inner = LowPrecision(SGD([w], lr=0.1, momentum=0.9), state="bf16"), SGD([plain], lr=0.1)
    step(optimizer, normal(100, seed=1))
    step(inner, normal(100, seed=1))
    assert equal(w, plain)


EPS = 1e-6  # not zero in the narrow formats of state
MAKES = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: Adam(p, lr=0.01, eps=EPS),
    "Adam single": lambda p: Adam(p, lr=0.01, foreach=False, amsgrad=True, eps=EPS),
    "AdamW": lambda p: AdamW(p, lr=0.01, eps=EPS),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True, eps=EPS),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=EPS),
}
EACH = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@EACH
def test_a_master_copy_follows_the_plain_optimizer_and_is_rounded(make):
    model = [nn.Parameter(normal(20, 3)), nn.Parameter(normal(3))]
    plain = [nn.Parameter(p.detach().clone()) for p in model]
    optimizer, inner = LowPrecision(make(model), weight="e5m2", master=True), make(plain)
    for i in range(20):
        gradients = normal(20, 3, seed=i), normal(3, seed=i + 100)
        step(optimizer, *(g.clone() for g in gradients))
        step(inner, *(g.clone() for g in gradients))
        for w, p in zip(model, plain, strict=True):
            assert equal(w, quantize(p.detach(), "e5m2"))


@EACH
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("kahan", [False, True])
def test_weights_and_state_are_values_of_their_formats(make, rounding, kahan):
    model = [nn.Parameter(normal(20, 3)), nn.Parameter(normal(3))]
    options = {"rounding": rounding, "kahan": kahan, "key": Key(4)}
    optimizer = LowPrecision(make(model), weight="bf16", state="e5m10", **options)
    for i in range(5):
        step(optimizer, normal(20, 3, seed=i), normal(3, seed=i + 100))
    for w in model:
        assert representable(w, "bf16") and w.isfinite().all()
        state = {name: s for name, s in optimizer.state[w].items() if s is not None and s.shape == w.shape}
        assert all(representable(s, "e5m10") for s in state.values())
        assert all(s.any() for name, s in state.items() if name != "momentum_buffer")
    assert not representable(normal(20, 3), "e5m10")


def test_momentum_is_rounded_between_steps():
    w = weight(0.0)
    optimizer = LowPrecision(SGD([w], lr=1.0, momentum=1.0), state="bf16")
    for _ in range(300):
        step(optimizer, torch.tensor([1.0]))
    assert optimizer.state[w]["momentum_buffer"].item() == 256.0  # where repeated + 1 stalls in bfloat16


def test_the_step_count_of_a_scalar_parameter_is_no_state_to_round():
    w = nn.Parameter(torch.tensor(1.0))
    optimizer = LowPrecision(Adam([w], lr=1e-3, eps=1e-3), state="e5m2")
    for _ in range(20):
        step(optimizer, torch.tensor(0.5))
    assert optimizer.state[w]["step"].item() == 20


def test_a_closure_sees_rounded_weights_and_its_loss_comes_back():
    w = nn.Parameter(normal(10))
    optimizer = LowPrecision(SGD([w], lr=0.1), weight="e5m2")

    def closure():
        optimizer.zero_grad()
        assert representable(w, "e5m2")
        loss = w.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and representable(w, "e5m2")
    assert optimizer.updates == 50


@pytest.mark.parametrize("state", [None, "fp16"])
def test_lbfgs_finds_the_minimum_among_the_values_of_the_format(state):
    w = nn.Parameter(torch.tensor([3.0, -2.0]))
    inner = torch.optim.LBFGS([w], line_search_fn="strong_wolfe")
    optimizer = LowPrecision(inner, weight="fp16", state=state)

    def closure():
        optimizer.zero_grad()
        loss = (w - torch.tensor([1.3, 0.7])).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert equal(w, quantize(torch.tensor([1.3, 0.7]), "fp16"))


def test_a_closure_with_a_master_copy_is_refused_and_changes_nothing():
    w = weight(1.3)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16", master=True)
    with pytest.raises(ValueError, match="closure computes gradients at the rounded weights; master=True"):
        optimizer.step(lambda: w.sum())
    assert representable(w, "bf16")


# Counting.


def test_updates_and_lost_are_exact():
    w = weight(1.0, 1.0, 1.0, 1.0, 0.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16")
    assert (optimizer.updates, optimizer.lost, optimizer.lost_share) == (0, 0, 0.0)
    # Lost, moved, no update, a tie to even and so lost, moved.
    step(optimizer, torch.tensor([-0.001, -0.5, 0.0, -(2.0**-8), 1e-30]))
    assert (optimizer.updates, optimizer.lost, optimizer.lost_share) == (4, 2, 0.5)
    step(optimizer, torch.tensor([0.0, 0.0, 0.0, -1.0, 0.0]))
    assert (optimizer.updates, optimizer.lost) == (5, 2)


def test_what_kahan_makes_up_for_is_counted_when_it_arrives():
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16", kahan=True)
    for _ in range(3):
        step(optimizer, torch.tensor([-(2.0**-9)]))
    # 1/4 of the distance to the next value a step: lost, then a tie to even, then 3/4 arrive as 1.
    assert (optimizer.updates, optimizer.lost, w.item()) == (3, 2, 1 + 2**-7)


def test_a_master_copy_loses_no_updates_for_good():
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16", master=True)
    for _ in range(3):
        step(optimizer, torch.tensor([-(2.0**-9)]))
    assert (optimizer.updates, optimizer.lost, w.item()) == (3, 2, 1 + 2**-7)


# Gradients of other kinds.


def test_parameters_without_gradient_stay_and_draw_nothing():
    def run(*gradients):
        model = [nn.Parameter(normal(50, seed=7)), nn.Parameter(normal(50, seed=8))]
        optimizer = LowPrecision(SGD(model, lr=0.1), weight="e5m2", rounding="stochastic")
        step(optimizer, *gradients)
        return model

    both, one = run(normal(50), normal(50, seed=1)), run(None, normal(50, seed=1))
    assert equal(one[0], quantize(normal(50, seed=7), "e5m2"))
    assert equal(one[1], both[1]) and not equal(one[0], both[0])


def test_sparse_gradients_move_their_rows_alone():
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = LowPrecision(SGD(table.parameters(), lr=0.5), weight="bf16")
    before = table.weight.detach().clone()
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    moved = (table.weight != before).any(1)
    assert moved.tolist() == [False, True, False, False, True, False]
    assert equal(table.weight[1], quantize(before[1] - 0.5, "bf16")) and optimizer.updates == 6


def test_channels_last_weights_draw_by_logical_index():
    def run(memory_format):
        w = nn.Parameter(normal(4, 3, 5, 5).to(memory_format=memory_format))
        optimizer = LowPrecision(SGD([w], lr=0.1), weight="e5m2", rounding="stochastic")
        step(optimizer, normal(4, 3, 5, 5, seed=1).to(memory_format=memory_format))
        return w

    assert equal(run(torch.channels_last).contiguous(), run(torch.contiguous_format))


# Random words.


def stochastic_step(params, key=None, steps=1):
    optimizer = LowPrecision(SGD(params, lr=0.1), weight="e5m2", rounding="stochastic", key=key)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        step(optimizer, *(normal(*p.shape, seed=9) for p in parameters))
    return [p.detach().clone() for p in parameters]


def test_the_key_says_which_words_are_drawn():
    def run(key):
        return stochastic_step([nn.Parameter(normal(200))], key)[0]

    assert equal(run(Key(1)), run(Key(1))) and not equal(run(Key(1)), run(Key(2)))
    assert equal(run(None), run(Key(0)))


def test_parameters_draw_by_name_if_they_have_names():
    def named(*names):
        return [(name, nn.Parameter(normal(200))) for name in names]

    a, b = stochastic_step(named("a", "b"))
    swapped_b, swapped_a = stochastic_step(named("b", "a"))
    assert equal(a, swapped_a) and equal(b, swapped_b) and not equal(a, b)


def test_parameters_draw_by_place_without_names():
    first, second = stochastic_step([nn.Parameter(normal(200)) for _ in range(2)])
    assert not equal(first, second)
    groups = [{"params": [nn.Parameter(normal(200))]} for _ in range(2)]
    assert all(map(equal, stochastic_step(groups), (first, second)))


def test_each_step_draws_new_words():
    w = nn.Parameter(torch.ones(500))
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16", rounding="stochastic")
    drawn = []
    for _ in range(2):
        with torch.no_grad():
            w.fill_(1.0)
        step(optimizer, torch.full((500,), -(2.0**-8)))
        drawn.append(w.detach().clone())
    assert not equal(*drawn)


# Groups, schedulers, scalers.


def test_groups_keep_their_learning_rates():
    a, b = weight(1.0), weight(1.0)
    groups = [{"params": [a]}, {"params": [b], "lr": 0.5}]
    optimizer = LowPrecision(SGD(groups, lr=0.25), weight="bf16")
    step(optimizer, torch.tensor([1.0]), torch.tensor([1.0]))
    assert (a.item(), b.item()) == (0.75, 0.5)


@pytest.mark.parametrize("options", [{}, {"master": True}, {"kahan": True}, {"rounding": "stochastic"}])
def test_a_group_added_later_is_rounded_and_stepped(options):
    a, b = weight(1.0), weight(1.3)
    optimizer = LowPrecision(SGD([a], lr=1.0), weight="bf16", **options)
    optimizer.add_param_group({"params": [b], "lr": 0.5})
    assert b.item() == quantize(torch.tensor([1.3]), "bf16").item()
    assert optimizer.optimizer.param_groups is optimizer.param_groups and len(optimizer.param_groups) == 2
    step(optimizer, torch.tensor([0.5]), torch.tensor([1.0]))
    assert a.item() == 0.5 and abs(b.item() - 0.8) < 2**-7 and representable(b, "bf16")


@pytest.mark.parametrize("around", ["LowPrecision", "inner"])
def test_schedulers_work_on_it_and_on_the_optimizer_inside(around):
    w = weight(8.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16")
    target = optimizer if around == "LowPrecision" else optimizer.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(target, step_size=1, gamma=0.5)
    for _ in range(3):
        step(optimizer, torch.tensor([1.0]))
        scheduler.step()
    assert w.item() == 8 - 1 - 0.5 - 0.25
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("options", [{}, {"master": True}, {"kahan": True}, {"rounding": "stochastic"}])
def test_torchs_grad_scaler_unscales_and_skips(options):
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16", **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for value in (0.25, math.inf, 0.5):
        optimizer.zero_grad()
        scaler.scale(w * value).sum().backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert w.item() == 0.25 and scaler.get_scale() == 2.0**9
    assert optimizer.updates == 2


def test_zero_grad_and_hooks_are_those_of_an_optimizer():
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=0.5), weight="bf16")
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(w.item()))
    step(optimizer, torch.tensor([1.0]))
    assert seen == [0.5]
    optimizer.zero_grad(set_to_none=False)
    assert w.grad.tolist() == [0.0]
    optimizer.zero_grad()
    assert w.grad is None


# Saving and going on.


@EACH
@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "stochastic"},
        {"kahan": True},
        {"master": True},
        {"rounding": "stochastic", "kahan": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_resumed_run_has_the_same_bits(make, options):
    def start():
        model = [nn.Parameter(normal(20, 3)), nn.Parameter(normal(3))]
        return model, LowPrecision(make(model), weight="bf16", state="bf16", key=Key(6), **options)

    def go(optimizer, steps):
        for i in steps:
            step(optimizer, normal(20, 3, seed=i), normal(3, seed=i + 100))

    model, optimizer = start()
    go(optimizer, range(4))
    buffer = io.BytesIO()
    torch.save([[p.detach() for p in model], optimizer.state_dict()], buffer)
    go(optimizer, range(4, 8))

    resumed, other = start()
    buffer.seek(0)
    values, state = torch.load(buffer)
    with torch.no_grad():
        for p, value in zip(resumed, values, strict=True):
            p.copy_(value)
    other.load_state_dict(state)
    go(other, range(4, 8))
    assert all(map(equal, resumed, model))
    assert (other.updates, other.lost) == (optimizer.updates, optimizer.lost)


def test_loading_keeps_schedulers_and_groups_together():
    w = weight(8.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), weight="bf16")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(optimizer, torch.tensor([1.0]))
        scheduler.step()
    assert w.item() == 6.5 and optimizer.param_groups is optimizer.optimizer.param_groups


@pytest.mark.parametrize(
    "saved, loaded",
    [({}, {"kahan": True}), ({"master": True}, {}), ({"kahan": True}, {"master": True}), (None, {})],
    ids=["kahan", "no master", "kahan as master", "plain"],
)
def test_a_state_of_another_kind_is_refused(saved, loaded):
    def make(options):
        return LowPrecision(SGD([weight(1.0)], lr=1.0), weight="bf16", **options)

    state = SGD([weight(1.0)], lr=1.0).state_dict() if saved is None else make(saved).state_dict()
    with pytest.raises(ValueError, match="state_dict of a LowPrecision with the same parameters, master="):
        make(loaded).load_state_dict(state)


# Refusals.


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({}, ValueError, "needs weight=, state= or gradient=, a format; all are None"),
        ({"weight": "fp17"}, ValueError, "unknown format 'fp17'"),
        ({"weight": "fp16", "state": 16}, TypeError, "a format is given by name"),
        ({"weight": "fp16", "rounding": "toward_zero"}, ValueError, "choose from nearest_even, stochastic"),
        ({"state": "fp16", "master": True}, ValueError, "master=True needs weight="),
        ({"state": "fp16", "kahan": True}, ValueError, "kahan=True needs weight="),
        ({"weight": "fp16", "master": True, "kahan": True}, ValueError, "choose one"),
        (
            {"weight": Quantizer("e4m3fn", scaling="tensor")},
            ValueError,
            "keeps weights and gradients unscaled",
        ),
        ({"weight": "mxfp8"}, ValueError, "kept in formats of single numbers, and mxfp8_e4m3 has blocks"),
        (
            {"gradient": Quantizer("e4m3fn", scaling="tensor")},
            ValueError,
            "keeps weights and gradients unscaled",
        ),
    ],
)
def test_arguments_that_say_nothing_or_too_much_are_refused(options, error, match):
    w = weight(1 + 2**-20)
    with pytest.raises(error, match=match):
        LowPrecision(SGD([w], lr=1.0), **options)
    assert w.item() == 1 + 2**-20


@pytest.mark.parametrize("inner", [[], SGD, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(inner):
    with pytest.raises(TypeError, match="goes around a torch optimizer, got"):
        LowPrecision(inner, weight="fp16")


@pytest.mark.parametrize("options", [{"weight": "fp16"}, {"state": "fp16"}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_that_are_not_float32_are_refused(dtype, options):
    w = nn.Parameter(torch.ones(2, dtype=dtype))
    with pytest.raises(TypeError, match="float32"):
        LowPrecision(SGD([w], lr=1.0), **options)


# State and gradients of their own formats.


def resembling_adam(n=100_000):
    """Second moments spread as those of a speaker encoder after 1.5 million steps: median 2**-26.2."""
    return torch.exp2(-26.2 + 3.54 * normal(n)).abs()


def after_a_step_of_nothing(state):
    """exp_avg_sq of a step that leaves it but for rounding."""
    w = nn.Parameter(torch.zeros(100_000))
    optimizer = LowPrecision(Adam([w], lr=0.0, betas=(0.9, 1.0 - 2.0**-53), eps=EPS), state=state)
    step(optimizer, torch.zeros(100_000))
    optimizer.state[w]["exp_avg_sq"].copy_(resembling_adam())
    step(optimizer, torch.zeros(100_000))
    return optimizer.state[w]["exp_avg_sq"]


def test_small_second_moments_are_lost_in_fp16_and_outlive_it_scaled():
    exact = resembling_adam().numpy().astype(np.float64)
    assert abs((exact < 2.0**-24).mean() - 0.733) < 5 * math.sqrt(0.733 * 0.267 / 100_000) + 0.002
    plain = after_a_step_of_nothing({"exp_avg_sq": "fp16"}).numpy()
    with np.errstate(under="ignore"):
        assert np.array_equal(plain, exact.astype(np.float16).astype(np.float32))
    assert (plain == 0).mean() > 0.6
    scaled = after_a_step_of_nothing({"exp_avg_sq": Quantizer("fp16", scaling="tensor")}).numpy()
    power = 2.0 ** math.floor(math.log2(65504 / exact.max()))
    with np.errstate(under="ignore"):
        assert np.array_equal(scaled, ((exact * power).astype(np.float16).astype(np.float32) / power))
    assert (scaled == 0).mean() < 0.001


def test_state_is_rounded_by_name_and_the_rest_if_asked():
    for state, first, second in (
        ({"exp_avg": "bf16"}, "bf16", None),
        ({"exp_avg_sq": "e5m10", "*": "bf16"}, "bf16", "e5m10"),
        ({"exp_avg": None, "*": "bf16"}, None, "bf16"),
    ):
        w = nn.Parameter(normal(100))
        optimizer = LowPrecision(Adam([w], lr=0.01, eps=EPS), state=state)
        step(optimizer, normal(100, seed=1))
        for name, fmt in (("exp_avg", first), ("exp_avg_sq", second)):
            assert representable(optimizer.state[w][name], fmt or "fp32")
            assert fmt is not None or not representable(optimizer.state[w][name], "bf16")


def test_state_that_the_optimizer_does_not_keep_is_refused():
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=1.0, momentum=0.5), state={"exp_avg": "fp16"})
    with pytest.raises(ValueError, match="names exp_avg, which SGD does not keep; it keeps momentum_buffer"):
        step(optimizer, torch.tensor([1.0]))


@pytest.mark.parametrize("state", ["fp16", {"exp_avg_sq": "fp16"}, {"*": "fp16"}])
def test_an_eps_that_would_be_zero_is_told(state):
    with pytest.warns(UserWarning, match="eps=1e-08 of Adam is zero in binary16.*at least 5.96046e-08"):
        LowPrecision(Adam([weight(1.0)]), state=state)


@pytest.mark.parametrize("state", ["bf16", Quantizer("fp16", scaling="tensor"), {"exp_avg": "bf16"}])
def test_an_eps_that_is_not_zero_is_not_told_of(state):
    LowPrecision(Adam([weight(1.0)]), state=state)
    LowPrecision(SGD([weight(1.0)], momentum=0.9), state="fp16")


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_foreach_and_fused_updates_are_rounded_once(make, kind):
    """The wrapped step is the plain one from the same weights, rounded."""
    model = [nn.Parameter(quantize(normal(20, 3), "fp16")), nn.Parameter(quantize(normal(3), "fp16"))]
    plain = [nn.Parameter(p.detach().clone()) for p in model]
    optimizer = LowPrecision(make(model, lr=0.01, **{kind: True}), weight="fp16")
    inner = make(plain, lr=0.01, **{kind: True})
    gradients = normal(20, 3, seed=1), normal(3, seed=2)
    step(optimizer, *gradients)
    step(inner, *gradients)
    for w, p in zip(model, plain, strict=True):
        assert equal(w, quantize(p.detach(), "fp16")) and not equal(w, p)


def test_gradients_are_kept_in_their_format_from_one_backward_pass_to_the_next():
    w = weight(1.0)
    optimizer = LowPrecision(SGD([w], lr=1.0), gradient="bf16")
    for value in [1.0] + [2.0**-9] * 100:
        (w * value).sum().backward()
    assert w.grad.item() == 1.0  # each small one is lost where the sum is stored
    optimizer.zero_grad()
    (w * (1 + 2.0**-9)).sum().backward()
    optimizer.step()
    assert w.item() == 0.0


def test_gradients_accumulated_stochastically_draw_new_words_each_time():
    lanes = 4000
    w = nn.Parameter(torch.zeros(lanes))
    optimizer = LowPrecision(SGD([w], lr=1.0), gradient="bf16", rounding="stochastic", key=Key(2))
    for value in [1.0] + [2.0**-9] * 64:
        (w * value).sum().backward()
    # 64 times a quarter of the distance to the next value: p(1 - p) of variance each, if independent.
    exact, deviation = 1 + 64 * 2.0**-9, 2.0**-7 * math.sqrt(64 * 0.25 * 0.75)
    assert abs(w.grad.double().mean().item() - exact) < 5 * deviation / math.sqrt(lanes)
    assert abs(w.grad.double().std().item() - deviation) < 5 * deviation / math.sqrt(2 * lanes)
    optimizer.step()


def test_sparse_gradients_are_no_gradients_to_keep_in_a_format():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = LowPrecision(SGD(embedding.parameters(), lr=1.0), gradient="bf16")
    with pytest.raises(TypeError, match="got a sparse one of parameter 0"):
        embedding(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()


def test_gradients_are_left_alone_when_their_optimizer_is_gone():
    w = weight(1.0)
    LowPrecision(SGD([w], lr=1.0), gradient="e5m2")
    gc.collect()
    (w * 1.3).sum().backward()
    assert w.grad.item() == np.float32(1.3)
