from __future__ import annotations

import numpy as np
import pytest
import torch
from same import same

import fpemu
from fpemu import Key, as_format, dot, is_representable, next_down, next_up, quantize, ulp
from fpemu.formats import NAMED

UP_TO_16 = [f for f in NAMED if f.bits <= 16] + [as_format(f"binary8p{p}{s}f") for p in (1, 4) for s in "su"]


@pytest.mark.parametrize("fmt", UP_TO_16, ids=str)
def test_next_up_and_down_walk_through_all_values(fmt):
    values = fmt.values()
    assert same(next_up(values[:-1], fmt) + 0.0, values[1:])
    assert next_up(fmt.max, fmt) == (np.inf if fmt.has_infinity else fmt.max)
    between = (values[1:] + values[:-1]) / 2
    assert same(next_up(between, fmt) + 0.0, values[1:])
    if fmt.signed:
        assert same(next_down(values[1:], fmt) + 0.0, values[:-1])


def test_next_up_agrees_with_numpy_in_float16():
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        wanted = np.nextafter(x, np.float16(np.inf)).astype(np.float64)
    assert same(next_up(x, "fp16") + 0.0, wanted + 0.0)


def test_ulp_agrees_with_numpy_in_float16():
    x = np.arange(2**15, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)][:-1]
    assert same(ulp(x, "fp16"), np.spacing(x).astype(np.float64))
    assert np.isnan(ulp([np.inf, np.nan], "fp16")).all()
    assert ulp(1e6, "fp16") == 512  # beyond the largest value, as if there were none


@pytest.mark.parametrize("fmt", UP_TO_16, ids=str)
def test_representable_are_the_values_and_nothing_beside_them(fmt):
    values = fmt.values()
    assert is_representable(values, fmt).all()
    assert not is_representable((values[1:] + values[:-1]) / 2, fmt).any()
    specials = [np.inf, np.nan, -0.0]
    assert is_representable(specials, fmt).tolist() == [fmt.has_infinity, fmt.has_nan, fmt.has_negative_zero]


def test_nothing_lies_below_an_unsigned_format():
    with pytest.raises(ValueError, match="next_down needs a signed format, got e8m0fnu"):
        next_down(1.0, "e8m0")


def plain(x, fmt):
    total = np.float64(x[0])
    for value in x[1:]:
        total = quantize(np.array([total + np.float64(value)]), fmt)[0]
    return total


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2", "e4m3fn", "tf32", "fp32"])
def test_a_sequential_sum_rounds_every_addition(fmt):
    x = quantize(np.random.default_rng(0).standard_normal(300).astype(np.float32), fmt)
    assert fpemu.sum(x, fmt).item() == np.float32(plain(x, fmt))


def test_a_float16_sum_is_numpys_loop():
    x = np.random.default_rng(0).standard_normal(500).astype(np.float16)
    total = np.float16(0)
    for value in x:
        total = np.float16(total + value)
    got = fpemu.sum(x, "fp16")
    assert got.dtype == np.float16 and got == total


@pytest.mark.parametrize(
    "fmt, total, stops", [("fp16", 7.0859375, 513), ("bf16", 5.0625, 65), ("e4m3", 3.0, 9), ("e5m2", 2.0, 5)]
)
def test_the_harmonic_sum_stops(fmt, total, stops):
    terms = quantize((1 / np.arange(1, 2000)).astype(np.float32), fmt)
    sums = [fpemu.sum(terms[:n], fmt).item() for n in range(1, stops + 50)]
    assert sums[-1] == fpemu.sum(terms, fmt).item() == total
    assert next(n for n, s in enumerate(sums, 1) if s == sums[n] == total) + 1 == stops


@pytest.mark.parametrize(
    "fmt, stall",
    [("fp16", 2048), ("tf32", 2048), ("bf16", 256), ("dlfloat16", 1024), ("e4m3", 16), ("e5m2", 8)],
)
def test_repeated_ones_stall(fmt, stall):
    assert fpemu.sum(np.ones(5000, np.float32), fmt).item() == stall


def test_chunks_and_pairs_lose_less():
    rng = np.random.default_rng(0)
    errors: dict[str, list[float]] = {"sequential": [], "chunk": [], "pairwise": [], "stochastic": []}
    for seed in range(10):
        x = quantize((1 + (rng.random(16384) - 0.5) * 12**0.5).astype(np.float32), "fp16")
        exact = x.sum(dtype=np.float64)
        sums = {
            "sequential": fpemu.sum(x, "fp16"),
            "chunk": fpemu.sum(x, "fp16", order="chunk", chunk=64),
            "pairwise": fpemu.sum(x, "fp16", order="pairwise"),
            "stochastic": fpemu.sum(x, "fp16", rounding="stochastic", key=Key(seed)),
        }
        for name, value in sums.items():
            errors[name].append(abs(float(value) - exact) / exact)
    means = {name: np.mean(values) for name, values in errors.items()}
    # Known: 0.50 sequential, 0.001 in chunks of 64, about 0.012 stochastic.
    assert round(means["sequential"], 2) == 0.5
    assert round(means["chunk"], 3) == 0.001
    assert means["pairwise"] < 0.001
    assert 0.004 < means["stochastic"] < 0.04


def test_a_compensated_sum_of_ones_is_exact():
    assert fpemu.sum(np.full(1000, 1.0, np.float32), "e5m7", compensated=True).item() == 1000
    assert fpemu.sum(np.full(1000, 1.0, np.float32), "e5m7").item() == 256


def test_an_axis_is_summed_row_by_row():
    x = quantize(np.random.default_rng(0).standard_normal((3, 4, 50)).astype(np.float32), "fp16")
    got = fpemu.sum(x, "fp16", axis=1)
    assert got.shape == (3, 50)
    assert got[2, 7] == fpemu.sum(x[2, :, 7], "fp16")
    tensor = fpemu.sum(torch.from_numpy(x), "fp16", axis=1)
    assert same(tensor.numpy(), got)
    assert fpemu.sum(x[:, :0], "fp16", axis=1).tolist() == np.zeros((3, 50)).tolist()


def test_orders_agree_where_nothing_is_rounded():
    x = np.arange(100, dtype=np.float32)
    for options in ({}, {"order": "pairwise"}, {"order": "chunk", "chunk": 7}, {"compensated": True}):
        assert fpemu.sum(x, "fp32", **options).item() == 4950


def test_a_stochastic_sum_draws_from_its_key():
    x = np.full(4000, 0.1, np.float32)
    sums = [fpemu.sum(x, "bf16", rounding="stochastic", key=Key(seed)).item() for seed in range(40)]
    assert len(set(sums)) > 20
    assert sums[3] == fpemu.sum(x, "bf16", rounding="stochastic", key=Key(3)).item()
    exact = 4000 * quantize(x, "bf16")[0]
    assert abs(np.mean(sums) - exact) < 5 * np.std(sums) / 40**0.5


def test_dot_rounds_products_and_sums():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(200).astype(np.float16) for _ in range(2))
    total = np.float16(0)
    for left, right in zip(a, b, strict=True):
        total = np.float16(total + left * right)
    assert dot(a, b, "fp16") == total


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda x: fpemu.sum(x, "fp16", order="tree"),
            "unknown order 'tree'; choose from sequential, pairwise, chunk",
        ),
        (lambda x: fpemu.sum(x, "fp16", order="chunk"), "order='chunk' takes chunk=, at least 1"),
        (lambda x: fpemu.sum(x, "fp16", chunk=4), "order='chunk' takes chunk=, at least 1"),
        (lambda x: fpemu.sum(x, "fp16", order="pairwise", compensated=True), "order='pairwise' does not"),
        (lambda x: fpemu.sum(x, "fp16", axis=1), "axis must be from -1 to 0, got 1"),
        (lambda x: fpemu.sum(x, "fp16", rounding="stochastic"), "needs key="),
        (
            lambda x: fpemu.sum(x, "fp16", compensated=True, rounding="stochastic", key=Key(0)),
            "deterministic one",
        ),
        (lambda x: fpemu.sum(x.astype("f8"), "e8m30"), "up to 25 significand bits, but e8m30 has 31"),
        (lambda x: dot(x, x[:2], "fp16"), r"two vectors of one length, got shapes \(3,\) and \(2,\)"),
        (lambda x: dot(x[None], x[None], "fp16"), "two vectors of one length"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones(3, np.float32))


def test_what_is_no_array_is_refused_before_its_axis():
    with pytest.raises(TypeError, match="x must be a numpy array or a torch tensor, got list"):
        fpemu.sum([1.0, 2.0], "fp16", axis=0)
