from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from same import same

from fpemu import BlockFormat, Key, decode_blocks, encode_blocks, pack, quantize, unpack
from fpemu.blocks import MXFP8_E4M3, NAMED

ODD = [
    BlockFormat("integers by channel", "e2m3", "fp32", None, (1, 2), "round"),
    BlockFormat("planes", "e5m2", "e5m3", (2, 3), (2, 0), "ceil"),
]


def numbers():
    x = np.random.default_rng(0).standard_normal((5, 7, 36)).astype(np.float32)
    x[0, 0] = 0
    x[1, 1, 3:6] = [math.inf, math.nan, -0.0]
    x[2, 2, 0] = -0.0
    return x


@pytest.mark.parametrize("fmt", [*NAMED, *ODD], ids=str)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_codes_mean_what_quantize_gives(fmt, rounding):
    x = numbers()
    key = Key(1, offset=3) if rounding == "stochastic" else None
    blocks = encode_blocks(x, fmt, rounding, key=key)
    assert blocks.codes.shape == x.shape and blocks.codes.dtype == np.uint8
    wanted = quantize(x, fmt, rounding, key=key)
    assert same(decode_blocks(blocks, fmt), wanted)
    tensors = encode_blocks(torch.tensor(x), fmt, rounding, key=key)
    assert same(tensors.codes.numpy(), blocks.codes) and same(tensors.scales.numpy(), blocks.scales)
    assert same(decode_blocks(tensors, fmt).numpy(), wanted)
    assert same(decode_blocks(blocks, fmt, "float64").astype(np.float32), wanted)


def test_codes_along_another_axis():
    x = numbers()
    blocks = encode_blocks(x, "mxfp4", axis=0)
    assert blocks.scales.shape == (1, 7, 36)
    assert same(decode_blocks(blocks, "mxfp4", axis=0), quantize(x, "mxfp4", axis=0))
    with pytest.raises(ValueError, match="have blocks of mxfp4 of shape \\(5, 7, 2\\), got scales of shape"):
        decode_blocks(blocks, "mxfp4")


def test_special_blocks_have_special_scales():
    x = np.zeros((4, 32), np.float32)
    x[1, 0], x[2, 0], x[3, 0] = math.nan, math.inf, 2.0**127
    assert encode_blocks(x, "mxfp4").scales[:, 0].tolist() == [0, 255, 255, 252]
    assert encode_blocks(x, "mxfp4").codes[1:3].tolist() == [[0] * 32] * 2
    assert encode_blocks(x, "mxfp8").scales[:, 0].tolist() == [0, 0, 0, 246]
    assert encode_blocks(x, "mxfp8").codes[1:3, 0].tolist() == [0x7F, 0x7F]
    assert encode_blocks(x, "mxfp8", overflow="saturate").codes[2, 0] == 0x7E
    # Model-Optimizer#1397: a block scale saturates, and is no NaN.
    assert encode_blocks(x[3:], "nvfp4").scales.tolist() == [[0x7E, 0]]


def test_mxint8_is_in_twos_complement():
    x = np.zeros(32, np.float32)
    x[:4] = [1.0, -1 / 64, -127 / 64, -0.0]
    blocks = encode_blocks(x, "mxint8")
    assert blocks.codes[:4].tolist() == [0x40, 0xFF, 0x81, 0]
    blocks.codes[0] = 0x80  # which nothing rounds to
    assert decode_blocks(blocks, "mxint8")[:2].tolist() == [-2.0, -1 / 64]
    assert encode_blocks(x, "msfp16").codes[:4].tolist() == [0x40, 0x81, 0xFF, 0x80]


def test_packed_codes_come_back():
    x = numbers()
    for fmt, bits in (("mxfp4", 4), ("mxfp6_e3m2", 6)):
        codes = encode_blocks(x, fmt).codes
        packed = pack(codes, bits)
        assert packed.shape == (5, 7, 36 * bits // 8)
        assert (unpack(packed, bits, 36) == codes).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_encoded_exactly(dtype):
    x = torch.tensor(numbers()).nan_to_num(1, 1, 1).to(dtype)
    fmt = replace(MXFP8_E4M3, element="e6m9")
    wide = encode_blocks(x.double(), fmt)
    blocks = encode_blocks(x, fmt)
    assert torch.equal(blocks.codes, wide.codes) and torch.equal(blocks.scales, wide.scales)
    assert blocks.codes.dtype == torch.uint16


def test_empty_and_single():
    assert encode_blocks(np.zeros((0, 4), np.float32), "mxfp8").codes.shape == (0, 4)
    assert decode_blocks(encode_blocks(np.zeros((0, 4), np.float32), "mxfp8"), "mxfp8").shape == (0, 4)
    one = encode_blocks(np.array(3.0, np.float32), "mxfp8")
    assert decode_blocks(one, "mxfp8").tolist() == 3.0
    with pytest.raises(ValueError, match="dtype must be"):
        decode_blocks(one, "mxfp8", "float16")
