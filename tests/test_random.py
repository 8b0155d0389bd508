from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest

from fpemu.random import Key, philox4x32

# The first 32-bit words of pi's fraction, as in Random123's kat_vectors.
PI_WORDS = (
    [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
    [0xA409_3822, 0x299F_31D0],
)


def philox(counter, key):
    """Philox4x32-10 after Salmon et al. 2011, figure 2, on uint64 arrays; written apart from fpemu.random.

    Args:
        counter: Four uint64 arrays of one shape, each element below 2**32.
        key: Two ints below 2**32.

    Returns:
        uint64 array of the counters' shape and a last axis of four words.
    """
    x = [np.asarray(word, np.uint64) for word in counter]
    low, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
    for i in range(10):
        left, right = (key[0] + i * 0x9E37_79B9) % 2**32, (key[1] + i * 0xBB67_AE85) % 2**32
        first = x[0] * np.uint64(0xD251_1F53)
        second = x[2] * np.uint64(0xCD9E_8D57)
        x = [
            (second >> half) ^ x[1] ^ np.uint64(left),
            second & low,
            (first >> half) ^ x[3] ^ np.uint64(right),
            first & low,
        ]
    return np.stack(x, axis=-1)


def block_words(block, key=(0, 0), step=0):
    """The words of elements 1024 * block and on, from all the block's Philox calls at once."""
    j = np.arange(256, dtype=np.uint64) + np.uint64(256 * block)
    split = j & np.uint64(0xFFFF_FFFF), j >> np.uint64(32)
    words = philox((*split, np.full(256, step % 2**32), np.full(256, step // 2**32)), key)
    # Each word is two halves, the lower one first; 128 calls give upper halves, the next 128 lower ones.
    halves = np.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(256, 8)
    upper, lower = (
        np.concatenate([part[:, :4].ravel(), part[:, 4:].ravel()]) for part in np.split(halves, 2)
    )
    return (upper << 16 | lower).tolist()


# Known answers published with Random123 (tests/kat_vectors, philox4x32 10).
KNOWN = pytest.mark.parametrize(
    "counter, key, words",
    [
        ([0] * 4, [0] * 2, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
        ([0xFFFF_FFFF] * 4, [0xFFFF_FFFF] * 2, [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
        (*PI_WORDS, [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]),
    ],
    ids=["zeros", "ones", "pi"],
)


@KNOWN
def test_philox_known_answers(counter, key, words):
    assert list(philox4x32(tuple(counter), tuple(key))) == words


@KNOWN
def test_the_philox_of_these_tests_knows_them_too(counter, key, words):
    assert philox(counter, key).tolist() == words


@pytest.mark.parametrize(
    "block, key, step",
    [
        (0, (0, 0), 0),
        (1, (7, 0), 0),
        (3, (0xDEAD_BEEF, 0xFFFF_FFFF), 5),
        (2, (1, 2), 2**32 + 9),  # the fourth counter word
        (2**24 - 1, (1, 2), 2**64 - 1),  # the last block below counter 2**32
        (2**24, (1, 2), 0),  # the second counter word
        (2**50 + 3, (1, 2), 1),
    ],
)
def test_word_follows_the_documented_map(block, key, step):
    draw = Key(*key, step=step)
    assert [draw.word(1024 * block + i) for i in range(1024)] == block_words(block, key, step)


@pytest.mark.parametrize("offset", [0, 1, 511, 512, 1023, 1024, 4000, 2**40 + 77])
def test_an_offset_draws_the_slice_of_the_whole(offset):
    whole, shard = Key(3, 4, step=5), Key(3, 4, step=5, offset=offset)
    assert [shard.word(i) for i in range(1100)] == [whole.word(offset + i) for i in range(1100)]


def test_at_changes_the_step_alone():
    assert Key(1, 2, step=3, offset=4).at(9) == Key(1, 2, step=9, offset=4)


@pytest.mark.parametrize("other", [Key(1, step=1), Key(1, stream=1), Key(2), Key(1, step=2**32)])
def test_seed_stream_and_step_each_change_the_words(other):
    words = {Key(1).word(i) for i in range(64)}
    assert words.isdisjoint(other.word(i) for i in range(64))


@pytest.mark.parametrize("field, bits", [("seed", 32), ("stream", 32), ("step", 64), ("offset", 63)])
def test_key_accepts_just_the_range_of_a_field(field, bits):
    good = {"seed": 0, field: 2**bits - 1}
    assert getattr(Key(**good), field) == 2**bits - 1
    for bad in (-1, 2**bits):
        with pytest.raises(ValueError, match=rf"Key needs 0 <= {field} < 2\*\*{bits}, got {bad}"):
            Key(**{**good, field: bad})


@pytest.mark.parametrize("field", ["seed", "stream", "step", "offset"])
@pytest.mark.parametrize("value", [1.0, "1", None, True, np.float32(1)])
def test_key_refuses_what_is_no_int(field, value):
    with pytest.raises(TypeError, match=f"Key needs an int for {field}, got "):
        Key(**{"seed": 0, field: value})


def test_numpy_integers_make_the_same_key():
    key = Key(np.uint32(5), np.int64(6), step=np.uint64(7), offset=np.int8(8))
    assert key == Key(5, 6, step=7, offset=8)
    assert {type(value) for value in (key.seed, key.stream, key.step, key.offset)} == {int}


def test_key_is_a_value():
    key = Key(1, 2, step=3, offset=4)
    assert {key: "words"}[Key(1, 2, step=3, offset=4)] == "words"
    assert pickle.loads(pickle.dumps(key)) == key
    with pytest.raises(AttributeError):
        key.seed = 2


# Pinned: a release that changes these changes everybody's random numbers.
@pytest.mark.parametrize(
    "data, seed, stream",
    [
        (0, 0x78DE_95DD, 0x848B_7368),
        (1, 0xEFC2_7DE6, 0x032D_597C),
        (2**40 + 1, 0x0CB0_E046, 0xFBEE_DA11),
        ("layer1.weight", 0x4554_2080, 0x9789_7BBE),
    ],
)
def test_fold_in_stays_as_it_is(data, seed, stream):
    assert Key(11, 12, step=13, offset=14).fold_in(data) == Key(seed, stream, step=13, offset=14)


@pytest.mark.parametrize("data", [0, 1, 2**32 - 1, 2**32, 2**64 - 1, "", "layer1.weight", "größe"])
def test_fold_in_is_one_philox_call_of_the_data(data):
    if isinstance(data, str):
        digest = hashlib.blake2b(data.encode(), digest_size=12).digest()
        counter = [*np.frombuffer(digest, "<u4"), 0xFFFF_FFFE]
    else:
        counter = [data % 2**32, data // 2**32, 0, 0xFFFF_FFFF]
    seed, stream, _, _ = philox(counter, (11, 12)).tolist()
    assert Key(11, 12).fold_in(data) == Key(seed, stream)


def test_fold_in_gives_every_rank_and_name_its_own_key():
    data = [*range(1000), 2**32, 2**33, *(str(i) for i in range(1000)), "", "rank"]
    keys = {Key(0).fold_in(each) for each in data} | {Key(0)}
    assert len(keys) == len(data) + 1


def test_the_order_of_folds_matters():
    assert Key(0).fold_in("a").fold_in(1) != Key(0).fold_in(1).fold_in("a")


def test_folded_keys_draw_independent_words():
    parent = Key(0)
    keys = [parent, parent.fold_in("w"), *(parent.fold_in(rank) for rank in range(6))]
    words = np.array([[key.word(i) for i in range(512)] for key in keys], np.uint32)
    n = 512 * 32
    for i in range(len(keys)):
        for j in range(i):
            agree = n - int(np.bitwise_count(words[i] ^ words[j]).sum())
            assert abs(agree - n / 2) < 5 * (n / 4) ** 0.5


@pytest.mark.parametrize("data", [-1, 2**64, True, 1.0, None, b"rank"])
def test_fold_in_refuses_other_data(data):
    with pytest.raises(ValueError, match="fold_in needs a string or an int with 0 <= data < 2\\*\\*64, got "):
        Key(0).fold_in(data)


def test_fold_in_takes_numpy_integers():
    assert Key(0).fold_in(np.int64(3)) == Key(0).fold_in(3)
