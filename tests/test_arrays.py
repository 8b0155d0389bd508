"""Dtypes, strides and kinds of array: what is taken, what comes back, what is refused."""

from __future__ import annotations

import itertools
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch
from same import same

import fpemu
from fpemu import Key, decode, encode, quantize, tally
from fpemu.arrays import CARRIERS, carrier_of
from fpemu.kernels import launch

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("name", CARRIERS)
def test_the_carrier_of_an_array_is_its_dtype(name):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    assert carrier_of(np.zeros(2, dtype)).name == fpemu.as_format(name).name
    assert carrier_of(torch.zeros(2, dtype=getattr(torch, name))).name == fpemu.as_format(name).name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1", "e3m2"])
def test_all_half_precision_numbers_are_widened_exactly(dtype, fmt):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    got = quantize(x, fmt)
    assert got.dtype == x.dtype
    assert same(got.astype(np.float32), quantize(x.astype(np.float32), fmt))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_tensors_come_back_as_they_came(dtype):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    got = quantize(x, "e4m3fn")
    assert got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got.float(), quantize(x.float(), "e4m3fn"))
    assert quantize(x, "e4m3fn", out=x) is x
    assert torch.equal(x, got)


def test_a_format_that_holds_all_of_the_dtype_changes_nothing():
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert same(quantize(x, "fp32"), x)
    y = np.array([1 + 2.0**-52, 5e-324, -1.7e308])
    assert same(quantize(y, "fp64"), y)


@pytest.mark.parametrize(
    "dtype, fmt, message",
    [
        ("float16", "bf16", "bfloat16 reaches from .* float16 cannot hold all of that"),
        (ml_dtypes.bfloat16, "fp16", "binary16 reaches from .* bfloat16 cannot hold all of that"),
        ("float32", "e9m5", "float32 cannot hold all of that"),
        ("float32", "e5m30", "with 31 significand bits: float32 cannot hold all of that"),
    ],
)
def test_a_format_that_the_dtype_cannot_hold_is_refused(dtype, fmt, message):
    with pytest.raises(ValueError, match=message):
        quantize(np.zeros(3, dtype), fmt)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "longdouble", ">f4", "O", "U3"])
def test_other_numpy_dtypes_are_refused(dtype):
    with pytest.raises(
        TypeError, match="x must be an array of float32, float64, float16, bfloat16 in native"
    ):
        quantize(np.zeros(3, dtype), "fp16")


@pytest.mark.parametrize(
    "x, message",
    [
        (
            torch.zeros(2, dtype=torch.int64),
            "x must be of float32, float64, float16, bfloat16, got torch.int64",
        ),
        (torch.zeros(2, dtype=torch.complex64), "got torch.complex64; cast first"),
        (torch.zeros(2).to(torch.float8_e5m2), "got torch.float8_e5m2; cast first"),
        (torch.eye(2).to_sparse(), "must be a dense tensor, got layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "must be on the CPU or a CUDA device, got a tensor on meta"),
        (np.ma.zeros(2, "f4"), "got MaskedArray of float32"),
        ([1.0], "x must be a numpy array or a torch tensor, got list"),
        (1.0, "x must be a numpy array or a torch tensor, got float"),
    ],
    ids=["int", "complex", "float8", "sparse", "meta", "masked", "list", "number"],
)
def test_other_arrays_are_refused(x, message):
    with pytest.raises(TypeError, match=message):
        quantize(x, "fp16")


def test_out_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match="out must have x's dtype float32, got float64"):
        quantize(np.zeros(3, "f4"), "fp16", out=np.zeros(3))


@pytest.mark.parametrize("dtype", ["float64", "float16", ml_dtypes.bfloat16])
def test_strides_do_not_matter(dtype):
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(dtype)
    key = Key(1)
    for view in (x[::2], x[:, ::-1], x.T, x[:, 3:], np.broadcast_to(x[0], (4, 8)), x[1:1], x[2, 3, None]):
        dense = np.ascontiguousarray(view)
        assert same(quantize(view, "e4m3fn").astype("f4"), quantize(dense, "e4m3fn").astype("f4"))
        assert same(
            quantize(view, "e4m3fn", "stochastic", key=key).astype("f4"),
            quantize(dense, "e4m3fn", "stochastic", key=key).astype("f4"),
        )
    assert quantize(np.array(1.3, dtype), "e2m1").shape == ()


def test_all_carriers_draw_the_same_words():
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float16)
    key = Key(3, offset=77)
    results = [
        quantize(x.astype(t), "e4m3fn", "stochastic", key=key).astype("f4") for t in ("f2", "f4", "f8")
    ]
    assert same(results[0], results[1]) and same(results[1], results[2])


@pytest.mark.parametrize("carrier, payload", [("f4", 0x7FA5A5A5), ("f8", 0x7FF5A5A5A5A5A5A5)])
def test_a_nan_keeps_its_sign_and_payload_and_becomes_quiet(carrier, payload):
    width = np.dtype(carrier).itemsize
    bits = np.array([payload, payload | 1 << (8 * width - 1)], f"u{width}")
    quiet = np.array(1 << {4: 22, 8: 51}[width], f"u{width}")
    for rounding in fpemu.formats.ROUNDINGS:
        key = Key(0) if rounding == "stochastic" else None
        for fmt in ("fp16", "e4m3fnuz", "e3m2"):
            got = quantize(bits.view(carrier), fmt, rounding, key=key)
            assert (got.view(f"u{width}") == bits | quiet).all()


def test_pieces_of_more_than_2_to_31_elements_are_counted_right(monkeypatch):
    monkeypatch.setattr(launch, "threads", lambda: 2)
    done = []
    launch.over_chunks(2**33 + 5, lambda start, stop: done.append((start, stop)))
    done.sort()
    assert done[0][0] == 0 and done[-1][1] == 2**33 + 5
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(done))


@pytest.mark.parametrize("offset", [2**31 - 3, 2**32 + 1, 2**40 + 511])
def test_elements_past_2_to_31_draw_their_own_words(offset):
    key = Key(5, offset=offset)
    x = np.full(2000, 1 + 2.0**-11, np.float32)
    up = np.array([key.word(i) >= 2**31 for i in range(x.size)])
    got = quantize(x, "fp16", "stochastic", key=key)
    assert same(got, np.where(up, np.float32(1 + 2.0**-10), np.float32(1)))


def test_a_float64_tensor_is_rounded_once():
    x = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert quantize(x, "fp16").item() == 1.0009765625
    assert fpemu.cast(x, forward="fp16").item() == 1.0009765625


class Foreign:
    """Another library's array on a device, as far as fpemu sees it."""

    __cuda_array_interface__: ClassVar = {"version": 3}

    def __init__(self, tensor):
        self.tensor = tensor


def test_other_libraries_cuda_arrays_are_taken_as_tensors_on_their_memory(monkeypatch):
    seen = []

    def as_tensor(x, device):
        seen.append(device)
        return x.tensor

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    x = Foreign(torch.tensor([0.1, 1.0]))
    assert quantize(x, "e4m3fn").tolist() == [0.1015625, 1.0]
    assert encode(x, "e4m3fn").tolist() == [0x1D, 0x38]
    assert decode(Foreign(torch.tensor([0x38], dtype=torch.uint8)), "e4m3fn").tolist() == [1.0]
    assert tally(x, "e4m3fn").count == 2
    assert quantize(x, "e4m3fn", out=x) is x and x.tensor.tolist() == [0.1015625, 1.0]
    assert set(seen) == {"cuda"}


def test_numpy_scalars_are_taken_like_0_d_arrays():
    assert quantize(np.float32(0.1), "e4m3fn") == np.float32(0.1015625)
    assert tally(np.float32(0.1), "e4m3fn").count == 1
