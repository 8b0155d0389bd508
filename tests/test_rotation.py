from __future__ import annotations

import numpy as np
import pytest
import torch

from fpemu import Key, hadamard, quantize


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("size", [1, 2, 16, 128])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_it_is_orthonormal_and_turns_back(size, axis):
    x = numbers(128, 128, 128)
    turned = hadamard(x, Key(3), size=size, axis=axis)
    np.testing.assert_allclose((turned**2).sum(axis), (x**2).sum(axis))
    np.testing.assert_allclose(hadamard(turned, Key(3), size=size, axis=axis, inverse=True), x, atol=1e-13)
    assert size < 16 or not np.allclose(turned, hadamard(x, Key(4), size=size, axis=axis))


def test_signs_are_the_lowest_bits_of_the_words():
    ones = np.array([(-1.0) ** (Key(7).word(i) & 1) for i in range(64)])
    turned = hadamard(np.eye(64), Key(7), size=64)
    assert (turned[:, 0] * 8 == ones).all()  # the first column of Sylvester's matrix is all ones
    assert set(np.unique(turned)) == {-0.125, 0.125}


def test_a_product_whose_factors_are_both_turned_stays():
    a, w = numbers(5, 64), numbers(64, 7)
    np.testing.assert_allclose(hadamard(a, Key(1)) @ hadamard(w, Key(1), axis=0), a @ w)


def test_an_outlier_harms_its_block_less():
    x = numbers(512, 64).astype(np.float32)
    x[:, ::16] *= 30
    turned = hadamard(x, Key(0), size=64)
    back = hadamard(quantize(turned, "mxfp4"), Key(0), size=64, inverse=True)
    small = np.arange(64) % 16 != 0
    lost = (quantize(x, "mxfp4")[:, small] == 0).mean()
    assert lost > 0.5 > (back[:, small] == 0).mean()


def test_tensors_are_turned_and_their_gradients_turned_back():
    x = numbers(3, 32).astype(np.float32)
    t = torch.tensor(x, requires_grad=True)
    turned = hadamard(t, Key(2))
    torch.testing.assert_close(turned.detach(), torch.tensor(hadamard(x, Key(2))))
    g = torch.tensor(numbers(3, 32), dtype=torch.float32)
    turned.backward(g)
    torch.testing.assert_close(t.grad, hadamard(g, Key(2), inverse=True))
    assert hadamard(x.astype(np.float16), Key(2)).dtype == np.float16


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: hadamard(x, 3), TypeError, "hadamard needs a key"),
        (
            lambda x: hadamard(x, Key(0), size=12),
            ValueError,
            "size must be a power of two up to 1024, got 12",
        ),
        (
            lambda x: hadamard(x, Key(0), size=64),
            ValueError,
            "size=64 must divide the 32 elements along axis -1",
        ),
        (lambda x: hadamard(x, Key(0), axis=2), ValueError, "axis must be of the 2 dimensions of x, got 2"),
        (lambda x: hadamard(x.astype(int), Key(0)), TypeError, "x must be an array of"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((2, 32)))
