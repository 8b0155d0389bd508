from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import nn

from fpemu import Format, Policy, Quantizer, as_format
from fpemu.formats import BINARY64, NAMED, OVERFLOWS, ROUNDINGS
from fpemu.policy import ROLES
from fpemu.quantizer import SCALINGS, as_quantizer, quantizer_of

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
            for scaling in SCALINGS:
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
        (
            ("fp16", "nearest_even", "ieee", "row"),
            ValueError,
            "unknown scaling 'row'; choose from None, 'tensor', 'delayed'",
        ),
        (
            ("fp16", "nearest_even", "ieee", "tensor", None, "C", False, 1),
            ValueError,
            "axis must be 0 or, with",
        ),
        (
            ("fp16", "nearest_even", "ieee", "channel", None, "C", False, -1),
            ValueError,
            "axis must be 0 or, with",
        ),
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


# Rules and files.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)


def rounded(policy):
    return {name: here.roles() for name, here in policy.by_module(Net()).items() if here and here.roles()}


def names(policy):
    return set(rounded(policy)) - {""}


def test_a_pattern_holds_for_all_that_is_in_what_it_matches():
    assert names(Policy(weight="fp16", include="body")) == {"body", "body.0", "body.1", "body.2"}
    assert names(Policy(weight="fp16", exclude=nn.Sequential)) == {"stem", "norm", "head"}
    assert names(Policy(weight="fp16", include=Net)) == {n for n, _ in Net().named_modules() if n}
    assert names(Policy(weight="fp16", include="body.[02]")) == {"body.0", "body.2"}


def test_the_first_and_last_layers_are_those_with_a_matrix():
    policy = Policy(weight="fp16", exclude=(":first", ":last"))
    assert names(policy) == {"norm", "body", "body.0", "body.1", "body.2"}
    assert names(Policy(weight="fp16", include=":last")) == {"head"}


def test_a_function_chooses_modules():
    def wide(name, module):
        return getattr(module, "out_features", 0) == 4 and name != "body.0"

    assert names(Policy(weight="fp16", include=wide)) == {"body.2"}


def test_the_first_rule_that_matches_holds_and_without_one_the_policy():
    e4, e5 = Policy(weight="e4m3fn"), Policy(activation="e5m2")
    policy = Policy(weight="fp16", rules=[("body.0", e4), (nn.Linear, e5), ("stem", None)], exclude="norm")
    assert {
        name: {r: q.format.name for r, q in roles.items()} for name, roles in rounded(policy).items()
    } == {
        "": {"weight": "binary16"},
        "body": {"weight": "binary16"},
        "body.0": {"weight": "e4m3fn"},
        "body.1": {"weight": "binary16"},
        "body.2": {"activation": "e5m2"},
        "head": {"activation": "e5m2"},
    }
    assert names(Policy(rules={nn.Linear: e4})) == {"body.0", "body.2", "head"}


@pytest.mark.parametrize("where", ["include", "exclude", "rules"])
@pytest.mark.parametrize("pattern", ["boddy", nn.LSTM, lambda name, module: False])
def test_a_pattern_that_matches_nothing_is_an_error(where, pattern):
    value = {pattern: None} if where == "rules" else pattern
    with pytest.raises(ValueError, match=r"matches none of the 8 modules: .*'stem' \(Conv2d\)"):
        Policy(weight="fp16", **{where: value}).by_module(Net())


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"rules": [("a",)]}, TypeError, "a rule is a pair of a pattern and a Policy, or None, got"),
        ({"rules": {"a": "fp16"}}, TypeError, "a rule is a pair"),
        ({"rules": {"a": Policy(weight="fp16", exclude="b")}}, ValueError, "without include, exclude, rules"),
        ({"rules": {"a": Policy(input="fp16")}}, ValueError, "sets roles of single modules only"),
        ({"exclude": ":second"}, ValueError, "unknown pattern ':second'; choose from :first, :last"),
        ({"rules": {3: None}}, TypeError, "the pattern of a rule must be a module type"),
    ],
)
def test_rules_that_say_nothing_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        Policy(weight="fp16", **options)


WRITTEN = [
    Policy(weight="fp16"),
    Policy(activation=Quantizer("e5m2", rounding="stochastic", overflow="saturate", random_bits=8)),
    Policy(gradient=Format("mine", 4, 5, bias=3), include=["a.*", nn.Linear], exclude=":last"),
    Policy(forward_a="e4m3fn", dgrad_g=Quantizer("e5m2", scaling="channel", axis=1), input="bf16"),
    Policy(weight="binary8p4se", rules={"head": None, nn.Conv2d: Policy(weight="e3m2"), ":first": None}),
    Policy(every_op="fp16", except_ops=["aten.native_layer_norm*", "aten._log_softmax"]),
]


@pytest.mark.parametrize("policy", WRITTEN)
@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".yml", ".json"])
def test_a_policy_comes_back_from_a_file(policy, suffix, tmp_path):
    path = tmp_path / f"policy{suffix}"
    policy.save(path)
    assert Policy.load(path) == policy
    assert Policy.from_dict(policy.to_dict()) == policy
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_policy_is_written_as_a_person_would(tmp_path):
    WRITTEN[4].save(tmp_path / "policy.yaml")
    assert (tmp_path / "policy.yaml").read_text() == (
        "weight: binary8p4se\nrules:\n- pattern: head\n"
        "- pattern:\n    type: torch.nn.modules.conv:Conv2d\n  policy:\n    weight: e3m2\n"
        "- pattern: :first\n"
    )


@pytest.mark.parametrize(
    "name, text, error, match",
    [
        ("p.toml", "weight = ", ValueError, "p.toml is not valid toml"),
        ("p.yaml", "weight: [", ValueError, "p.yaml is not valid yaml"),
        ("p.yaml", "- 1", ValueError, "p.yaml must hold a mapping, got list"),
        ("p.toml", 'wait = "fp16"', ValueError, "a policy has no wait; choose from weight, activation"),
        ("p.toml", 'weight = "fp17"', ValueError, "unknown format 'fp17'"),
        ("p.txt", "", ValueError, "a file ends in .toml, .yaml, .yml, .json, got"),
    ],
)
def test_a_file_that_holds_no_policy_is_refused(name, text, error, match, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=match):
        Policy.load(tmp_path / name)


def test_a_function_cannot_be_written(tmp_path):
    with pytest.raises(TypeError, match="a file cannot hold the function '<lambda>'; give names or types"):
        Policy(weight="fp16", include=lambda name, module: True).save(tmp_path / "p.toml")
    assert list(tmp_path.iterdir()) == []


def test_the_last_layer_may_be_parametrized_or_lazy():
    parametrized = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    chosen = Policy(weight="fp16", exclude=":last").by_module(parametrized)
    assert [name for name, here in chosen.items() if here] == ["", "0"]
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    chosen = Policy(weight="fp16", exclude=":last").by_module(lazy)
    assert [name for name, here in chosen.items() if here] == ["", "0"]
