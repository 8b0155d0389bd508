"""Which modules of a model are rounded, in which roles, and to what: plain data, to and from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from .accumulation import as_accumulator
from .blocks import BlockFormat, any_format, read_format, write_format
from .files import read_mapping, write_mapping
from .formats import Format
from .matmul import Accumulator
from .patterns import Pattern, as_patterns, check_pattern, matching, modules_of, read_pattern, written_pattern
from .quantizer import Quantizer, as_quantizer

OPERANDS = ("forward_a", "forward_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_a")
ROLES = ("weight", "activation", "gradient", "weight_gradient", *OPERANDS)
WHOLE = ("input", "every_op")  # roles of the whole model


@dataclass(frozen=True)
class Policy:
    """What ``emulate`` rounds in a model.

    Attributes:
        weight: Parameters, where a module reads them; the parameters themselves keep their values.
        activation: Outputs of modules, and of the matrix products that a module computes by functions.
        gradient: Gradients arriving at those outputs.
        weight_gradient: Gradients of parameters, as computed and as accumulated in ``.grad``.
        input: Inputs of the whole model.
        forward_a: First factor ``a`` of each product ``a w`` of the forward pass: the input of a layer.
        forward_w: Its second factor ``w``: the weight of a layer.
        dgrad_g: The gradient ``g`` in the product ``g w`` that gives the gradient of ``a``.
        dgrad_w: The other factor of that.
        wgrad_g: The gradient ``g`` in the product ``g a`` that gives the gradient of ``w``.
        wgrad_a: The other factor of that.
        every_op: The result of every floating-point operation of torch, forward and backward.
        include: A pattern, or several; see below.
        exclude: The same, of modules to leave alone.
        rules: Pairs of a pattern and a Policy, or None: leave alone. For a module the first rule that
            matches holds; without one, the roles above.
        accumulate: An Accumulator, or the format of one: how the sums of matrix products are rounded as they
            accumulate, forward, in dgrad and in wgrad alike.
        except_ops: Names of operations that ``every_op`` leaves alone, or fnmatch patterns of them:
            ``"aten.native_layer_norm*"``.

    Each role is the name of a format or a block format, a Format, a BlockFormat, a Quantizer, or None: leave
    alone. Blocks run along the format's own dimension, the last, but in the factors of products, where they
    run along the one that the product sums over. A pattern is a module's name, or
    an fnmatch pattern of names, as in ``named_modules``; a module type; a function of name and module that
    tells whether they match; or ``":first"`` or ``":last"``, the first or last module in order of definition
    that has a parameter of two dimensions or more. It holds for all that is in a module that matches.

    Raises:
        TypeError, ValueError: a role, pattern or rule is none of these, or no role is set.

    Example:
        >>> Policy(weight="fp16", gradient=Quantizer("e5m2", overflow="saturate")).weight.format.name
        'binary16'
        >>> Policy(activation="e4m3fn", exclude=(":first", ":last"), rules={"head": None}).to_dict()
        {'activation': 'e4m3fn', 'exclude': [':first', ':last'], 'rules': [{'pattern': 'head'}]}
    """

    weight: Any = None
    activation: Any = None
    gradient: Any = None
    weight_gradient: Any = None
    input: Any = None
    forward_a: Any = None
    forward_w: Any = None
    dgrad_g: Any = None
    dgrad_w: Any = None
    wgrad_g: Any = None
    wgrad_a: Any = None
    every_op: Any = None
    accumulate: Any = None
    include: Any = "*"
    exclude: Any = ()
    rules: Any = ()
    except_ops: Any = ()

    def __post_init__(self) -> None:
        for role in (*ROLES, *WHOLE):
            object.__setattr__(self, role, as_quantizer(getattr(self, role)))
        object.__setattr__(self, "accumulate", as_accumulator(self.accumulate))
        for name in ("include", "exclude"):
            object.__setattr__(self, name, as_patterns(getattr(self, name), name))
        object.__setattr__(self, "rules", _rules(self.rules))
        several = (self.except_ops,) if isinstance(self.except_ops, str) else tuple(self.except_ops)
        object.__setattr__(self, "except_ops", several)
        if several and self.every_op is None:
            raise ValueError(f"except_ops= is read with every_op= only, got {several!r}")
        settable = (*ROLES, *WHOLE, "accumulate")
        if not self.rules and all(getattr(self, role) is None for role in settable):
            raise ValueError(f"a Policy needs at least one of {', '.join(settable)}; all are None")

    def roles(self) -> dict[str, Quantizer]:
        """The roles of single modules that are set."""
        return {name: getattr(self, name) for name in ROLES if getattr(self, name) is not None}

    def by_module(self, model: nn.Module) -> dict[str, Policy | None]:
        """By name of module, the policy that holds there: this one, a rule's, or None.

        Raises:
            ValueError: a pattern matches no module.
        """
        modules = modules_of(model)
        found = {pattern: matching(pattern, modules) for pattern in self.patterns()}
        chosen: dict[str, Policy | None] = {}
        for name in modules:
            rule = next((policy for pattern, policy in self.rules if name in found[pattern]), self)
            included = any(name in found[p] for p in self.include)
            excluded = any(name in found[p] for p in self.exclude)
            here = rule is not None and (rule is not self or (included and not excluded))
            chosen[name] = rule if here else None
        return chosen

    def patterns(self) -> list[Pattern]:
        """All patterns, of rules too."""
        return [*self.include, *self.exclude, *(pattern for pattern, _ in self.rules)]

    def to_dict(self) -> dict[str, Any]:
        """What is set, in strings, numbers, lists and dicts, as JSON, YAML and TOML hold them.

        Raises:
            TypeError: a pattern is a function, which no file can hold.
        """
        written: dict[str, Any] = {}
        for role in (*ROLES, *WHOLE):
            if (quantizer := getattr(self, role)) is not None:
                written[role] = _written_quantizer(quantizer)
        if self.accumulate is not None:
            written["accumulate"] = _written_accumulator(self.accumulate)
        if self.include != ("*",):
            written["include"] = [written_pattern(p) for p in self.include]
        if self.exclude:
            written["exclude"] = [written_pattern(p) for p in self.exclude]
        if self.rules:
            written["rules"] = [
                {"pattern": written_pattern(pattern)}
                | ({} if policy is None else {"policy": policy.to_dict()})
                for pattern, policy in self.rules
            ]
        if self.except_ops:
            written["except_ops"] = list(self.except_ops)
        return written

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Policy:
        """The policy that `to_dict` wrote.

        Raises:
            TypeError, ValueError: as Policy; an unknown name.
        """
        known = [field.name for field in fields(cls)]
        if unknown := set(written).difference(known):
            raise ValueError(f"a policy has no {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
        read: dict[str, Any] = dict(written)
        for role in (*ROLES, *WHOLE):
            if isinstance(read.get(role), Mapping):
                read[role] = _read_quantizer(read[role])
        if isinstance(read.get("accumulate"), Mapping):
            read["accumulate"] = _read_accumulator(read["accumulate"])
        for name in ("include", "exclude"):
            if name in read:
                several = [read[name]] if isinstance(read[name], (str, Mapping)) else read[name]
                read[name] = [read_pattern(pattern) for pattern in several]
        read["rules"] = [
            (read_pattern(rule["pattern"]), cls.from_dict(rule["policy"]) if "policy" in rule else None)
            for rule in read.get("rules", ())
        ]
        return cls(**read)

    def save(self, path: str | Path) -> None:
        """Write the policy to a file: .toml, .yaml, .yml or .json, by the name's end.

        Raises:
            TypeError: as `to_dict`.
            ValueError: another end.
        """
        write_mapping(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """The policy in a file, as `save` writes it.

        Raises:
            OSError, TypeError, ValueError: it cannot be read, or holds no policy.
        """
        return cls.from_dict(read_mapping(Path(path)))


def _rules(rules: Any) -> tuple[tuple[Pattern, Policy | None], ...]:
    pairs = tuple(rules.items()) if isinstance(rules, Mapping) else tuple(rules)
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], (Policy, type(None))):
            raise TypeError(f"a rule is a pair of a pattern and a Policy, or None, got {pair!r}")
        pattern, policy = pair
        check_pattern(pattern, "the pattern of a rule", pattern)
        if policy is not None and (policy.patterns() != ["*"] or policy.input or policy.every_op):
            raise ValueError(
                "the Policy of a rule sets roles of single modules only, without include, exclude, rules, "
                f"input and every_op of its own; got {policy!r}"
            )
        checked.append((pattern, policy))
    return tuple(checked)


def _written_accumulator(how: Accumulator) -> dict[str, Any]:
    written = {f.name: getattr(how, f.name) for f in fields(how) if getattr(how, f.name) != f.default}
    written["accumulate"] = how.accumulate
    return {name: _written_format(v) if isinstance(v, Format) else v for name, v in written.items()}


def _read_accumulator(written: Mapping[str, Any]) -> Accumulator:
    read: dict[str, Any] = {n: Format(**v) if isinstance(v, Mapping) else v for n, v in written.items()}
    return Accumulator(**read)


def _written_format(fmt: Format) -> Any:
    return fmt.name if _is_named(fmt) else write_format(fmt)


def _written_quantizer(quantizer: Quantizer) -> Any:
    fmt = quantizer.format
    named = _written_format(fmt)
    if quantizer == Quantizer(fmt):
        return named
    plain = Quantizer(fmt)
    options = {f.name: getattr(quantizer, f.name) for f in fields(quantizer) if f.name != "format"}
    return {"format": named} | {k: v for k, v in options.items() if v != getattr(plain, k)}


def _is_named(fmt: Format | BlockFormat) -> bool:
    try:
        return any_format(fmt.name) == fmt
    except ValueError:
        return False


def _read_quantizer(written: Mapping[str, Any]) -> Quantizer | Format | BlockFormat:
    if "format" not in written:
        return read_format(written)
    fmt = written["format"]
    options = {name: value for name, value in written.items() if name != "format"}
    return Quantizer(read_format(fmt) if isinstance(fmt, Mapping) else fmt, **options)
