"""quantize on float32: the oracles of numpy and ml_dtypes, random words, layouts, bad input."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from same import same

from fpemu import Format, Key, as_format, quantize, reference
from fpemu.formats import ROUNDINGS
from fpemu.kernels import launch

ORACLES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
}


def float32s(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def agrees(name, x):
    with np.errstate(all="ignore"):
        return same(quantize(x, name), x.astype(ORACLES[name]).astype(np.float32))


@pytest.mark.parametrize("name", ORACLES)
def test_nearest_even_is_that_of_numpy_and_ml_dtypes(name):
    for start in range(0, 2**32, 2**28):  # every 256th pattern, each time another remainder
        assert agrees(name, float32s(np.arange(start + start // 2**28 * 17 % 256, start + 2**28, 256)))


@pytest.mark.parametrize("name", ORACLES)
def test_nearest_even_is_right_beside_every_boundary(name):
    values = as_format(name).values().astype(np.float32)
    positive = values[values >= 0].astype(np.float64)
    middles = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    top = np.float32(as_format(name).max) * np.float32(1 + as_format(name).eps / 4)
    bits = np.concatenate([positive.astype(np.float32), middles, [top]]).view(np.uint32).astype(np.int64)
    near = (bits[:, None] + np.arange(-2, 3)).clip(0).ravel()
    x = float32s(np.concatenate([near, near | 2**31]))
    assert agrees(name, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_nearest_even_is_right_on_every_float32(name):
    for start in range(0, 2**32, 2**24):
        assert agrees(name, float32s(np.arange(start, start + 2**24)))


@pytest.mark.parametrize(
    "x, expected",
    [
        (1 + 2**-11, 1.0),  # tie, even below
        (1 + 3 * 2**-11, 1 + 2**-9),  # tie, even above
        (65519.99, 65504.0),
        (65520.0, np.inf),  # tie between the largest value and the binade above
        (2**-25, 0.0),  # tie between zero and the smallest value
        (2**-25 * 1.0000001, 2**-24),
        (-(2**-26), -0.0),
        (-0.0, -0.0),
    ],
)
def test_nearest_even_in_binary16(x, expected):
    assert same(quantize(np.array([x], np.float32), "fp16"), np.array([expected], np.float32))


@pytest.mark.parametrize(
    "x, overflow, expected",
    [
        (464, "ieee", 448.0),
        (465, "ieee", np.nan),
        (465, "saturate", 448.0),
        (np.inf, "saturate", 448.0),
        (465, "propagate", 448.0),
        (-np.inf, "propagate", np.nan),
    ],
)
def test_overflow_in_e4m3fn(x, overflow, expected):
    got = quantize(np.array([x], np.float32), "e4m3fn", overflow=overflow)
    assert same(got, np.array([expected], np.float32))


@pytest.mark.parametrize(
    "fmt, stall",
    [("fp16", 2048), ("tf32", 2048), ("bf16", 256), ("dlfloat16", 1024), ("e4m3", 16), ("e5m2", 8)],
)
def test_adding_one_stalls(fmt, stall):
    total = np.zeros(1, np.float32)
    for _ in range(2 * stall):
        total = quantize(total + np.float32(1), fmt)
    assert total == stall


@pytest.mark.parametrize("fmt, expected", [("bf16", 1.0), ("fp16", 1.9765625)])
def test_a_thousand_small_steps_to_nearest(fmt, expected):
    total = np.ones(1, np.float32)
    for _ in range(1000):
        total = quantize(total + np.float32(0.001), fmt)
    assert total == expected


def test_a_thousand_small_steps_stochastically():
    total = np.ones(4000, np.float32)
    for step in range(1000):
        total = quantize(total + np.float32(0.001), "bf16", "stochastic", key=Key(0, step=step))
    # Each lane is unbiased; known: 2.001 with a standard deviation of 0.083 for one lane.
    sd = total.std(dtype=np.float64)
    assert abs(total.mean(dtype=np.float64) - 2.0) < 5 * sd / 4000**0.5
    assert 0.07 < sd < 0.1


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e4m3fnuz"])
def test_threads_and_places_do_not_matter(threads, monkeypatch, rounding, fmt):
    x = normal(3 * launch.PARALLEL + 1001)
    key = Key(11, 5, step=9) if rounding == "stochastic" else None
    threads(1)
    one = quantize(x, fmt, rounding, key=key)
    monkeypatch.setattr(launch, "threads", lambda: 2)
    assert same(quantize(x, fmt, rounding, key=key), one)
    monkeypatch.setattr(launch, "threads", lambda: 3)
    assert same(quantize(x, fmt, rounding, key=key, out=np.empty_like(x)), one)
    inplace = x.copy()
    assert quantize(inplace, fmt, rounding, key=key, out=inplace) is inplace
    assert same(inplace, one)
    assert same(quantize(torch.from_numpy(x), fmt, rounding, key=key).numpy(), one)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e2m1", "e4m3fnuz", "e8m0"])
@pytest.mark.parametrize("random_bits", [None, 5])
def test_shards_draw_their_slice_of_the_whole(fmt, random_bits):
    x, key = np.abs(normal(5000)), Key(3, offset=123)
    whole = quantize(x, fmt, "stochastic", key=key, random_bits=random_bits)
    edges = [0, 1, 2, 700, 1025, 1026, 3000, 5000]
    for start, stop in itertools.pairwise(edges):
        shard = Key(3, offset=123 + start)
        got = quantize(x[start:stop], fmt, "stochastic", key=shard, random_bits=random_bits)
        assert same(got, whole[start:stop])


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e5m2"])
def test_every_element_draws_the_word_of_its_key(fmt):
    x, key = normal(4096, seed=1) * np.float32(2.0**-10), Key(8, 1, step=2**40, offset=2**33 + 77)
    wanted = [reference.round_value(float(v), fmt, "stochastic", word=key.word(i)) for i, v in enumerate(x)]
    assert same(quantize(x, fmt, "stochastic", key=key), np.array(wanted, np.float32))


def test_a_lower_half_that_decides_is_drawn():
    # Where the upper half of the word lies exactly at the fraction's, the lower one decides: one in 65536.
    n, key = 2**20, Key(0)
    x = np.full(n, 1 + 2.0**-4 + 2.0**-19, np.float32)  # in e5m2: 0.25 and 2**-17 of an ulp above 1
    up = quantize(x, "e5m2", "stochastic", key=key) > 1
    words = np.array([key.word(int(i)) for i in range(3000)])
    assert (up[:3000] == (words >= 2**32 - int((2.0**-4 + 2.0**-19) * 4 * 2**32))).all()
    p = (2.0**-4 + 2.0**-19) * 4
    assert abs(up.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize(
    "fmt, below, above",
    [
        ("fp16", 1.0, 1 + 2.0**-10),
        ("fp16", 3 * 2.0**-24, 4 * 2.0**-24),  # subnormal
        ("fp16", 0.0, 2.0**-24),  # below the smallest value
        ("e4m3fn", 2.0**-9, 2.0**-8),
        ("e4m3fnuz", 0.0, 2.0**-10),
        ("bf16", 1.0, 1 + 2.0**-7),
        (Format("no subnormals", 4, 4, subnormal=False), 0.0, 2.0**-6),
    ],
)
@pytest.mark.parametrize("p", [0.3, 2.0**-9])
def test_stochastic_goes_up_as_often_as_it_should(fmt, below, above, p):
    n = 300_000
    x = np.full(n, below + p * (above - below), np.float32)
    p = (float(x[0]) - below) / (above - below)
    got = quantize(x, fmt, "stochastic", key=Key(4))
    assert set(np.unique(got)) == {np.float32(below), np.float32(above)}
    assert abs((got == above).mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_stochastic_acts_near_overflow_as_if_the_next_value_existed():
    n, p = 300_000, 0.25
    x = np.full(n, 65504 + p * 32, np.float32)
    got = quantize(x, "fp16", "stochastic", key=Key(0))
    assert set(np.unique(got)) == {65504, np.inf}
    assert abs(np.isinf(got).mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("fmt", ["fp16", "e4m3fn", "bf16", "e2m1"])
def test_stochastic_keeps_what_is_representable(fmt):
    values = as_format(fmt).values().astype(np.float32)
    values = np.concatenate([values, [np.float32(-0.0), np.inf if as_format(fmt).has_infinity else 0]])
    for seed in range(5):
        assert same(quantize(values, fmt, "stochastic", key=Key(seed)), values)


def test_stochastic_has_twice_the_squared_error_of_nearest():
    # Over all positions between two neighbours: 1/6 against 1/12 of an ulp squared, 3.01 dB.
    positions = np.arange(2**13) / 2**13
    x = (1 + positions * 2.0**-10).astype(np.float32)
    nearest = (quantize(x, "fp16").astype(np.float64) - x) * 2.0**10
    squares = [
        ((quantize(x, "fp16", "stochastic", key=Key(seed)).astype(np.float64) - x) * 2.0**10) ** 2
        for seed in range(200)
    ]
    expected = positions * (1 - positions)  # the variance at each position, in ulp squared
    mean = np.mean(squares)
    sigma = np.std(squares) / np.size(squares) ** 0.5
    assert abs(mean - expected.mean()) < 5 * sigma
    assert abs(10 * np.log10(expected.mean() / (nearest**2).mean()) - 3.01) < 0.01


@pytest.mark.parametrize("size", range(18))
def test_any_length_is_rounded(size):
    x = normal(2000, seed=size)[:size]
    for fmt in ("fp16", "bf16", "e4m3fnuz"):
        wanted = [reference.round_value(float(v), fmt) for v in x]
        assert same(quantize(x, fmt), np.array(wanted, np.float32))
        key = Key(1)
        wanted = [
            reference.round_value(float(v), fmt, "stochastic", word=key.word(i)) for i, v in enumerate(x)
        ]
        assert same(quantize(x, fmt, "stochastic", key=key), np.array(wanted, np.float32))


VIEWS = {
    "every other row": lambda x: x[::2],
    "backwards": lambda x: x[:, ::-1],
    "transposed": lambda x: x.T,
    "a corner": lambda x: x[3:, 1:5],
    "a column": lambda x: x[:, 2],
    "broadcast": lambda x: np.broadcast_to(x[0], (5, 8)),
    "empty": lambda x: x[:0],
    "0-d": lambda x: x[2, 3, ...],
    "Fortran": np.asfortranarray,
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("rounding", ["nearest_even", "to_odd", "stochastic"])
def test_strides_do_not_matter(name, rounding):
    key = Key(2) if rounding == "stochastic" else None
    x = VIEWS[name](normal(9, 8))
    before = x.copy()
    wanted = quantize(np.ascontiguousarray(x), "fp16", rounding, key=key).reshape(x.shape)
    assert same(quantize(x, "fp16", rounding, key=key), wanted)
    assert same(x, before)
    out = np.empty((20, 20), np.float32)[: x.shape[0], : x.shape[1]] if x.ndim == 2 else np.empty_like(x)
    assert quantize(x, "fp16", rounding, key=key, out=out) is out
    assert same(out, wanted)
    if x.flags.writeable:
        assert quantize(x, "fp16", rounding, key=key, out=x) is x
        assert same(np.asarray(x), wanted)


def test_overlapping_views_do_not_disturb_each_other():
    x = normal(1000)
    wanted = quantize(x[:-1].copy(), "fp16")
    quantize(x[:-1], "fp16", out=x[1:])
    assert same(x[1:], wanted)
    t = torch.from_numpy(normal(1000))
    quantize(t[:-1], "fp16", out=t[1:])
    assert same(t[1:].numpy(), wanted)


def test_layouts_are_kept():
    assert quantize(np.asfortranarray(normal(4, 5)), "fp16").flags.f_contiguous
    x = torch.from_numpy(normal(2, 3, 4, 5)).contiguous(memory_format=torch.channels_last)
    got = quantize(x, "fp16")
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, x.half().float())
    key = Key(0)
    random = quantize(x, "e4m3fn", "stochastic", key=key)
    assert torch.equal(random, quantize(x.contiguous(), "e4m3fn", "stochastic", key=key))
    expanded = torch.from_numpy(normal(1, 5)).expand(3, 5)
    assert torch.equal(quantize(expanded, "fp16"), expanded.half().float())


def test_a_number_is_rounded():
    got = quantize(np.float32(0.1), "fp16")
    assert isinstance(got, np.float32) and got == np.float32(np.float16(0.1))


def test_a_read_only_array_is_read_and_never_written():
    x = normal(10)
    x.setflags(write=False)
    assert agrees("fp16", x)
    with pytest.raises(ValueError, match="out is read-only"):
        quantize(normal(10), "fp16", out=x)


def test_parameters_and_tensors_with_gradient_are_rounded_without_one():
    p = torch.nn.Parameter(torch.from_numpy(normal(8)))
    got = quantize(p, "e2m1")
    assert not got.requires_grad and same(got.numpy(), quantize(p.detach().numpy(), "e2m1"))


def test_autograd_sees_that_a_tensor_was_written():
    w = torch.from_numpy(normal(4)).requires_grad_()
    y = w * 2
    loss = (y * y).sum()
    quantize(y.detach(), "e2m1", out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"fmt": "fp17"}, ValueError, "unknown format 'fp17'; choose from binary16"),
        (
            {"fmt": 16},
            TypeError,
            "a format is given by name, as a Format or by a floating-point dtype, got 16",
        ),
        ({"rounding": "up"}, ValueError, "unknown rounding 'up'; choose from nearest_even, "),
        ({"overflow": "wrap"}, ValueError, "unknown overflow 'wrap'; choose from ieee, saturate, propagate"),
        ({"rounding": ["up"]}, TypeError, "rounding, overflow and variant are names"),
        ({"rounding": "stochastic"}, ValueError, r"needs key=, for example key=fpemu.Key\(0\), got None"),
        ({"rounding": "stochastic", "key": 3}, ValueError, "needs key=, for example .*, got 3"),
        (
            {"key": Key(0)},
            ValueError,
            "key= is read by rounding='stochastic' only, got rounding='nearest_even'",
        ),
        ({"random_bits": 4}, ValueError, "random_bits= is read by rounding='stochastic' only"),
        (
            {"rounding": "stochastic", "key": Key(0), "random_bits": 31},
            ValueError,
            "an int from 1 to 30, or None",
        ),
        (
            {"rounding": "stochastic", "key": Key(0), "random_bits": 0},
            ValueError,
            "an int from 1 to 30, or None",
        ),
        ({"variant": "D"}, ValueError, "unknown variant 'D'; choose from A, B, C"),
        ({"flush_subnormals": 1}, ValueError, "flush_subnormals must be True or False, got 1"),
        ({"out": np.zeros(4, "f4")}, ValueError, r"out must have x's shape \(3,\), got \(4,\)"),
        ({"out": np.zeros(3, "f8")}, TypeError, "out must have x's dtype float32, got float64"),
        ({"out": torch.zeros(3)}, TypeError, "out must be a ndarray like x, got Tensor"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    x = np.zeros(3, np.float32)
    with pytest.raises(error, match=message):
        quantize(x, **{"fmt": "fp16", **arguments})
    assert not x.any()


def run(code, cwd=None, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_forked_child_rounds_large_arrays():
    code = """
import multiprocessing, numpy as np, fpemu
from fpemu.kernels import launch
launch.threads = lambda: 2
x = np.ones(2**20, np.float32)
fpemu.quantize(x, "fp16")
def child(queue):
    queue.put(float(fpemu.quantize(x * np.float32(0.1), "fp16").sum(dtype=np.float64)))
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=child, args=(queue,))
process.start()
print(queue.get() == 2**20 * 0.0999755859375)
process.join()
print(process.exitcode)
"""
    assert run(code, PYTHONWARNINGS="ignore") == "True\n0"


def test_a_changed_kernel_file_is_compiled_again(tmp_path):
    # numba's cache on disk looks at the file of the loop alone; the arithmetic is in another one.
    import shutil

    import fpemu

    package = tmp_path / "fpemu"
    shutil.copytree(os.path.dirname(fpemu.__file__), package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import numpy as np, fpemu; print(fpemu.quantize(np.float32([1.3]), 'e2m1', 'toward_zero')[0])"
    cache = str(tmp_path / "cache")
    assert run(code, tmp_path, NUMBA_CACHE_DIR=cache) == "1.0"
    scalar = package / "kernels" / "scalar.py"
    text = scalar.read_text()
    assert "r = U(a | QUIET) if a > INF else r" in text
    scalar.write_text(text.replace("r = U(a | QUIET) if a > INF else r", "r = U(0x40000000)"))
    assert run(code, tmp_path, NUMBA_CACHE_DIR=cache) == "2.0"
