from __future__ import annotations

import numpy as np
import pytest
import torch
from dtypes import ML_DTYPES
from same import same

from fpemu import as_format, decode, encode, pack, quantize, reference, unpack
from fpemu.formats import NAMED

UP_TO_16 = [f for f in NAMED if f.bits <= 16]
P3109 = [
    as_format(f"binary{name}") for name in ("8p4se", "8p3uf", "8p1ue", "5p2sf", "6p6uf", "10p4se", "9p1sf")
]


def all_codes(fmt):
    return np.arange(2**fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)


@pytest.mark.parametrize("fmt", [*UP_TO_16, *P3109], ids=str)
def test_all_codes_decode_as_the_reference_says(fmt):
    codes = all_codes(fmt)
    wanted = np.array([reference.decode(int(code), fmt) for code in codes])
    assert same(decode(codes, fmt, dtype="float64"), wanted)
    if fmt.smallest_subnormal >= 2.0**-149 and fmt.max < 2.0**128:
        assert same(decode(codes, fmt), wanted.astype(np.float32))


@pytest.mark.parametrize("fmt", [*UP_TO_16, *P3109], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_codes_of_numbers_come_back(fmt, dtype):
    codes = all_codes(fmt)
    values = decode(codes, fmt, dtype="float64")
    if dtype == "float32" and not same(values.astype("f4").astype("f8"), values):
        pytest.skip(f"float32 does not hold {fmt}")
    kept = ~np.isnan(values)
    if not fmt.subnormal and fmt.has_zero:
        kept &= (values != 0) | ((codes & (fmt.sign_code - 1)) == 0)  # zero has one code a sign
    got = encode(values.astype(dtype), fmt)
    assert got.dtype == codes.dtype
    assert (got == codes)[kept].all()
    if fmt.has_nan:
        assert np.isnan(decode(got, fmt, dtype="float64")[np.isnan(values)]).all()


@pytest.mark.parametrize("name", ML_DTYPES)
def test_codes_are_the_bits_of_ml_dtypes(name):
    codes = all_codes(as_format(name))
    theirs = codes.astype(np.uint8 if as_format(name).bits <= 8 else np.uint16).view(ML_DTYPES[name])
    assert same(decode(codes, name), theirs.astype(np.float32))


@pytest.mark.parametrize(
    "name", ["float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"]
)
def test_codes_are_the_bits_of_torch(name):
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(getattr(torch, name)).float()
    assert same(decode(codes, name).numpy(), theirs.numpy())
    finite = ~theirs.isnan()
    assert torch.equal(encode(theirs, name)[finite], codes[finite])


def test_codes_of_binary32_are_the_bits_of_float32():
    x = np.array([1 + 2.0**-24, 0.1, -1e-45, 1e39, -0.0])
    with np.errstate(over="ignore"):
        assert (encode(x, "fp32") == x.astype(np.float32).view(np.uint32)).all()
    assert same(decode(encode(x, "fp32"), "fp32"), quantize(x, "fp32").astype(np.float32))


def test_codes_of_a_wider_format_hold_the_values_of_a_narrow_dtype():
    x = np.array([1.5, -0.0, 65504], np.float16)
    assert (encode(x, "fp32") == x.astype(np.float32).view(np.uint32)).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("first", ["low", "high"])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 5), (2, 0), (2, 3, 9)])
def test_packed_codes_come_back(bits, first, shape):
    codes = np.random.default_rng(bits).integers(0, 2**bits, shape).astype(np.uint8)
    data = pack(codes, bits, first=first)
    assert data.dtype == np.uint8 and data.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    assert (unpack(data, bits, shape[-1], first=first) == codes).all()
    tensor = pack(torch.from_numpy(codes), bits, first=first)
    assert (tensor.numpy() == data).all()
    assert (unpack(tensor, bits, shape[-1], first=first).numpy() == codes).all()


def test_element_0_lies_in_the_low_bits_or_the_high_ones():
    assert pack(np.uint8([1, 2]), 4).tolist() == [0x21]
    assert pack(np.uint8([1, 2]), 4, first="high").tolist() == [0x12]
    # Four codes of six bits in three bytes: 000001 000010 000011 111111.
    assert pack(np.uint8([1, 2, 3, 63]), 6).tolist() == [0b10_000001, 0b0011_0000, 0b111111_00]
    assert pack(np.uint8([1, 2, 3, 63]), 6, first="high").tolist() == [0b000001_00, 0b0010_0000, 0b11_111111]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: pack(np.uint8([16]), 4), ValueError, "codes must have 4 bits, got 0x10"),
        (lambda: pack(np.uint16([1]), 4), TypeError, "codes must be an array of uint8, got uint16"),
        (lambda: pack([1], 4), TypeError, "codes must be an array of uint8, got list"),
        (lambda: pack(np.uint8(1), 4), TypeError, "codes must be an array of uint8"),
        (lambda: pack(np.array(1, np.uint8), 4), ValueError, "at least one dimension"),
        (lambda: pack(np.uint8([1]), 9), ValueError, "bits must be an int from 1 to 8, got 9"),
        (
            lambda: pack(np.uint8([1]), 4, first="left"),
            ValueError,
            "first must be 'low' or 'high', got 'left'",
        ),
        (lambda: unpack(np.uint8([1]), 4, 3), ValueError, "a row of 1 bytes does not hold 3 codes of 4 bits"),
        (lambda: encode(np.zeros(2, "f4"), "fp64"), ValueError, "up to 32 bits, but binary64 has 64"),
        (lambda: decode(np.uint8([1]), "fp64"), ValueError, "up to 32 bits, but binary64 has 64"),
        (lambda: decode(np.int8([1]), "e5m2"), TypeError, "array of unsigned integers, got int8"),
        (lambda: decode(np.uint8([64]), "e3m2"), ValueError, "codes of e3m2 have 6 bits, got 0x40"),
        (
            lambda: decode(np.uint8([1]), "e5m2", dtype="float16"),
            ValueError,
            "dtype must be 'float32' or 'float64'",
        ),
        (lambda: decode(np.uint16([1]), "e9m5"), ValueError, "float32 cannot hold"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_0_d_array_of_codes_decodes_to_a_0_d_array():
    for code in (np.array(0x38, np.uint8), np.uint8(0x38)):
        value = decode(code, "e4m3fn")
        assert isinstance(value, np.ndarray) and value.shape == () and value == 1.0
    assert decode(np.array(0x3F800000, np.uint32), "fp32").shape == ()


def test_a_numpy_scalar_encodes():
    assert encode(np.float32(1.0), "e4m3fn") == 0x38
    assert encode(np.float16(1.0), "e4m3fn") == 0x38


@pytest.mark.parametrize("codes", [torch.tensor([1]), torch.tensor([1.0]), torch.tensor([True])])
def test_tensors_of_codes_must_be_unsigned(codes):
    with pytest.raises(TypeError, match=f"array of unsigned integers, got {str(codes.dtype)[6:]}"):
        decode(codes, "e5m2")
