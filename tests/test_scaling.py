"""The range of loss scales that a format allows, and the scaler that stops with a diagnosis."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fpemu import LowPrecision, Policy, Quantizer, as_format, emulate, quantize, tally
from fpemu.scaling import EXPONENTS, Collapse, LossScaler, window


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2", "e4m3fn", "e4m3", "e2m1", "e3m2"])
def test_the_window_is_what_rounding_says_at_every_power_of_two(fmt):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(500) * 2.0 ** rng.integers(-6, 2, 500)).astype(np.float32)
    found = window(tally(x), fmt)
    largest = as_format(fmt).max
    lost, fits = [], []
    for e in EXPONENTS:
        scaled = x.astype(np.float64) * 2.0**e
        rounded = quantize(scaled, fmt)
        lost.append(((rounded == 0) & (x != 0)).sum() / (x != 0).sum())
        # Formats without infinity saturate or give NaN: overflow is what lies beyond, unrounded exponent.
        tie = largest + math.ldexp(1.0, as_format(fmt).emax - as_format(fmt).precision)
        fits.append(np.isfinite(rounded).all() and (np.abs(scaled) <= tie).all())
    assert list(found.lost.values()) == lost
    assert found.lowest == 2.0 ** next(e for e, share in zip(EXPONENTS, lost, strict=True) if share == 0)
    assert found.highest == 2.0 ** max(e for e, fit in zip(EXPONENTS, fits, strict=True) if fit)


@pytest.mark.parametrize(
    "fmt, value, fits",
    [("fp16", 65519.0, True), ("fp16", 65520.0, False), ("e4m3fn", 464.0, True), ("e4m3fn", 465.0, False)],
)
def test_the_upper_cliff_is_at_the_tie_past_the_largest_value(fmt, value, fits):
    found = window(tally(np.float32([value])), fmt)
    assert found.highest == (1.0 if fits else 0.5)


def test_a_range_wider_than_the_format_has_no_window():
    found = window(tally(np.float32([2.0**-60, 2.0**60])), "fp16")
    assert found.empty and found.lowest == 2.0**36 and found.highest == 2.0**-45
    assert (
        str(found) == "binary16: no scale; few are lost only from 2**36, and nothing overflows up to 2**-45"
    )
    tolerant = window(tally(np.float32([2.0**-60, *[2.0**10] * 9])), "fp16", tolerance=0.1)
    assert not tolerant.empty and str(tolerant) == "binary16: scales 2**-34 to 2**5"


def test_a_tally_of_zeros_has_no_upper_end():
    found = window(tally(np.zeros(3, np.float32)), "fp16")
    assert found.highest is None and found.empty


def test_bad_tolerances_and_formats_are_refused():
    with pytest.raises(ValueError, match="tolerance must be a share from 0 to 1, got 2"):
        window(tally(np.ones(2, np.float32)), "fp16", tolerance=2)
    with pytest.raises(ValueError, match="e8m0fnu has no"):
        window(tally(np.ones(2, np.float32)), "e8m0")


# The scaler.


def step(scaler, optimizer, w, gradient):
    optimizer.zero_grad()
    scaler.scale((w * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def setup(**options):
    w = nn.Parameter(torch.ones(2))
    return w, torch.optim.SGD([w], lr=1.0), LossScaler(device="cpu", **options)


def test_without_bounds_it_is_torchs_scaler():
    w, optimizer, mine = setup(scale=8.0, growth_interval=3, floor=2.0**-20, ceiling=2.0**100)
    v = nn.Parameter(torch.ones(2))
    other, theirs = torch.optim.SGD([v], lr=1.0), torch.amp.GradScaler("cpu", 8.0, growth_interval=3)
    for gradient in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0):
        step(mine, optimizer, w, gradient)
        step(theirs, other, v, gradient)
        assert mine.get_scale() == theirs.get_scale() and torch.equal(w, v)
    assert (mine.steps, mine.skipped, mine.skipped_in_a_row) == (9, 2, 0)


def test_the_scale_stays_within_its_bounds():
    w, optimizer, scaler = setup(scale=8.0, growth_interval=1, ceiling=16.0, floor=4.0)
    for _ in range(3):
        step(scaler, optimizer, w, 1.0)
    assert scaler.get_scale() == 16.0
    step(scaler, optimizer, w, math.inf)
    step(scaler, optimizer, w, math.inf)
    assert scaler.get_scale() == 4.0
    with pytest.raises(
        Collapse, match="step 6 was skipped, at the lowest scale, 4; give the scaler emulation="
    ):
        step(scaler, optimizer, w, math.inf)
    assert scaler.get_scale() == 4.0


def test_a_schedule_of_floors_raises_the_scale():
    w, optimizer, scaler = setup(scale=2.0, floor=lambda steps: 2.0 if steps < 2 else 32.0)
    scales = []
    for _ in range(3):
        step(scaler, optimizer, w, 1.0)
        scales.append(scaler.get_scale())
    assert scales == [2.0, 32.0, 32.0]


def test_a_static_scale_stays_and_stops_after_its_patience():
    w, optimizer, scaler = setup(scale=8.0, dynamic=False, patience=3)
    for gradient in (1.0, math.inf, math.nan, 1.0, math.inf, math.inf):
        step(scaler, optimizer, w, gradient)
        assert scaler.get_scale() == 8.0
    with pytest.raises(Collapse, match="step 7 was skipped, 3 in a row"):
        step(scaler, optimizer, w, math.inf)


def test_an_iteration_left_out_by_hand_changes_nothing():
    w, optimizer, scaler = setup(scale=8.0)
    scaler.scale(w.sum()).backward()
    scaler.update()
    assert (scaler.get_scale(), scaler.steps) == (8.0, 0)
    step(scaler, optimizer, w, 1.0)
    assert scaler.steps == 1


def test_the_diagnosis_names_the_first_module_and_role_that_overflows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with emulate(model, Policy(activation="fp32", gradient="e5m2")) as emulation:
        scaler = LossScaler(2.0**18, device="cpu", patience=2, emulation=emulation, growth_interval=1)
        with pytest.raises(Collapse) as error:
            for factor in (1e-9, 1.0, 1.0):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(3, 4)).sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
    assert "the gradient of 2 is the first that overflows or is infinite or NaN: 12 overflows" in str(
        error.value
    )


def test_the_diagnosis_finds_an_overflow_of_the_forward_before_those_it_causes():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    for p in model.parameters():
        p.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with emulate(model, Policy(activation="fp16", gradient="fp16")) as emulation:
        scaler = LossScaler(1.0, device="cpu", dynamic=False, patience=2, emulation=emulation)
        with pytest.raises(Collapse, match="the activation of 0 is the first that overflows"):
            for _ in range(2):
                scaler.scale((model(torch.tensor([[1e6]])) * 0).sum()).backward()
                scaler.step(optimizer)
                scaler.update()


def test_a_scale_can_follow_a_tally():
    w, _, scaler = setup(scale=8.0, ceiling=2.0**20)
    assert scaler.follow(tally(np.float32([1.0])), "fp16") == 2.0**15
    assert float(scaler.scale(torch.ones(()))) == 2.0**15
    assert scaler.follow(tally(np.float32([2.0**-30])), "fp16") == 2.0**20
    assert scaler.follow(tally(np.zeros(2, np.float32)), "fp16") == 2.0**20
    assert w.grad is None


def test_a_state_goes_on_where_it_was_taken():
    w, optimizer, scaler = setup(scale=8.0, growth_interval=3)
    for gradient in (1.0, math.inf, 1.0, 1.0):
        step(scaler, optimizer, w, gradient)
    _, _, other = setup(scale=2.0)
    other.load_state_dict(scaler.state_dict())
    assert (other.steps, other.skipped, other.get_scale()) == (4, 1, 4.0)
    for one in (scaler, other):
        step(one, optimizer, w, 1.0)
    assert other.get_scale() == scaler.get_scale() == 8.0
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("scale, kept", [(1.0, 0.0), (2.0**12, 2.0**-28)])
def test_scaled_gradients_survive_where_unscaled_ones_vanish(scale, kept):
    w = nn.Parameter(torch.zeros(4))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), LossScaler(scale, device="cpu", dynamic=False)
    with emulate(nn.Identity(), Policy(gradient=Quantizer("fp16"))) as emulation:
        scaler.scale(emulation.model(w).sum() * 2.0**-28).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(w.grad, torch.full((4,), kept))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"scale": 0.5}, "the scale must lie between floor and ceiling, got floor 1, scale 0.5"),
        ({"floor": 0.0}, "between floor and ceiling, got floor 0"),
        ({"scale": 8.0, "ceiling": 4.0}, "ceiling 4"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.5}, "backoff_factor between 0 and 1, got 2.0 and 1.5"),
        ({"patience": 0}, "patience must be at least 1 skipped step, got 0"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        LossScaler(device="cpu", **options)


# Gradients that are float16, and clipping.

SMALL = 2.0**-34  # zero in float16, and still there when scaled by 2**16


def half(make, **options):
    w = nn.Parameter(torch.ones(2, dtype=torch.float16))
    return w, make([w], **options), LossScaler(2.0**16, device="cpu")


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_fused_update_of_float16_weights_does_not_lose_what_scaling_saved(make):
    # Adam's first update is lr whatever the gradient's size, as long as it is not zero; SGD's lr makes it so.
    options = {"eps": 1e-20, "lr": 0.5} if make is torch.optim.Adam else {"lr": 2.0**33}
    w, optimizer, scaler = half(make, fused=True, **options)
    scaler.scale((w.float() * SMALL).sum()).backward()
    assert w.grad.dtype == torch.float16 and w.grad.tolist() == [2.0**-18] * 2
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [0.5, 0.5] and scaler.skipped == 0
    # In place the gradient would be gone.
    assert (w.grad / 2.0**16).tolist() == [0.0, 0.0]


def test_a_fused_step_with_an_infinite_float16_gradient_is_skipped_and_counted():
    w, optimizer, scaler = half(torch.optim.SGD, fused=True, lr=1.0)
    scaler.scale(w.float().sum() * 2).backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1.0, 1.0] and (scaler.skipped, scaler.get_scale()) == (1, 2.0**15)


def test_float16_gradients_are_not_unscaled_in_place():
    w, optimizer, scaler = half(torch.optim.SGD, lr=1.0)
    scaler.scale((w.float() * SMALL).sum()).backward()
    with pytest.raises(ValueError, match="fused=True"):
        scaler.step(optimizer)
    assert w.grad.tolist() == [2.0**-18] * 2


def test_rounded_gradients_are_unscaled_in_float32():
    w = nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([w], lr=2.0**34)
    optimizer, scaler = LowPrecision(inner, gradient="fp16"), LossScaler(2.0**16, device="cpu")
    step(scaler, optimizer, w, torch.tensor([SMALL, SMALL * (1 + 2.0**-12)]))
    assert w.tolist() == [-1.0, -1.0]  # the second was rounded where it lay, scaled


@pytest.mark.parametrize("unscale_first", [False, True])
def test_clipping_gives_the_same_update_scaled_or_unscaled(unscale_first):
    w, optimizer, scaler = setup(scale=2.0**10)
    gradient = torch.tensor([3.0, 4.0])
    scaler.scale((w * gradient).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 2.5).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1 - 1.5, 1 - 2.0]


def test_torchs_clipping_is_right_after_unscaling_and_far_too_strong_before():
    ends = []
    for unscale_first in (True, False):
        w, optimizer, scaler = setup(scale=2.0**10)
        scaler.scale((w * torch.tensor([3.0, 4.0])).sum()).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([w], 2.5)
        scaler.step(optimizer)
        ends.append((1 - w.detach()).norm().item())
    assert ends == [pytest.approx(2.5), pytest.approx(2.5 / 2**10)]


def test_float16_norms_do_not_overflow():
    w, optimizer, scaler = half(torch.optim.SGD, fused=True, lr=1.0)
    w.grad = torch.full((2,), 30000.0, dtype=torch.float16)
    scaler.scale(w.sum())  # makes the scale
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(30000 * 2**0.5 / 2**16) and w.grad.tolist() == [30000.0] * 2
    w.grad.fill_(math.inf)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == math.inf and w.grad.tolist() == [math.inf] * 2


def test_a_norm_to_clip_to_is_above_zero():
    _, optimizer, scaler = setup()
    with pytest.raises(ValueError, match="max_norm must be above 0, got 0"):
        scaler.clip_grad_norm_(optimizer, 0)
