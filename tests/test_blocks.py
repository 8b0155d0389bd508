"""Block formats against a slow exact model: fractions, one element at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from same import same

from fpemu import BlockFormat, Key, as_block_format, quantize, reference
from fpemu.blocks import MXFP4, MXFP8_E4M3, MXINT8, NAMED, NVFP4
from fpemu.formats import ROUNDINGS
from fpemu.reference import floor_log2

CUSTOM = [
    replace(MXFP8_E4M3, name="mxfp8 ceil", scale_rule="ceil"),
    replace(MXFP4, name="mxfp4 ceil", scale_rule="ceil"),
    replace(MXFP4, name="mxfp4 round", scale_rule="round"),
    replace(NVFP4, name="nvfp4 floor", scale_rule="floor"),
    replace(NVFP4, name="nvfp4 ceil, alone", scale_rule="ceil", tensor_scale=False),
    BlockFormat("e5m2 in float32 scales", "e5m2", "fp32", 5, scale_rule="round"),
    BlockFormat("few scales", "e3m4", "e4m0", 7),
    BlockFormat("no subnormals", "dlfloat16", "e5m3", 16, scale_rule="round"),
]
ALL = [*NAMED, *CUSTOM]


# --- the model ---


def power(exponent):
    return Fraction(2) ** exponent


def scale_of(block, fmt, overflow, tensor_scale):
    """The scale of a block, a Fraction without the array's; None for NaN."""
    element, scale = fmt.element, fmt.scale
    if any(math.isnan(v) for v in block) and not element.has_nan:
        return None
    infinite = any(math.isinf(v) for v in block)
    if infinite and overflow != "saturate" and not (element.has_nan or element.has_infinity):
        return None
    amax = max((abs(Fraction(v)) for v in block if math.isfinite(v)), default=Fraction(0))
    if scale.precision > 1:
        mode = {"floor": "toward_zero", "round": "nearest_even", "ceil": "toward_positive"}[fmt.scale_rule]
        exact = amax / (Fraction(element.max) * tensor_scale)
        return Fraction(reference.round_value(exact, scale, mode, overflow="saturate"))
    low, high = floor_log2(Fraction(scale.smallest_subnormal)), scale.emax
    if amax == 0:
        return power(low)
    if fmt.scale_rule == "round":
        quantum = power(floor_log2(amax) - element.precision + 1)
        amax = math.floor(amax / quantum + Fraction(1, 2)) * quantum
    exponent = floor_log2(amax) - element.emax
    if fmt.scale_rule == "ceil":
        exponent -= 2
        while power(exponent) * Fraction(element.max) < amax:
            exponent += 1
    return power(min(max(exponent, low), high))


def element_of(v, scale, fmt, rounding, overflow, word):
    """What one number becomes in units of its block's scale."""
    if scale is None or math.isnan(v):
        return math.nan
    policy = "saturate" if overflow == "saturate" else "propagate"
    if math.isinf(v):
        q = reference.round_value(v, fmt.element, rounding, overflow=policy, word=word)
    elif scale == 0 or v == 0:
        q = math.copysign(0.0, v)
    else:
        q = reference.round_value(Fraction(v) / scale, fmt.element, rounding, overflow=policy, word=word)
        q = math.copysign(q, v) if q == 0 else q
    return 0.0 if q == 0 and fmt.twos_complement else q


def to_dtype(q, scale, dtype):
    """The product, rounded once to a dtype that numpy has."""
    if not math.isfinite(q) or scale is None:
        return q if scale != 0 or not math.isinf(q) else math.nan
    exact = Fraction(q) * scale
    if exact == 0:
        return math.copysign(0.0, q)
    return reference.round_value(exact, np.dtype(dtype))


def tensor_scale_of(x, fmt):
    if not fmt.tensor_scale:
        return Fraction(1)
    finite = [abs(Fraction(v)) for v in x.ravel().astype(float).tolist() if math.isfinite(v)]
    amax = max(finite, default=Fraction(0))
    if amax == 0:
        return Fraction(1)
    limit = Fraction(fmt.element.max) * Fraction(fmt.scale.max)
    return max(Fraction(reference.round_value(amax / limit, "fp32", overflow="saturate")), power(-149))


def model(x, fmt, rounding="nearest_even", overflow="ieee", key=None):
    """`quantize` of an array, block by block of its index tuples."""
    wanted, of_tensor = np.empty_like(x), tensor_scale_of(x, fmt)
    axes, lengths = fmt.axes(x.ndim), fmt.lengths(x.shape)
    blocks = {}
    for index in np.ndindex(x.shape):
        where = list(index)
        for axis, length in zip(axes, lengths, strict=True):
            where[axis] //= length
        blocks.setdefault(tuple(where), []).append(index)
    for indices in blocks.values():
        block = [float(x[index]) for index in indices]
        scale = scale_of(block, fmt, overflow, of_tensor)
        scale = None if scale is None else scale * of_tensor
        for index, v in zip(indices, block, strict=True):
            word = None if key is None else key.word(int(np.ravel_multi_index(index, x.shape)))
            q = element_of(v, scale, fmt, rounding, overflow, word)
            wanted[index] = to_dtype(q, scale, x.dtype)
    return wanted


def hard(shape, dtype=np.float32, seed=0):
    """Sizes over many binades, blocks of one size, ties, zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)
    x = np.where(rng.random(shape) < 0.5, x, np.round(x * 16) / 16)
    x = np.where(rng.random(shape) < 0.1, 0.0, x) * np.where(rng.random(shape) < 0.5, 1, -1)
    return x.astype(dtype)


# --- rounding ---


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_rounding_is_the_models(fmt, rounding, dtype):
    x = hard((5, 37), dtype)
    key = Key(3, step=2, offset=1001) if rounding == "stochastic" else None
    assert same(quantize(x, fmt, rounding, key=key), model(x, fmt, rounding, key=key))


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("overflow", ["ieee", "saturate", "propagate"])
def test_zeros_nans_infinities_and_extreme_sizes(fmt, overflow):
    x = np.zeros((16, 32), np.float32)
    x[1, :3] = [1, math.nan, -0.0]
    x[2, :3] = [1, math.inf, -1.3]
    x[3, :2] = [math.inf, math.nan]
    x[4] = -0.0
    x[5, :3] = [1e-45, -7e-45, 3e-44]
    x[6, :2] = [3.4028234663852886e38, 1e38]
    x[7, :3] = [3e38, 1e-45, -1e-38]
    x[8] = math.nan
    x[9] = -math.inf
    x[10, :2] = [2.0**-126, 1.5 * 2.0**-127]
    x[11, :4] = [2.0**-40, 2.0**40, -(2.0**41), 1.1]
    assert same(quantize(x, fmt, overflow=overflow), model(x, fmt, overflow=overflow))
    x[x > 1e30] = 5  # without what makes the scale of a whole array large
    assert same(quantize(x, fmt, overflow=overflow), model(x, fmt, overflow=overflow))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_float64_of_any_size(fmt):
    fmt = as_block_format(fmt)
    x = hard((4, 32), np.float64)
    for size in (2.0**-1060, 2.0**-400, 2.0**900):
        assert same(quantize(x * size, fmt), model(x * size, fmt))
    x[0, :2] = [1e300, 1e-300]
    assert same(quantize(x, fmt, "toward_positive"), model(x, fmt, "toward_positive"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["mxfp8_e5m2", "mxint8", "nvfp4"])
def test_narrow_dtypes_are_widened_and_their_results_rounded_once(fmt, dtype):
    narrow = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    x = hard((3, 40)).astype(narrow)
    fmt = as_block_format(fmt)
    exact = model(x.astype(np.float64), fmt)
    assert same(quantize(x, fmt).astype(np.float32), exact.astype(narrow).astype(np.float32))


@pytest.mark.parametrize(
    "block, axis", [(4, 0), (3, 1), (None, -1), (None, None), ((2, 3), (0, 2)), ((None, 2), (2, 1))]
)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_blocks_along_any_axes_with_a_shorter_last_one(block, axis, rounding):
    fmt = BlockFormat("mine", "e2m3", "e8m0", block, axis)
    x = hard((7, 5, 4))
    key = Key(1, offset=5) if rounding == "stochastic" else None
    wanted = model(x, fmt, rounding, key=key)
    assert same(quantize(x, fmt, rounding, key=key), wanted)
    assert same(quantize(np.asfortranarray(x), fmt, rounding, key=key), wanted)
    assert same(quantize(torch.tensor(x), fmt, rounding, key=key).numpy(), wanted)
    turned = torch.tensor(x.transpose(2, 0, 1).copy()).permute(1, 2, 0)
    assert same(quantize(turned, fmt, rounding, key=key).numpy(), wanted)


def test_axis_moves_the_blocks():
    x = hard((40, 6))
    assert same(quantize(x, "mxfp4", axis=0), quantize(x.T.copy(), "mxfp4").T)
    assert not same(quantize(x, "mxfp4", axis=0), quantize(x, "mxfp4"))


def test_an_axis_that_is_not_there_is_left_out_of_a_format():
    x = hard((40,))
    assert same(quantize(x, as_block_format("mxfp4", axis=3)), quantize(x, "mxfp4"))
    assert same(quantize(x, "nvfp4_16x16"), quantize(x, "nvfp4"))
    assert quantize(np.float32(1.3), "mxfp4") == 1.5


def test_a_large_array_is_rounded_as_its_parts_are():
    x = np.random.default_rng(0).standard_normal((1 << 9, 1 << 11)).astype(np.float32)
    x[3, 64:96], x[5, 5] = 0, math.nan
    for rounding in ("nearest_even", "stochastic"):
        key = Key(7) if rounding == "stochastic" else None
        whole = quantize(x, "mxfp8", rounding, key=key)
        for row in (0, 3, 5, 300):
            part = key and replace(key, offset=row * x.shape[1])
            assert same(whole[row], quantize(x[row], "mxfp8", rounding, key=part))
    assert same(quantize(x[:2], "mxfp8"), model(x[:2], MXFP8_E4M3))


@pytest.mark.parametrize("size", [1, 2, 5, 16, 48, 1000, 4096])
def test_the_short_way_of_float32_gives_the_bits_of_the_long_one(size):
    fmt = replace(MXINT8, block=size)
    x = hard((3, 4096))
    assert same(quantize(x, fmt), quantize(x.astype(np.float64), fmt).astype(np.float32))
    key = Key(1)
    long = quantize(x.astype(np.float64), fmt, "stochastic", key=key).astype(np.float32)
    assert same(quantize(x, fmt, "stochastic", key=key), long)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_out_is_written_in_place_too(kind, axis):
    x = hard((64, 96))
    wanted = quantize(x, "mxfp8", axis=axis)
    make = np.array if kind == "numpy" else torch.tensor
    a, out = make(x), make(np.zeros_like(x))
    assert quantize(a, "mxfp8", axis=axis, out=out) is out and same(np.asarray(out), wanted)
    assert same(np.asarray(a), x)
    assert quantize(a, "mxfp8", axis=axis, out=a) is a and same(np.asarray(a), wanted)
    room = make(np.concatenate([x.ravel(), [0]]).astype(np.float32))
    overlapping = room[:-1].reshape(x.shape), room[1:].reshape(x.shape)
    quantize(overlapping[0], "mxfp8", axis=axis, out=overlapping[1])
    assert same(np.asarray(overlapping[1]), wanted)
    columns = make(np.zeros((64, 192), np.float32))[:, ::2]
    quantize(make(x), "mxfp8", axis=axis, out=columns)
    assert same(np.asarray(columns), wanted)


def test_a_read_only_array_is_read_and_not_written():
    x = hard((2, 32))
    x.setflags(write=False)
    assert same(quantize(x, "mxfp8"), quantize(x.copy(), "mxfp8"))
    with pytest.raises(ValueError, match="read-only"):
        quantize(x, "mxfp8", out=x)


def test_a_parameter_keeps_its_storage_free():
    weight = torch.nn.Parameter(torch.ones(64))
    quantize(weight, "mxfp8")
    weight.untyped_storage().resize_(0)  # as FSDP2 does; fails for pinned storage


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 32)])
@pytest.mark.parametrize(
    "fmt", ["mxfp8", "nvfp4_16x16", BlockFormat("whole", "e4m3fn", "fp32", None)], ids=str
)
def test_empty_arrays(shape, fmt):
    assert quantize(np.zeros(shape, np.float32), fmt).shape == shape
    assert quantize(torch.zeros(shape), fmt).shape == shape


def test_rounding_twice_changes_nothing_more():
    for fmt in [f for f in ALL if f.power_of_two]:
        once = quantize(hard((8, 96)), fmt)
        assert same(quantize(once, fmt), once)


def test_stochastic_rounding_in_blocks_has_no_bias():
    x = np.full((1 << 13, 32), 1.1, np.float32)
    x[:, 0] = 4  # scale 1: neighbours 1 and 1.5
    got = quantize(x, "mxfp4", "stochastic", key=Key(0))[:, 1:]
    p, n = 0.2, got.size
    assert set(np.unique(got)) == {1.0, 1.5}
    assert abs((got > 1).mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


# --- what is published ---


@pytest.mark.parametrize(
    "amax, fmt, rounded",
    [
        (960, "mxfp8", 896.0),  # microxcaling#4: the floor rule saturates
        (960, replace(MXFP8_E4M3, scale_rule="ceil"), 960.0),
        (127.99999237060547, "mxfp8_e5m2", 112.0),  # ao#436
        (float(np.uint32(0x3FFFFFFF).view(np.float32)), "mxfp4", 1.5),  # SuperNPUBench#111: of binade 0
    ],
    ids=str,
)
def test_reported_scales(amax, fmt, rounded):
    x = np.zeros(32, np.float32)
    x[0] = amax
    assert quantize(x, fmt)[0] == rounded


def test_a_small_block_of_nvfp4_is_lost_where_its_scale_is():
    x = np.zeros((2, 16), np.float32)
    x[0], x[1, :] = 6 * 448, 6 * 2.0**-10  # the tie between scale 0 and 2**-9
    assert (quantize(x, "nvfp4")[1] == 0).all()
    x[1, 0] *= 1.01
    assert quantize(x, "nvfp4")[1, 0] == 3 * 2.0**-9


PUBLISHED = {  # dB on N(0, 1), Laplace, t with 3 degrees of freedom
    "mxfp8_e4m3": (30.6, 30.0, 29.4),
    "mxfp8_e5m2": (25.4, 25.2, 25.0),
    "mxfp6_e2m3": (30.9, 30.3, 29.2),
    "mxfp6_e3m2": (25.4, 25.2, 25.0),
    "mxfp4": (18.8, 17.9, 17.0),
    "nvfp4": (20.4, 20.7, 20.9),
    "mxint8": (41.7, 40.0, 37.8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_signal_to_noise_is_as_measured_elsewhere(name):
    rng, n = np.random.default_rng(0), 1 << 20
    draws = rng.standard_normal(n), rng.laplace(size=n), rng.standard_t(3, n)
    for x, wanted in zip(draws, PUBLISHED[name], strict=True):
        x = x.astype(np.float32)
        error = x.astype(np.float64) - quantize(x, name)
        assert 10 * math.log10((x.astype(np.float64) ** 2).sum() / (error**2).sum()) == pytest.approx(
            wanted, abs=0.2
        )


GFLOAT = {
    "mxfp8_e4m3": "mxfp8_e4m3",
    "mxfp8_e5m2": "mxfp8_e5m2",
    "mxfp6_e3m2": "mxfp6_e3m2",
    "mxfp6_e2m3": "mxfp6_e2m3",
    "mxfp4": "mxfp4_e2m1",
}


@pytest.mark.parametrize("name", GFLOAT)
def test_blocks_are_those_of_gfloat(name):
    theirs = getattr(gfloat.formats, f"format_info_{GFLOAT[name]}")
    x = np.concatenate([hard((20, 32)), np.zeros((1, 32), np.float32)])
    for block in x:
        wanted = gfloat.quantize_block(theirs, block.astype(np.float64), gfloat.compute_scale_amax)
        assert (quantize(block, name) == wanted).all()


# --- formats and arguments ---


def test_names():
    assert as_block_format("MXFP8") is MXFP8_E4M3 and as_block_format("mxfp4_e2m1") is MXFP4
    assert as_block_format(MXFP4, axis=0) == replace(MXFP4, axis=0)
    assert as_block_format("mxfp4").bits_per_element((64,)) == 4.25
    assert as_block_format("nvfp4_16x16").size((32, 32)) == 256
    assert [as_block_format(f).element.bits for f in ("msfp12", "msfp16", "mxint8")] == [4, 8, 8]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block": 0}, "block must be a positive int"),
        ({"block": True}, "block must be a positive int"),
        ({"axis": 1.0}, "axis must be an int"),
        ({"axis": ()}, "axis must be an int"),
        ({"axis": (0, 0), "block": 2}, "axis names a dimension twice: \\(0, 0\\)"),
        ({"axis": (0, 1), "block": (2,)}, "gives 1 lengths"),
        ({"axis": None}, "block must be None, got 32"),
        ({"scale_rule": "up"}, "scale_rule must be one of floor, ceil, round, got 'up'"),
        ({"element": "e8m0"}, "elements need a sign"),
        ({"scale": "e2m1"}, "scales need a NaN"),
        ({"tensor_scale": True}, "tensor_scale needs scales between powers of two"),
        ({"element": "e8m18", "scale": "fp32", "tensor_scale": True}, "takes more than 53 significand bits"),
        ({"element": "e11m3"}, "must be numbers of binary32"),
        ({"twos_complement": True}, "two's complement needs integers"),
        ({"element": "nothing"}, "unknown format"),
    ],
)
def test_formats_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MXFP8_E4M3, **change)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: quantize(x, "fp16", axis=0), ValueError, "axis= is read by block formats only"),
        (lambda x: quantize(x, "mxfp8", axis=1), ValueError, "axis must be of the 1 dimensions of x, got 1"),
        (lambda x: quantize(x, "mxfp8", "up"), ValueError, "unknown rounding 'up'"),
        (lambda x: quantize(x, "mxfp8", "stochastic"), ValueError, "needs key="),
        (lambda x: quantize(x, "mxfp8", key=Key(0)), ValueError, "key= is read"),
        (lambda x: quantize(x.astype(int), "mxfp8"), TypeError, "x must be an array of"),
        (lambda x: quantize(x, "mxfp8", out=x[:3]), ValueError, "out must have x's shape"),
        (lambda x: quantize(x, "mxfp9"), ValueError, "unknown format 'mxfp9'"),
        (
            lambda x: as_block_format("fp16"),
            ValueError,
            "unknown block format 'fp16'; choose from mxfp8_e4m3",
        ),
        (lambda x: as_block_format(3), TypeError, "a block format is given by name"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones(4, np.float32))
