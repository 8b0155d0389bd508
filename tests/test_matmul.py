"""Products and sums rounded as they accumulate: each element equals a slow exact loop."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from same import same

import fpemu
from fpemu import Accumulator, Key, matmul, quantize
from fpemu.formats import ROUNDINGS
from fpemu.kernels import gemm, ways
from fpemu.reference import round_value


def exact_product(x, y):
    if math.isfinite(x) and math.isfinite(y) and x and y:
        return Fraction(x) * Fraction(y)
    return x * y  # infinities, NaN, and the sign of a zero


def exact_sum(x, y):
    if isinstance(x, Fraction) or (math.isfinite(x) and math.isfinite(y)):
        return (Fraction(x) + Fraction(y)) or float(x) + float(y)
    return x + y


def slow(a, b, how, key=None):
    """The definition of `matmul`, of 2-d arrays, in exact arithmetic."""
    random = how.rounding == "stochastic"
    mode = {"rounding": how.rounding, "overflow": how.overflow}

    def word(i, *folds):
        if not random:
            return None
        own = key
        for fold in folds:
            own = own.fold_in(fold)
        return own.word(i)

    def rounded(x, fmt, *where):
        return round_value(x, fmt, **mode, word=word(*where))

    rows, terms, columns = *a.shape, b.shape[1]
    c = np.zeros((rows, columns), a.dtype)
    for i in range(rows * columns):
        row, column = divmod(i, columns)
        total = partial = 0.0
        for k in range(terms):
            term = exact_product(float(a[row, k]), float(b[k, column]))
            if how.product is not None:
                term = rounded(term, how.product, i, "product", k)
            if how.chunk is None:
                total = rounded(exact_sum(total, term), how.accumulate, i, k)
                continue
            partial = exact_sum(partial, term)
            if how.chunk_accumulate is None:
                partial = round_value(partial, "fp32")
            else:
                partial = rounded(partial, how.chunk_accumulate, i, k)
            if (k + 1) % how.chunk == 0 or k + 1 == terms:
                total = rounded(exact_sum(total, partial), how.accumulate, i, "chunks", k // how.chunk)
                partial = 0.0
        c[row, column] = total
    return c


def numbers(shape, kind, seed=0):
    """float32 numbers: of fp16 or of 24 bits, of one size or of very different ones, made to tie, special."""
    rng = np.random.default_rng([seed, *kind.encode()])
    if kind == "normal":
        return rng.standard_normal(shape).astype(np.float16).astype(np.float32)
    if kind == "long":
        return rng.standard_normal(shape).astype(np.float32)
    if kind == "ties":
        signs, near = rng.choice([-1, 1], shape), rng.choice([0, 1, 1 + 2**-10, 2 - 2**-10, 1.5], shape)
        return (signs * near * 2.0 ** rng.integers(-12, 6, shape)).astype(np.float32)
    if kind == "wide":
        return np.ldexp(rng.choice([-1, 1], shape) * rng.random(shape), rng.integers(-60, 60, shape)).astype(
            "f4"
        )
    bits = rng.integers(0, 2**16, shape, np.uint16)
    return bits.view(np.float16).astype(np.float32)


KINDS = ("normal", "long", "ties", "wide", "special")
WAYS = [
    Accumulator("fp16"),
    Accumulator("fp16", product="fp16"),
    Accumulator("bf16"),
    Accumulator("bf16", product="bf16"),
    Accumulator("tf32"),
    Accumulator("fp32"),
    Accumulator("fp32", product="fp32"),
    Accumulator("fp32", product="bf16"),
    Accumulator("e4m3fn"),
    Accumulator("e5m2", product="e4m3"),
    Accumulator("e4m3fnuz", product="e5m2"),
    Accumulator("e5m9", product="fp16"),
    Accumulator("e8m13"),
    Accumulator("fp16", overflow="saturate"),
    Accumulator("e4m3fn", overflow="propagate"),
    Accumulator("fp16", chunk=1),
    Accumulator("fp16", chunk=3),
    Accumulator("fp16", chunk=16, product="fp16"),
    Accumulator("bf16", chunk=4, chunk_accumulate="bf16"),
    Accumulator("fp32", chunk=5, chunk_accumulate="e8m13"),
    Accumulator("e5m2", chunk=2, chunk_accumulate="fp16", product="e5m2"),
    *(Accumulator("fp16", rounding=mode) for mode in ROUNDINGS if mode != "nearest_even"),
    *(
        Accumulator("e4m3fn", product="e5m2", chunk=3, chunk_accumulate="bf16", rounding=mode)
        for mode in ROUNDINGS
    ),
    Accumulator("bf16", chunk=3, rounding="stochastic"),
]


def named(how):
    written = {n: getattr(how, n) for n in how.__dataclass_fields__}
    default = vars(Accumulator())
    return " ".join(f"{v}" for n, v in written.items() if n == "accumulate" or v != default[n])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS, ids=named)
def test_each_element_is_the_exact_loop(how, kind):
    a, b = numbers((3, 21), kind), numbers((21, 5), kind, 1)
    key = Key(3, step=5, offset=2**33 + 1020) if how.rounding == "stochastic" else None
    assert same(how(a, b, key=key), slow(a, b, how, key))


@pytest.mark.parametrize(
    "rows, terms, columns", [(0, 3, 2), (2, 0, 3), (2, 3, 0), (1, 1, 1), (1, 9, 1), (1, 5000, 1), (7, 8, 300)]
)
@pytest.mark.parametrize(
    "how",
    [Accumulator("fp16"), Accumulator("fp16", product="fp16"), Accumulator("fp16", chunk=64)],
    ids=named,
)
def test_every_shape_is_the_exact_loop(how, rows, terms, columns):
    a, b = numbers((rows, terms), "ties"), numbers((terms, columns), "ties", 1)
    assert same(how(a, b), slow(a, b, how))


def test_fp16_is_numpys_outer_product_loop():
    a, b = (numbers(s, "normal", i).astype(np.float16) for i, s in enumerate([(60, 700), (700, 500)]))
    c = np.zeros((60, 500), np.float16)
    for k in range(700):
        c = c + a[:, k : k + 1] * b[k]
    got = matmul(a, b, product="fp16")
    assert got.dtype == np.float16 and same(got, c)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [how for how in WAYS if how.rounding == "nearest_even"], ids=named)
def test_every_fast_way_gives_the_bits_of_float64(how, kind, monkeypatch):
    a, b = numbers((17, 530), kind), numbers((530, 270), kind, 1)
    got = how(a, b)
    monkeypatch.setattr(ways, "_way", lambda *args: gemm.ANY)
    monkeypatch.setattr(ways, "_sum_way", lambda *args: gemm.ANY)
    monkeypatch.setattr(ways, "sums", ways.sums.__wrapped__)
    assert same(got, how(a, b))


def test_the_fast_ways_are_taken():
    def way(how, exact=True):
        return ways.sums(*how.roundings(), True, exact)[:2]

    fp16 = gemm.HALF if ways.F16C else gemm.MAGIC
    assert way(Accumulator("fp16")) == (fp16, fp16)
    assert way(Accumulator("fp16", product="fp16"))[0] == fp16 + 1
    assert way(Accumulator("fp16", product="fp16"), exact=False)[0] == gemm.ANY_PRODUCT
    assert way(Accumulator("fp16", chunk=64)) == (gemm.SINGLE, fp16)
    assert way(Accumulator("e4m3fn", product="e5m2"))[0] == gemm.MAGIC_PRODUCT
    assert way(Accumulator("e5m2", product="e4m3"))[0] == gemm.ANY_PRODUCT  # more bits than the sums
    assert way(Accumulator("bf16", product="bf16"))[0] == gemm.WIDE_PRODUCT
    assert way(Accumulator("e8m13"))[0] == gemm.WIDE
    assert way(Accumulator("e8m13", product="e8m13"))[0] == gemm.ANY_PRODUCT  # 2 * 14 bits are too many
    assert way(Accumulator("fp32", product="fp32"))[0] == gemm.SINGLE_PRODUCT
    assert way(Accumulator("fp16", rounding="toward_zero"))[0] == gemm.ANY


@pytest.mark.slow
def test_without_f16c_and_fma_the_bits_are_the_same():
    code = (
        "import numpy as np, fpemu; from fpemu.kernels.ways import F16C; assert not F16C;"
        "r = np.random.default_rng(0);"
        "a, b = (r.standard_normal((30, 30)).astype('f2').astype('f4') for _ in range(2));"
        "m = fpemu.matmul;"
        "print([m(a, b, product=p, chunk=c).tobytes().hex() for p in (None, 'fp16') for c in (None, 7)])"
    )
    found = [
        subprocess.run([sys.executable, "-c", text], env=os.environ | more, capture_output=True, text=True)
        for text, more in (
            (code, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
            (code.replace("assert not F16C;", ""), {}),
        )
    ]
    assert [one.returncode for one in found] == [0, 0], found[0].stderr
    assert found[0].stdout == found[1].stdout


@pytest.mark.parametrize("chunk", [None, 6])
def test_float64_factors_are_taken_where_their_products_are_exact(chunk):
    how = Accumulator("e10m28", chunk=chunk, product="e10m40", chunk_accumulate=chunk and "e10m30")
    rng = np.random.default_rng(0)
    a, b = (quantize(rng.standard_normal(s) * 1e60, "e11m24") for s in ((3, 20), (20, 4)))
    assert same(how(a, b), slow(a, b, how))
    with pytest.raises(ValueError, match="float64 does not hold the products of these float64 factors"):
        matmul(rng.standard_normal((2, 2)), rng.standard_normal((2, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_tensor_gives_what_an_array_gives(dtype):
    a, b = (quantize(numbers(s, "normal", i), "e4m3") for i, s in enumerate([(2, 1, 5, 30), (3, 30, 4)]))
    wanted = matmul(a, b, accumulate="e4m3")
    assert wanted.shape == (2, 3, 5, 4)
    left, right = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (a, b))
    got = matmul(left.requires_grad_(), right, accumulate="e4m3")
    assert got.dtype == left.dtype and not got.requires_grad
    assert same(got.float().numpy(), wanted)


def test_views_and_broadcast_batches_are_their_copies():
    a, b = numbers((4, 30, 6), "normal"), numbers((5, 9, 30), "normal", 1)
    views = a.transpose(0, 2, 1)[::2, ::-1], b.transpose(0, 2, 1)[3][None]
    wanted = np.stack([matmul(views[0][i].copy(), b[3].T.copy()) for i in range(2)])
    assert same(matmul(*views), wanted)
    assert same(matmul(*(torch.from_numpy(x.copy()) for x in views)).numpy(), wanted)
    tensor = torch.from_numpy(a).transpose(1, 2)[1:3].expand(2, 6, 30)
    assert same(matmul(tensor, torch.from_numpy(b[3]).T).numpy(), matmul(a.transpose(0, 2, 1)[1:3], b[3].T))


def test_vectors_lose_their_dimension_as_in_numpy():
    m, x = numbers((4, 30), "normal"), numbers(30, "normal", 1)
    assert same(matmul(m, x), matmul(m, x[:, None])[:, 0])
    assert same(matmul(x, m.T), matmul(x[None], m.T)[0])
    assert matmul(x, x).shape == () and matmul(np.stack([m, m]), x).shape == (2, 4)


def test_a_dot_product_is_arithmetics():
    a, b = numbers((2, 900), "normal")
    for options in ({}, {"order": "chunk", "chunk": 30}):
        more = {"chunk": 30, "chunk_accumulate": "fp16"} if options else {}
        assert same(fpemu.dot(a, b, "fp16", **options), matmul(a, b, product="fp16", **more))


@pytest.mark.parametrize("how", [Accumulator("fp16"), Accumulator("bf16", rounding="stochastic")], ids=named)
def test_threads_and_slices_of_rows_change_no_bit(how):
    a, b = numbers((600, 40), "normal"), numbers((40, 70), "normal", 1)
    key = Key(2) if how.rounding == "stochastic" else None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = how(a, b, key=key)
        torch.set_num_threads(2)
        assert same(how(a, b, key=key), alone)
    finally:
        torch.set_num_threads(threads)
    below = key and replace(key, offset=101 * 70)
    assert same(how(a[101:], b, key=below), alone[101:])


def test_a_stochastic_sum_is_unbiased():
    ones = np.full((1, 4000), 2**-4, np.float32)
    b = np.ones((4000, 400), np.float32)
    sums = matmul(ones, b, accumulate="bf16", rounding="stochastic", key=Key(0))[0]
    assert matmul(ones, b[:, :1], accumulate="bf16").item() == 16  # stalls
    assert abs(sums.mean() - 250) < 5 * sums.std() / 20


def test_a_parameters_storage_is_not_pinned():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    matmul(weight, weight)
    weight.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda x: matmul(x, x[:2]),
            ValueError,
            r"as many columns as b has rows, got shapes \(3, 3\) and \(2, 3\)",
        ),
        (lambda x: matmul(x[0, 0], x), ValueError, "factors of one dimension or more"),
        (
            lambda x: matmul(np.stack([x] * 2), np.stack([x] * 3)),
            ValueError,
            "batches of a and b must broadcast",
        ),
        (
            lambda x: matmul(x, x.astype("f8")),
            TypeError,
            "one kind and dtype, got ndarray of float32 and ndarray",
        ),
        (lambda x: matmul(x, torch.from_numpy(x)), TypeError, "one kind and dtype"),
        (lambda x: matmul([1.0], x), TypeError, "a must be a numpy array or a torch tensor, got list"),
        (lambda x: matmul(x, x, chunk=0), ValueError, "chunk must be an int of at least 1, or None, got 0"),
        (lambda x: matmul(x, x, chunk=2.0), ValueError, "chunk must be an int"),
        (lambda x: matmul(x, x, chunk_accumulate="fp16"), ValueError, "read with chunk= only"),
        (lambda x: matmul(x, x, accumulate="fp64"), ValueError, "up to 51 significand bits"),
        (
            lambda x: matmul(x, x, accumulate="e8m30"),
            ValueError,
            "more than the dtype's 24; pass wider arrays",
        ),
        (
            lambda x: matmul(x.astype("f2"), x.astype("f2"), accumulate="fp32"),
            ValueError,
            "dtype's 11; pass wider",
        ),
        (lambda x: matmul(x, x, accumulate="e8m0"), ValueError, "signed format with a zero"),
        (
            lambda x: matmul(x, x, accumulate="fp32", rounding="stochastic", key=Key(0)),
            ValueError,
            "up to 20",
        ),
        (lambda x: matmul(x, x, rounding="stochastic"), ValueError, "needs key="),
        (lambda x: matmul(x, x, key=Key(0)), ValueError, "read by rounding='stochastic' only"),
        (lambda x: matmul(x, x, rounding="up"), ValueError, "unknown rounding 'up'"),
        (lambda x: matmul(x, x, product="fp17"), ValueError, "fp17"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((3, 3), np.float32))
