from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import nn

from fpemu import Format, Policy, Quantizer, as_format
from fpemu.formats import BINARY64, NAMED, OVERFLOWS, ROUNDINGS
from fpemu.policy import ROLES
from fpemu.quantizer import as_quantizer, quantizer_of

CUSTOM = [
    Format("mine", 4, 4, bias=7, specials="fn"),
    Format("no subnormals", 5, 6, subnormal=False),
    Format("unsigned", 4, 3, specials="fn", signed=False),
    Format("shifted", 3, 4, bias=40, specials="finite"),
    Format("", 2, 2, specials="fnuz"),
    as_format("e6m9"),
    as_format("binary8p4se"),
    as_format("binary8p3uf"),
]
HELD = [fmt for fmt in (*NAMED, *CUSTOM) if fmt != BINARY64]


# Quantizer.


@pytest.mark.parametrize("fmt", HELD, ids=str)
def test_a_spec_says_all_of_a_quantizer(fmt):
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            for scaling in (None, "tensor"):
                quantizer = Quantizer(fmt, rounding, overflow, scaling)
                assert quantizer_of(quantizer.spec) == quantizer


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("variant", ["A", "B", "C"])
@pytest.mark.parametrize("random_bits", [1, 8, None])
def test_a_spec_says_how_many_random_bits_and_whether_subnormals_are_flushed(random_bits, variant, flush):
    quantizer = Quantizer(
        "fp16", "stochastic", random_bits=random_bits, variant=variant, flush_subnormals=flush
    )
    assert quantizer_of(quantizer.spec) == quantizer


def test_a_format_wider_than_float32_has_a_spec_too():
    assert quantizer_of(Quantizer("binary64").spec).format == BINARY64


def test_a_name_with_a_bar_in_it_survives_the_spec():
    quantizer = Quantizer(Format("a|b", 5, 6))
    assert quantizer_of(quantizer.spec) == quantizer


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        (("fp17",), ValueError, "unknown format 'fp17'"),
        ((None,), TypeError, "a format is given by name, as a Format or by a floating-point dtype, got None"),
        ((16,), TypeError, "got 16"),
        ((torch.int8,), TypeError, "floating-point dtype"),
        (("fp16", "nearest"), ValueError, "unknown rounding 'nearest'; choose from nearest_even"),
        (("fp16", None), ValueError, "unknown rounding None"),
        (("fp16", ["nearest_even"]), TypeError, "names"),
        (("fp16", "nearest_even", "clip"), ValueError, "unknown overflow 'clip'; choose from ieee"),
        (("fp16", "nearest_even", "ieee", "channel"), ValueError, "unknown scaling 'channel'.*'tensor'"),
        ((Format("wide", 9, 8),), ValueError, "wide"),
        ((Format("fine", 7, 30),), ValueError, "fine"),
    ],
)
def test_a_quantizer_refuses_what_is_unknown_and_what_float32_cannot_hold(arguments, error, match):
    with pytest.raises(error, match=match):
        Quantizer(*arguments)


def test_names_dtypes_and_formats_make_equal_quantizers():
    made = [Quantizer(fmt) for fmt in ("fp16", "HALF", as_format("fp16"), torch.float16, "e5m10")]
    assert len(set(made)) == 1 and all(quantizer.spec == made[0].spec for quantizer in made)


@pytest.mark.parametrize(
    "other",
    [
        Quantizer("bf16"),
        Quantizer("fp16", rounding="stochastic"),
        Quantizer("fp16", overflow="saturate"),
        Quantizer("fp16", scaling="tensor"),
        Quantizer("fp16", flush_subnormals=True),
        Quantizer(Format("mine", 5, 11)),
    ],
)
def test_quantizers_that_differ_in_anything_are_unequal(other):
    assert other != Quantizer("fp16") and other.spec != Quantizer("fp16").spec
    assert len({other, Quantizer("fp16")}) == 2


def test_a_quantizer_is_frozen_and_pickles():
    quantizer = Quantizer("e5m2", "stochastic", "saturate", "tensor")
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.rounding = "nearest_even"
    assert pickle.loads(pickle.dumps(quantizer)) == quantizer
    assert quantizer.stochastic and not Quantizer("e5m2").stochastic


def test_a_role_is_a_name_a_format_a_quantizer_or_none():
    quantizer = Quantizer("e5m2", overflow="saturate")
    assert as_quantizer(None) is None
    assert as_quantizer(quantizer) is quantizer
    assert as_quantizer("e5m2") == as_quantizer(as_format("e5m2")) == Quantizer("e5m2")


# Policy.


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "value", ["fp16", as_format("fp16"), torch.float16, Quantizer("fp16")], ids=lambda v: type(v).__name__
)
def test_each_role_takes_names_formats_and_quantizers(role, value):
    policy = Policy(**{role: value})
    assert policy.roles() == {role: Quantizer("fp16")}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_refuses_other_things(role):
    with pytest.raises(ValueError, match="unknown format 'fp17'"):
        Policy(**{role: "fp17"})
    with pytest.raises(TypeError, match="a format is given by name"):
        Policy(**{role: 8})


def test_a_policy_that_rounds_nothing_is_an_error():
    with pytest.raises(ValueError, match="needs at least one of weight, activation, gradient"):
        Policy()
    with pytest.raises(ValueError, match="all are None"):
        Policy(include="0", exclude="1")


def test_roles_come_in_a_fixed_order():
    policy = Policy(weight_gradient="e5m2", gradient="bf16", weight="fp16")
    assert list(policy.roles()) == ["weight", "gradient", "weight_gradient"]


@pytest.mark.parametrize("name", ["include", "exclude"])
@pytest.mark.parametrize(
    "value, expected",
    [
        ("a.*", ("a.*",)),
        (nn.Linear, (nn.Linear,)),
        (["a", nn.Linear], ("a", nn.Linear)),
        (("a", "b"), ("a", "b")),
        ([], ()),
        ({"a": 1, "b": 2}.keys(), ("a", "b")),
    ],
    ids=["name", "type", "list", "tuple", "none", "keys"],
)
def test_patterns_become_a_tuple(name, value, expected):
    assert getattr(Policy(weight="fp16", **{name: value}), name) == expected


@pytest.mark.parametrize("name", ["include", "exclude"])
@pytest.mark.parametrize("value", [3, None, [3], [None], nn.Linear(1, 1), [nn.Linear(1, 1)]])
def test_patterns_of_another_kind_are_refused(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a module type, a pattern of names or a function"):
        Policy(weight="fp16", **{name: value})


def test_policies_are_equal_hashable_frozen_and_pickle():
    policy = Policy(weight="fp16", include=["a", nn.Linear])
    same = Policy(weight=torch.float16, include=("a", nn.Linear))
    assert policy == same and hash(policy) == hash(same)
    assert policy != Policy(weight="fp16") != Policy(activation="fp16")
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, weight=None, gradient="e5m2").roles() == {
        "gradient": Quantizer("e5m2")
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.weight = None
