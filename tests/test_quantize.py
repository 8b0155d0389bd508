"""quantize on float32: the oracles of numpy and ml_dtypes, random words, layouts, bad input."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from same import differ, same

from fpemu import Format, Key, as_format, quantize, reference
from fpemu.formats import BINARY64, NAMED, OVERFLOWS, ROUNDINGS
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
    # Half a quantum above the largest value: where overflow starts.
    top = np.float32(as_format(name).max + math.ldexp(1.0, as_format(name).emax - as_format(name).precision))
    bits = np.concatenate([positive.astype(np.float32), middles, [top]]).view(np.uint32).astype(np.int64)
    near = (bits[:, None] + np.arange(-2, 3)).clip(0).ravel()
    x = float32s(np.concatenate([near, near | 2**31]))
    assert agrees(name, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_nearest_even_is_right_on_every_float32(name):
    for start in range(0, 2**32, 2**24):
        assert agrees(name, float32s(np.arange(start, start + 2**24)))


CUSTOM = [
    Format("binary16 without subnormals", 5, 11, subnormal=False),
    Format("all finite", 4, 4, specials="finite"),
    Format("unsigned", 5, 4, signed=False),
    Format("unsigned, all finite", 4, 4, specials="finite", signed=False),
    Format("powers of two", 5, 1, specials="fn"),
    Format("biased down", 4, 3, bias=100),
    Format("near binary32", 8, 23),
    as_format("binary8p4se"),
    as_format("binary8p1uf"),
]
CARRIED = [*(f for f in NAMED if f != BINARY64), *CUSTOM]
KEY = Key(7, 3, step=2**35, offset=2**40 + 5)


@cache
def words(count):
    return [KEY.word(i) for i in range(count)]


def near(x):
    """Each float32 and the two on either side of it, both signs."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    bits = (bits[:, None] + np.arange(-2, 3)).clip(0, 0x7F80_0000).ravel()
    return float32s(np.concatenate([bits, bits | 2**31]))


def hard_inputs(fmt, count):
    """Ends of the range and specials always; values, ties, powers of two, subnormals, any bits: a sample."""
    rng = np.random.default_rng([fmt.bits, fmt.precision, count])
    codes = np.unique([*rng.integers(0, fmt.max_code, count // 8), *range(min(8, fmt.max_code))])
    below, above = (np.array([fmt.magnitude(int(c)) for c in codes + k]) for k in (0, 1))
    quantum = math.ldexp(1.0, fmt.emax - fmt.precision + 1)
    ends = [fmt.smallest_subnormal / 2, fmt.smallest_subnormal, fmt.smallest_normal, fmt.max]
    with np.errstate(over="ignore"):
        ends = near(np.float32([*ends, fmt.max + quantum / 2, fmt.max + quantum]))
        often = near(np.concatenate([below, (below + above) / 2]).astype(np.float32))
    specials = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo("f4").max, -np.finfo("f4").max])
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    subnormals = float32s(rng.integers(0, 2**23, count // 8) | rng.integers(0, 2, count // 8) << 31)
    anything = float32s(rng.integers(0, 2**32, count // 4))
    rest = rng.permutation(np.concatenate([often, powers, -powers, subnormals, anything]))
    rest = np.append(rest, float32s(rng.integers(0, 2**32, count)))  # where a short format has few
    return rng.permutation(np.concatenate([ends, specials, rest[: count - ends.size - specials.size]]))


def check_against_reference(fmt, count):
    x = hard_inputs(fmt, count)
    assert x.size == count
    for rounding, overflow in itertools.product(ROUNDINGS, OVERFLOWS):
        key, drawn = (KEY, words(count)) if rounding == "stochastic" else (None, [None] * count)
        got = quantize(x, fmt, rounding, overflow=overflow, key=key)
        wanted = [
            reference.round_value(v, fmt, rounding, overflow=overflow, word=word)
            for v, word in zip(x.tolist(), drawn, strict=True)
        ]
        wrong = np.flatnonzero(differ(got, np.array(wanted, np.float32)))
        assert not wrong.size, [
            (rounding, overflow, float(x[i]).hex(), got[i], wanted[i], drawn[i]) for i in wrong[:5]
        ]


@pytest.mark.parametrize("fmt", CARRIED, ids=str)
def test_every_rounding_and_overflow_is_that_of_the_reference(fmt):
    check_against_reference(fmt, 400)  # 2 * 10**5 comparisons in all


@pytest.mark.slow
@pytest.mark.parametrize("fmt", CARRIED, ids=str)
def test_every_rounding_and_overflow_is_that_of_the_reference_on_many(fmt):
    check_against_reference(fmt, 2000)  # 10**6 comparisons in all


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("fmt", CARRIED, ids=str)
def test_stochastic_returns_a_neighbour(fmt, overflow):
    x = hard_inputs(fmt, 4000)
    down, up = (quantize(x, fmt, f"toward_{way}", overflow=overflow) for way in ("negative", "positive"))
    for seed in range(3):
        got = quantize(x, fmt, "stochastic", overflow=overflow, key=Key(seed))
        assert not (differ(got, down) & differ(got, up)).any()


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
    # The exact distribution of one run: in each step the mass at a value moves up with p = 0.001 / gap.
    values = as_format("bf16").values()
    values = values[(values >= 1) & (values <= 4)]
    p = np.append(0.001 / np.diff(values), 0.0)
    mass = np.zeros(values.size)
    mass[0] = 1
    for _ in range(1000):
        moved = mass * p
        mass = mass - moved + np.append(0.0, moved[:-1])
    mean, deviation = mass @ values, values - mass @ values
    variance, fourth = mass @ deviation**2, mass @ deviation**4
    # The design's 2.001 +- 0.083 was measured; this is exact.
    assert round(mean, 9) == 2.0 and round(variance**0.5, 4) == 0.0841

    n = 10_000
    total = np.ones(n)  # float64, so that the sum before rounding is exact
    for step in range(1000):
        total = quantize(total + 0.001, "bf16", "stochastic", key=Key(0, step=step))
    assert abs(total.mean() - mean) < 5 * (variance / n) ** 0.5
    assert abs(((total - mean) ** 2).mean() - variance) < 5 * ((fourth - variance**2) / n) ** 0.5


@pytest.mark.parametrize(
    "fmt, total, stop", [("fp16", 7.0859375, 513), ("bf16", 5.0625, 65), ("e4m3", 3.0, 9), ("e5m2", 2.0, 5)]
)
def test_the_harmonic_sum_to_nearest_stops(fmt, total, stop):
    sums = [np.zeros(1, np.float32)]
    for n in range(1, 4 * stop):
        sums.append(quantize(sums[-1] + quantize(np.float32([1 / n]), fmt), fmt))
    assert sums[stop] == sums[stop - 1] == sums[-1] == total
    assert all(a < b for a, b in itertools.pairwise(sums[:stop]))


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


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e4m3fnuz"])
def test_large_arrays_draw_the_same_words_however_they_are_cut(threads, fmt):
    n, key = 2 * launch.PARALLEL + 1001, Key(11, 5, step=9, offset=2**33 + 77)
    x = normal(n)
    results = []
    for count in (1, 2):
        threads(count)
        assert launch.threads() <= count
        results.append(quantize(x, fmt, "stochastic", key=key))
        for size in (100_003, launch.PARALLEL + 1):
            cut = np.empty_like(x)
            for start in range(0, n, size):
                piece = slice(start, start + size)
                shard = Key(11, 5, step=9, offset=key.offset + start)
                quantize(x[piece], fmt, "stochastic", key=shard, out=cut[piece])
            results.append(cut)
        wide = np.repeat(x, 2)
        results.append(quantize(wide[::2], fmt, "stochastic", key=key))
        quantize(wide[::2], fmt, "stochastic", key=key, out=wide[1::2])
        results.append(wide[1::2])
        tensor = torch.from_numpy(x.copy())
        quantize(tensor, fmt, "stochastic", key=key, out=tensor)
        results.append(tensor.numpy())
    assert all(same(result, results[0]) for result in results)


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
    "fmt, below, ulp, dtype",
    [
        ("fp16", 0.0, 2.0**-24, np.float32),
        ("e4m3fn", 0.0, 2.0**-9, np.float32),
        ("e4m3fnuz", 0.0, 2.0**-10, np.float32),
        ("e5m1", 1.0, 0.5, np.float32),
        ("bf16", 1.0, 2.0**-7, np.float64),
        ("fp16", 3 * 2.0**-24, 2.0**-24, np.float64),
    ],
)
def test_the_last_bit_of_a_word_decides(fmt, below, ulp, dtype):
    # Up if fraction + word reaches 2**32: so the fraction 2**32 - word goes up, and one less does not.
    n, key = 20_000, Key(21, offset=3)
    missing = 2**32 - np.array([key.word(i) for i in range(n)], np.int64)
    for less, expected in ((0, below + ulp), (1, below)):
        exact = below + ulp * (missing - less) * 2.0**-32
        x = exact.astype(dtype)
        told = x == exact  # float32 holds some of these only
        assert told.sum() > 10
        got = quantize(x, fmt, "stochastic", key=key)
        assert same(got[told], np.full(told.sum(), expected, dtype))


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


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "fmt, largest, step, beyond",
    [
        ("fp16", 65504.0, 32.0, np.inf),
        ("bf16", (2 - 2.0**-7) * 2.0**127, 2.0**120, np.inf),
        ("e5m2", 57344.0, 8192.0, np.inf),
        ("e4m3fn", 448.0, 32.0, np.nan),
        ("e4m3fnuz", 240.0, 16.0, np.nan),
        ("e2m1", 6.0, 2.0, 6.0),
    ],
)
def test_stochastic_acts_near_overflow_as_if_the_next_value_existed(fmt, largest, step, beyond, sign):
    n, p = 300_000, 0.25
    x = np.full(n, sign * (largest + p * step), np.float32)
    got = quantize(x, fmt, "stochastic", key=Key(0))
    stayed = got == np.float32(sign * largest)
    assert same(got[~stayed], np.full((~stayed).sum(), sign * beyond, np.float32))
    assert same(
        quantize(x, fmt, "stochastic", overflow="saturate", key=Key(0)), np.full_like(x, sign * largest)
    )
    if beyond == largest:
        assert stayed.all()
    else:
        assert abs((~stayed).mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("fmt", [f for f in CARRIED if f.bits <= 16], ids=str)
def test_stochastic_keeps_what_is_representable(fmt, overflow):
    values = fmt.values()
    values = np.append(values, -0.0) if fmt.has_negative_zero else values
    values = np.append(values, np.inf) if fmt.has_infinity and overflow != "saturate" else values
    values = values.astype(np.float32)
    for seed in range(5):
        assert same(quantize(values, fmt, "stochastic", overflow=overflow, key=Key(seed)), values)


def test_nearest_has_half_the_squared_error_of_stochastic():
    # Over N positions between two neighbours, in units of 1 / N of an ulp: the sum of squares of nearest is
    # N (N**2 + 2) / 12, that of stochastic is expected to be N (N**2 - 1) / 6: 3.01 dB more.
    n, draws = 2**13, 200
    places = np.arange(n)
    x = (1 + places * 2.0**-10 / n).astype(np.float32)

    def squares(rounded):
        return ((rounded.astype(np.float64) - x) * 2.0**10 * n) ** 2

    assert squares(quantize(x, "fp16")).sum() == n * (n**2 + 2) // 12
    variance = places * (n - places)  # p (1 - p) ulp**2
    assert variance.sum() == n * (n**2 - 1) // 6
    assert round(10 * math.log10(2 * (n**2 - 1) / (n**2 + 2)), 2) == 3.01
    got = sum(squares(quantize(x, "fp16", "stochastic", key=Key(seed))).sum() for seed in range(draws))
    # One squared error is (N - i)**2 with probability i / N, else i**2: variance i (N - i) (N - 2 i)**2.
    sigma = (draws * (places * (n - places) * (n - 2.0 * places) ** 2).sum()) ** 0.5
    assert abs(got - draws * variance.sum()) < 5 * sigma


@pytest.mark.parametrize("sixteenths", range(1, 16))
def test_the_variance_of_stochastic_is_p_times_1_minus_p(sixteenths):
    n, p = 2**17, sixteenths / 16
    x = np.full(n, 1 + p * 2.0**-10, np.float32)
    errors = (quantize(x, "fp16", "stochastic", key=Key(sixteenths)).astype(np.float64) - x) * 2.0**10
    sigma = (p * (1 - p) * (1 - 2 * p) ** 2 / n) ** 0.5  # of the mean of squared errors; 0 for p = 1/2
    assert abs((errors**2).mean() - p * (1 - p)) <= 5 * sigma


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


TORCH_VIEWS = {
    "every other row": lambda x: x[::2],
    "transposed": lambda x: x.T,
    "a corner": lambda x: x[3:, 1:5],
    "a column": lambda x: x[:, 2],
    "expanded": lambda x: x[:1].expand(5, 8),
    "empty": lambda x: x[:0],
    "0-d": lambda x: x[2, 3],
    "permuted": lambda x: x.view(3, 3, 8).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", TORCH_VIEWS)
@pytest.mark.parametrize("rounding", ["nearest_even", "to_odd", "stochastic"])
def test_strides_of_tensors_do_not_matter(name, rounding):
    key = Key(2) if rounding == "stochastic" else None
    x = TORCH_VIEWS[name](torch.from_numpy(normal(9, 8)))
    wanted = quantize(x.numpy().copy(), "fp16", rounding, key=key)
    got = quantize(x, "fp16", rounding, key=key)
    assert got.shape == x.shape and got.stride() == torch.empty_like(x).stride()
    assert same(got.numpy(), wanted)
    outs = [torch.full_like(x, 7), torch.full((2 * x.numel(),), 7.0)[::2].view(x.shape)]
    for out in outs:
        assert quantize(x, "fp16", rounding, key=key, out=out) is out
        assert same(out.numpy(), wanted)
    if name != "expanded":
        assert quantize(x, "fp16", rounding, key=key, out=x) is x
        assert same(x.numpy(), wanted)


def test_an_unaligned_array_is_rounded():
    x = normal(50)
    unaligned = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    assert same(quantize(unaligned, "fp16"), quantize(x, "fp16"))


SHIFTS = [
    (slice(None, -1), slice(1, None)),
    (slice(5, None), slice(None, -5)),
    (slice(0, 500), slice(499, None, -1)),
]


@pytest.mark.parametrize("source, target", SHIFTS, ids=["up", "down", "backwards"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fnuz"])
def test_overlapping_views_do_not_disturb_each_other(fmt, rounding, source, target):
    key = Key(1) if rounding == "stochastic" else None
    x = normal(1000)
    wanted = quantize(x[source].copy(), fmt, rounding, key=key)
    quantize(x[source], fmt, rounding, key=key, out=x[target])
    assert same(x[target], wanted)


@pytest.mark.parametrize("rounding", ["nearest_even", "to_odd", "stochastic"])
def test_overlapping_views_of_a_tensor_do_not_disturb_each_other(rounding):
    key = Key(1) if rounding == "stochastic" else None
    for source, target in SHIFTS[:2]:
        t = torch.from_numpy(normal(1000))
        wanted = quantize(t[source].clone(), "fp16", rounding, key=key)
        quantize(t[source], "fp16", rounding, key=key, out=t[target])
        assert same(t[target].numpy(), wanted.numpy())


@pytest.mark.parametrize("rounding", ["nearest_even", "to_odd", "stochastic"])
def test_tensors_made_of_overlapping_arrays_do_not_disturb_each_other(rounding):
    # Each from_numpy makes a storage of its own, so that comparing storages does not see the overlap.
    key = Key(1) if rounding == "stochastic" else None
    for source, target in SHIFTS[:2]:
        x = normal(1000)
        wanted = quantize(x[source].copy(), "fp16", rounding, key=key)
        quantize(torch.from_numpy(x[source]), "fp16", rounding, key=key, out=torch.from_numpy(x[target]))
        assert same(x[target], wanted)


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


def test_writing_a_tensor_bumps_its_version_and_reading_does_not():
    x, out = torch.from_numpy(normal(4, 6)), torch.zeros(6, 4)
    quantize(x, "fp16")
    assert x._version == 0
    quantize(x, "fp16", out=out.T)
    assert (x._version, out._version > 0) == (0, True)
    quantize(x, "fp16", out=x)
    assert x._version > 0


def test_an_inference_tensor_is_rounded_in_place():
    with torch.inference_mode():
        x = torch.full((3,), 0.1)
        assert quantize(x, "fp16", out=x) is x
    assert same(x.numpy(), np.full(3, np.float16(0.1), np.float32))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.zeros(2).as_subclass(Wrapped), "x must be a plain torch tensor, got Wrapped; unwrap it first"),
        (torch.eye(2).to_sparse(), r"got layout torch.sparse_coo; round x.values\(\) instead"),
        (torch.zeros(2, dtype=torch.complex64), r"got torch.complex64; cast first \(x.float\(\)\)"),
        (torch.zeros(2, dtype=torch.int32), r"got torch.int32; cast first \(x.float\(\)\)"),
        (np.ma.zeros(2, "f4"), r"got MaskedArray of float32; cast first \(x.astype\('float32'\)\)"),
        (np.zeros(2, "c8"), r"got ndarray of complex64; cast first \(x.astype\('float32'\)\)"),
        (np.zeros(2, "i4"), r"got ndarray of int32; cast first \(x.astype\('float32'\)\)"),
    ],
    ids=["subclass", "sparse", "complex tensor", "int tensor", "masked", "complex", "int"],
)
def test_arrays_of_another_kind_are_refused_with_what_to_do(x, message):
    with pytest.raises(TypeError, match=message):
        quantize(x, "fp16")


@pytest.mark.parametrize(
    "out, error, message",
    [
        (torch.zeros(4), ValueError, r"out must have x's shape \(3,\), got \(4,\)"),
        (
            torch.zeros(3, dtype=torch.float64),
            TypeError,
            "out must have x's dtype torch.float32, got torch.float64",
        ),
        (np.zeros(3, "f4"), TypeError, "out must be a Tensor like x, got ndarray"),
        (torch.zeros(3, dtype=torch.int32), TypeError, "out must be of float32, .*, got torch.int32"),
        (torch.zeros(3).as_subclass(Wrapped), TypeError, "out must be a plain torch tensor, got Wrapped"),
    ],
    ids=["shape", "dtype", "kind", "int", "subclass"],
)
def test_a_wrong_out_for_a_tensor_is_refused(out, error, message):
    with pytest.raises(error, match=message):
        quantize(torch.ones(3), "fp16", out=out)


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


def test_a_fresh_process_takes_its_kernels_from_the_disk(tmp_path):
    code = """
import numpy as np, fpemu
from fpemu.kernels import cpu
x = np.float32([0.1, 65520, 1e-8])
print(fpemu.quantize(x, "fp16").tolist(), fpemu.quantize(x, "fp16", "stochastic", key=fpemu.Key(0)).tolist())
loops = [cpu.LOOPS[name] for name in ("nearest_even_magic", "stochastic_usual")]
print(sum(sum(loop.stats.cache_hits.values()) for loop in loops))
"""
    package = os.path.dirname(os.path.dirname(os.path.abspath(launch.__file__)))
    where = os.path.dirname(package)
    first = run(code, where, NUMBA_CACHE_DIR=str(tmp_path)).splitlines()
    second = run(code, where, NUMBA_CACHE_DIR=str(tmp_path)).splitlines()
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("0", "2")
