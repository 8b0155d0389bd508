"""Sums over ranks in one process; test_ranks.py has them between processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from same import same
from test_ranks import torchrun
from torch import distributed as dist

from fpemu import Key, Quantizer, as_format, quantize
from fpemu.comm import AllReduce, ReduceScatter, emulate_ranks
from fpemu.comm.wire import from_bytes, nbytes, to_bytes


def gradients(world, n, std=1.0, seed=0):
    return torch.randn(world, n, generator=torch.Generator().manual_seed(seed)) * std


def half_ring(x):
    """A textbook's ring of processes, in numpy's halves: each step all send one chunk and add one."""
    world, n = x.shape
    size = -(-n // world)
    padded = np.zeros((world, world * size), np.float16)
    padded[:, :n] = x
    held = padded.reshape(world, world, size)
    for step in range(world - 1):
        sent = [held[rank, (rank - 1 - step) % world].copy() for rank in range(world)]
        for rank in range(world):
            held[rank, (rank - 2 - step) % world] += sent[rank - 1]
    return np.concatenate([held[rank, rank] for rank in range(world)])[:n]


def half_tree(x):
    """Sums of neighbours, level by level."""
    level = list(x.astype(np.float16))
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    return level[0]


@pytest.mark.parametrize("world", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize("std", [1.0, 1e-6, 3e4])
def test_half_sums_are_those_of_numpys_halves(world, n, std):
    x = gradients(world, n, std)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = {"ring": half_ring(x.numpy()), "tree": half_tree(x.numpy())}
        halves = x.numpy().astype(np.float16).astype(np.float32)
        total = halves[0]
        for part in halves[1:]:
            total = total + part
        expected["fp32"] = total.astype(np.float16)
    for order, wanted in expected.items():
        got = emulate_ranks(x, AllReduce("fp16", order=order))
        assert same(got.numpy(), wanted.astype(np.float32) / np.float32(world)), order


@pytest.mark.parametrize("world", [3, 8])
def test_each_division_is_where_it_says(world):
    x = gradients(world, 64)
    halves = x.numpy().astype(np.float16)
    before = halves / np.float16(world)
    multiplied = halves * np.float16(1 / world)
    for divide, terms in (("before", before), ("premultiply", multiplied)):
        got = emulate_ranks(x, AllReduce("fp16", order="tree", divide=divide))
        assert same(got.numpy(), half_tree(terms).astype(np.float32))
    assert (before.astype(float) != multiplied).any() == (world == 3)


# Independent figures, computed with numpy's halves: L2 error of a mean of normal gradients.
RELATIVE_ERRORS = {
    "ring": {8: 5.0e-4, 32: 9.0e-4, 128: 1.7e-3},
    "tree": {8: 4.4e-4, 32: 5.4e-4, 128: 6.3e-4},
    "fp32": {8: 3.0e-4, 32: 3.0e-4, 128: 3.0e-4},
}


def relative_error(x, reduction):
    exact = x.double().mean(0)
    return float((emulate_ranks(x, reduction) - exact).norm() / exact.norm())


@pytest.mark.parametrize("world", [8, 32, 128])
def test_errors_by_order_are_the_known_ones(world):
    x = gradients(world, 20_000, 0.01)
    for order, known in RELATIVE_ERRORS.items():
        assert relative_error(x, AllReduce("fp16", order=order)) == pytest.approx(known[world], rel=0.1)


def test_dividing_tiny_gradients_first_loses_them_and_torchs_hook_does_the_same():
    x = gradients(128, 20_000, 2e-6)
    assert relative_error(x, AllReduce("fp16", divide="after")) == pytest.approx(0.0085, rel=0.1)
    assert relative_error(x, AllReduce("fp16", divide="before")) == pytest.approx(0.91, rel=0.1)
    # What torch's fp16_compress_hook puts into its sum, in torch's own halves.
    compressed = x.half().div_(128)
    sums = AllReduce("fp16", divide="before").arithmetic(128)
    assert torch.equal(sums.contribution(x[5], 5, 0), compressed[5].float())


def test_tallies_count_each_rounding_by_place():
    x = torch.tensor([[2.0**-25, 40000.0, 1.0], [0.0, 40000.0, 2.0**-12], [0.0, 0.0, 0.0]])
    reduction = AllReduce("fp16", divide="premultiply")
    emulate_ranks(x, reduction)
    tallies = reduction.tallies()
    assert list(tallies) == ["input", "division", 1, 2]
    assert [tally.count for tally in tallies.values()] == [9, 9, 3, 3]
    assert tallies["input"].underflow == 1
    reduction = AllReduce("fp16", order="tree")
    emulate_ranks(x, reduction)
    emulate_ranks(x, reduction)
    assert reduction.tallies()[1].overflow == 2 and reduction.tallies()[2].overflow == 0
    assert list(AllReduce("fp16", order="fp32").tallies()) == []


def test_a_sum_beyond_the_format_is_infinite_for_good_and_saturates_if_asked():
    x = torch.tensor([[60000.0], [60000.0], [-60000.0]])
    assert emulate_ranks(x, AllReduce("fp16", order="tree")).item() == np.inf
    got = emulate_ranks(x, AllReduce(Quantizer("fp16", overflow="saturate"), order="tree"))
    assert got.item() == np.float32(65504 - 60000) / np.float32(3)


@pytest.mark.parametrize("order", ["ring", "tree", "fp32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_of_one_rank_come_through(order, bad):
    x = gradients(4, 5)
    x[2, 3] = bad
    for fmt in ("fp16", "bf16", "e5m2"):
        got = emulate_ranks(x, AllReduce(fmt, order=order))
        assert same(got[3:4].numpy(), np.float32([bad])) and got[[0, 1, 2, 4]].isfinite().all()
    # There is no infinity in e4m3fn.
    assert emulate_ranks(x, AllReduce("e4m3fn", order=order))[3].isnan()


def test_one_rank_changes_nothing():
    x = gradients(1, 10)
    reduction = AllReduce("e2m1", divide="before", error_feedback=True)
    assert torch.equal(emulate_ranks(x, reduction), x[0])
    assert reduction.bytes == 0 and reduction.calls == 0 and not reduction.tallies()


def test_partial_sums_have_a_format_of_their_own():
    x = gradients(8, 1000)
    inputs = quantize(x, "e4m3fn")
    wide = emulate_ranks(x, AllReduce("e4m3fn", accumulate="fp16"))
    partial = emulate_ranks(inputs, AllReduce("fp16"))
    assert same((wide * 8).numpy(), quantize(partial * 8, "e4m3fn").numpy())
    reduction = AllReduce("e4m3fn", accumulate="fp32")
    emulate_ranks(x, reduction)
    assert list(reduction.tallies()) == ["input", "result"]


@pytest.mark.parametrize("order", ["ring", "tree"])
@pytest.mark.parametrize("rounding", ["toward_zero", "toward_positive", "nearest_away", "to_odd"])
def test_every_addition_is_rounded_once(order, rounding):
    # 1 and 2**-40 added in float32 are 1: a mode with a direction must see the rest.
    x = torch.tensor([[1.0], [2.0**-20], [-(2.0**-24)]])
    got = emulate_ranks(x, AllReduce(Quantizer("fp16", rounding), order=order))
    terms = [x[(1 + hop) % 3] for hop in range(3)] if order == "ring" else x
    total = torch.tensor([0.0], dtype=torch.float64)
    for term in terms:
        total = quantize(total + term, "fp16", rounding)
    assert got.item() == np.float32(total.item()) / np.float32(3)


def test_stochastic_sums_are_unbiased_and_differ_by_bucket():
    n = 20_000
    x = torch.full((4, n), 1 + 0.3 * 2**-10)
    reduction = AllReduce("fp16", rounding="stochastic", key=Key(1))
    first, second = emulate_ranks(x, reduction), emulate_ranks(x, reduction)
    assert not torch.equal(first, second)
    again = AllReduce("fp16", rounding="stochastic", key=Key(1))
    assert torch.equal(emulate_ranks(x, again), first)
    for mean in (first, second):
        error = mean.double() - x[0].double()
        assert abs(error.mean()) < 5 * error.std() / n**0.5


def test_stochastic_words_belong_to_the_place_in_the_bucket():
    x = gradients(4, 64)
    whole = AllReduce("e4m3fn", "tree", rounding="stochastic").arithmetic(4)
    part = AllReduce("e4m3fn", "tree", rounding="stochastic").arithmetic(4)
    assert torch.equal(whole.contribution(x[2], 2, 0)[10:20], part.contribution(x[2, 10:20], 2, 10))
    assert not torch.equal(whole.contribution(x[2], 2, 0), whole.contribution(x[2], 1, 0))


def test_a_function_of_the_rank_and_lists_of_tensors_give_the_same_bits():
    x = gradients(5, 30)
    for order in ("ring", "tree", "fp32"):
        wanted = emulate_ranks(x, AllReduce("bf16", order=order))
        assert torch.equal(
            emulate_ranks(lambda rank: x[rank], AllReduce("bf16", order=order), world=5), wanted
        )
        parts = [[row[:12].view(3, 4), row[12:]] for row in x]
        got = emulate_ranks(parts, AllReduce("bf16", order=order))
        assert [part.shape for part in got] == [(3, 4), (18,)]
        assert torch.equal(torch.cat([part.flatten() for part in got]), wanted)


def test_dtypes_are_kept_and_rounded_once():
    x = torch.tensor([[1 + 2**-11 + 2**-40], [1 + 2**-11 + 2**-40]], dtype=torch.float64)
    got = emulate_ranks(x, AllReduce("fp16"))
    assert got.dtype == torch.float64 and got.item() == 1 + 2**-10
    assert emulate_ranks(x.half(), AllReduce("e5m2")).dtype == torch.float16


def test_error_feedback_sends_later_what_rounding_lost():
    x = torch.full((4, 3), 1.0)
    x[:, 1] = 2.0**-27  # an eighth of fp16's smallest value: lost each time
    x[:, 2] = np.inf
    for divide in ("before", "after", "premultiply"):
        plain, fed = (AllReduce("fp16", divide=divide, error_feedback=on) for on in (False, True))
        sums = [
            sum(emulate_ranks(x, reduction)[:2].double() for _ in range(64)) for reduction in (plain, fed)
        ]
        assert sums[0].tolist() == [64.0, 0.0]
        assert sums[1][0] == 64 and abs(sums[1][1] - 64 * 2.0**-27) <= 2.0**-22
        assert not any(residual.isinf().any() for residual in fed.residuals.values())


def test_a_saved_state_goes_on_with_the_same_bits():
    x = gradients(4, 50)
    options = {"fmt": "e5m2", "error_feedback": True, "rounding": "stochastic"}
    reduction, resumed = AllReduce(**options), AllReduce(**options)
    for _ in range(3):
        emulate_ranks(x, reduction)
    resumed.load_state_dict(reduction.state_dict())
    assert torch.equal(emulate_ranks(x, resumed), emulate_ranks(x, reduction))
    with pytest.raises(ValueError, match="parameter 'weight' of 2 elements"):
        reduction.load_state_dict(
            {"calls": 1, "residuals": {"weight": torch.zeros(2)}}, torch.nn.Linear(3, 1)
        )


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2", "e4m3fn", "e3m2", "e2m1", "tf32", "fp32"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_codes_of_any_width_survive_the_wire(fmt, count):
    fmt = as_format(fmt)
    x = quantize(gradients(1, count)[0], fmt)
    data = to_bytes(x, fmt)
    assert data.dtype == torch.uint8 and data.numel() == nbytes(count, fmt)
    assert same(from_bytes(data, fmt, count).numpy(), x.numpy())


@pytest.mark.parametrize(
    "order, fmt, accumulate, bytes_of_all",
    [
        ("ring", "fp16", None, 3 * 10 * (2 + 2)),
        ("tree", "fp16", None, 3 * 10 * (2 + 2)),
        ("fp32", "fp16", None, 3 * 10 * (2 + 2)),
        ("ring", "e4m3fn", "fp16", 3 * 10 * (2 + 1)),
        ("tree", "e2m1fn", None, 3 * (5 + 5)),
        ("ring", "e2m1fn", None, 3 * 2 * (2 + 2 + 2 + 1)),  # chunks of 3, 3, 3 and 1
    ],
)
def test_bytes_are_those_of_codes_without_gaps(order, fmt, accumulate, bytes_of_all):
    reduction = AllReduce(fmt, order, accumulate)
    emulate_ranks(gradients(4, 10), reduction)
    assert reduction.bytes == bytes_of_all / 4


@pytest.mark.parametrize(
    "options, words",
    [
        ({"order": "star"}, "unknown order 'star'; choose from ring, tree, fp32"),
        ({"divide": "never"}, "unknown divide"),
        ({"transport": "mail"}, "unknown transport"),
        ({"rounding": "up"}, "unknown rounding"),
        ({"fmt": "e8m0"}, "signed format"),
        ({"fmt": "mxfp8"}, "signed format without scaling or blocks"),
        ({"fmt": Quantizer("fp16", scaling="tensor")}, "scale the loss"),
        ({"order": "fp32", "accumulate": "fp16"}, "adds in float32"),
        ({"accumulate": "e5m2"}, "must hold all values of binary16|e5m2"),
        ({"transport": "wire", "order": "tree"}, "sends around a ring"),
        ({"transport": "wire", "fmt": "e2m1"}, "has none for NaN"),
        ({"key": Key(0)}, "key= is read by"),
        ({"then": print, "order": "ring"}, "then= reduces by itself"),
        ({"then": print, "transport": "wire"}, "then= reduces by itself"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        AllReduce(**{"fmt": "fp16"} | options)


def test_gradients_that_do_not_fit_are_refused():
    reduction = AllReduce("fp16")
    for grads, world, words in (
        ([torch.ones(2), torch.ones(3)], None, "rank 0's shapes"),
        (lambda rank: torch.ones(2), None, "needs world="),
        (torch.ones(2, 2), 2, "with a function only"),
        ([], None, "at least one"),
    ):
        with pytest.raises(ValueError, match=words):
            emulate_ranks(grads, reduction, world)
    with pytest.raises(TypeError, match="int64"):
        emulate_ranks(torch.ones(2, 2, dtype=torch.int64), reduction)
    for op in (dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
        with pytest.raises(ValueError, match="averages or sums"):
            ReduceScatter(reduction)(torch.ones(1), torch.ones(2), None, op)
    with pytest.raises(ValueError, match="leave out error_feedback"):
        ReduceScatter(AllReduce("fp16", error_feedback=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_get_the_bits_of_one(ranks):
    torchrun("reduce.py", ranks=ranks)
