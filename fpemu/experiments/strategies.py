"""Strategies: which format each part of a training step is kept in, as plain data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ..files import read_mapping
from ..formats import OVERFLOWS, ROUNDINGS, as_format
from ..optim import LowPrecision
from ..policy import Policy
from ..quantizer import Quantizer
from ..random import Key

ROLES = ("weight", "activation", "gradient", "weight_gradient")
_POLICY_KEYS = (*ROLES, "accumulate", "include", "exclude")
_QUANTIZER_KEYS = ("format", "rounding", "overflow", "scaling")
_OPTIMIZER_OPTIONS = {
    name: option
    for name, option in inspect.signature(LowPrecision).parameters.items()
    if name not in ("optimizer", "key")  # what a run gives
}
_STATES = ((), ("momentum_buffer",), ("exp_avg", "exp_avg_sq"))  # by how many there are
_FILE_TYPES = (".toml", ".yaml", ".yml")


@dataclass(frozen=True)
class Strategy:
    """One way to train in low precision.

    Attributes:
        name: What tables and figures call it.
        policy: Roles of ``fpemu.Policy`` (``weight``, ``activation``, ``gradient``, ``weight_gradient``,
            ``accumulate``, ``include``, ``exclude``). A role is a format name or a mapping with ``format``
            and, as in ``fpemu.Quantizer``, ``rounding``, ``overflow`` and ``scaling``. ``accumulate`` is a
            format name or a mapping with ``accumulate`` and other fields of ``fpemu.Accumulator``. Empty:
            nothing is rounded.
        optimizer: Options of ``fpemu.optim.LowPrecision`` (``weight``, ``state``, ``rounding``, ``master``,
            ``kahan`` ...), formats as in roles; ``state`` may be a mapping of its names to them. ``None``:
            the plain FP32 optimizer.
        loss_scale: ``None``, a positive number, or ``"dynamic"`` for torch's GradScaler.
        statistics: Mean and variance of batch normalization: a batch's before they normalize it, the running
            ones, made of those, after each step; given as a role is, without ``scaling``. ``None``: FP32.

    Raises:
        ValueError: a key, format, rounding or scale that does not exist, or options that do not go together.
        TypeError: a value of the wrong kind.

    Example:
        >>> Strategy("mine", policy={"gradient": "e5m2"}, optimizer={"weight": "fp16"}).gradient_format.name
        'e5m2'
    """

    name: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    statistics: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"a strategy needs a name, got {self.name!r}; give it a short string")
        where = f"strategy {self.name!r}"
        _check_keys(self.policy, _POLICY_KEYS, f"policy of {where}")
        for role in ROLES:
            _check_role(self.policy.get(role), f"policy.{role} of {where}")
        _check_patterns(self.policy, where)
        _check_accumulator(self.policy.get("accumulate"), where)
        if self.optimizer is not None:
            _check_optimizer(self.optimizer, where)
        _check_loss_scale(self.loss_scale, where)
        _check_role(self.statistics, f"statistics of {where}")
        if isinstance(self.statistics, Mapping) and self.statistics.get("scaling") is not None:
            raise ValueError(f"statistics of {where} are kept unscaled; leave scaling out")

    @property
    def roles(self) -> dict[str, Any]:
        """The roles that the policy rounds, with what they are rounded to."""
        return {role: self.policy[role] for role in ROLES if self.policy.get(role) is not None}

    @property
    def gradient_format(self) -> Any:
        """The ``Format`` of activation gradients, ``None`` where they stay FP32."""
        role = self.roles.get("gradient")
        return None if role is None else as_format(_format_name(role))

    def bits_per_parameter(self, states: int) -> int:
        """Bits that one parameter needs for its weight, copies, optimizer state and gradient.

        Args:
            states: Values that the optimizer keeps for each parameter: 1 with momentum, 2 of Adam.

        Returns:
            The bits, scales of scaled tensors not counted.

        Example:
            >>> [STRATEGIES[name].bits_per_parameter(0) for name in ("fp32", "mixed", "fp16-nearest")]
            [64, 64, 32]
        """
        optimizer = self.optimizer or {}
        kept, cast = _bits(optimizer.get("weight")), self.roles.get("weight")
        master = optimizer.get("weight") is not None and optimizer.get("master", False)
        return (
            kept
            + (_bits(cast) if cast is not None and not master else 0)
            + (32 if master else 0)
            + (kept if optimizer.get("kahan", False) else 0)
            + sum(_bits(_state_role(optimizer.get("state"), name)) for name in _STATES[states])
            + _bits(optimizer.get("gradient", self.roles.get("weight_gradient")))
        )

    def around(self, optimizer: torch.optim.Optimizer, key: Key) -> torch.optim.Optimizer:
        """The optimizer as the strategy keeps weights and state; without options as it is."""
        return (
            optimizer
            if self.optimizer is None
            else LowPrecision(optimizer, **_options(self.optimizer), key=key)
        )

    def as_dict(self) -> dict[str, Any]:
        """The strategy as a file of the user's would hold it."""
        return asdict(self)


def _format_name(role: Any) -> Any:
    return role["format"] if isinstance(role, Mapping) else role


def _bits(role: Any) -> int:
    return 32 if role is None else as_format(_format_name(role)).bits


def _check_keys(mapping: Any, allowed: Iterable[str], where: str) -> None:
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{where} must be a table of {', '.join(allowed)}, got {mapping!r}")
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"unknown key {key!r} in {where}; choose from {', '.join(allowed)}")


def _check_choice(value: Any, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise ValueError(f"unknown {where} {value!r}; choose from {', '.join(choices)}")


def _check_format(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{where} must be a format's name, got {value!r}; write fp16 or another name as text")
    try:
        as_format(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _check_role(role: Any, where: str) -> None:
    if role is None:
        return
    if not isinstance(role, Mapping):
        return _check_format(role, where)
    _check_keys(role, _QUANTIZER_KEYS, where)
    if "format" not in role:
        raise ValueError(f'{where} needs a format, got {dict(role)!r}; add format = "fp16" or another name')
    _check_format(role["format"], where)
    _check_choice(role.get("rounding", "nearest_even"), ROUNDINGS, f"rounding in {where}")
    _check_choice(role.get("overflow", "ieee"), OVERFLOWS, f"overflow in {where}")
    if role.get("scaling") not in (None, "tensor"):
        raise ValueError(f'unknown scaling {role["scaling"]!r} in {where}; choose "tensor" or leave it out')


def _check_patterns(policy: Mapping[str, Any], where: str) -> None:
    for key in ("include", "exclude"):
        value = policy.get(key, ())
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"policy.{key} of {where} must be a module name pattern or a list, got {value!r}")


def _check_accumulator(accumulate: Any, where: str) -> None:
    if accumulate is None:
        return
    try:
        Policy.from_dict({"accumulate": accumulate})
    except (TypeError, ValueError) as error:
        raise type(error)(f"policy.accumulate of {where}: {error}") from None


def _check_optimizer(optimizer: Any, where: str) -> None:
    _check_keys(optimizer, _OPTIMIZER_OPTIONS, f"optimizer of {where}")
    for key, value in optimizer.items():
        option = _OPTIMIZER_OPTIONS[key]
        if "Role" in str(option.annotation):
            named = value if key == "state" and _is_by_name(value) else {"": value}
            for name, role in named.items():
                _check_role(role, f"optimizer.{key}{name and f'.{name}'} of {where}")
        if isinstance(option.default, bool) and not isinstance(value, bool):
            raise TypeError(f"optimizer.{key} of {where} must be true or false, got {value!r}")
    try:  # what goes together only LowPrecision knows
        LowPrecision(torch.optim.SGD([torch.zeros(1)]), **_options(optimizer))
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer of {where}: {error}") from None


def _options(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {k: as_role(v) for k, v in value.items()} if _is_by_name(value) else as_role(value)
        for name, value in optimizer.items()
    }


def _is_by_name(value: Any) -> bool:
    """Whether it gives each name of state a role of its own."""
    return isinstance(value, Mapping) and "format" not in value


def _state_role(state: Any, name: str) -> Any:
    return state.get(name, state.get("*")) if _is_by_name(state) else state


def as_role(value: Any) -> Any:
    """A role as ``Policy`` and ``LowPrecision`` take it: a mapping becomes a Quantizer."""
    return Quantizer(**value) if isinstance(value, Mapping) else value


def _check_loss_scale(scale: Any, where: str) -> None:
    if scale is None or scale == "dynamic":
        return
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not (math.isfinite(scale) and scale > 0):
        raise ValueError(f'loss_scale of {where} must be a positive number or "dynamic", got {scale!r}')


def _everywhere(fmt: str, *roles: str) -> dict[str, str]:
    return dict.fromkeys(roles or ROLES[1:], fmt)


def _fp8(fmt: str) -> dict[str, str]:
    return {"format": fmt, "overflow": "saturate", "scaling": "tensor"}


_BUILT_IN = (
    Strategy("fp32"),
    # Weights are cast where they are used; the model's own FP32 weights are the master copy.
    Strategy("mixed", _everywhere("fp16", *ROLES), loss_scale="dynamic"),
    # No FP32 copy from here: the optimizer keeps the weights themselves in the format.
    Strategy("fp16-nearest", _everywhere("fp16"), {"weight": "fp16"}),
    Strategy("fp16-stochastic", _everywhere("fp16"), {"weight": "fp16", "rounding": "stochastic"}),
    Strategy("fp16-kahan", _everywhere("fp16"), {"weight": "fp16", "kahan": True}),
    Strategy("bf16-nearest", _everywhere("bf16"), {"weight": "bf16"}),
    Strategy("bf16-stochastic", _everywhere("bf16"), {"weight": "bf16", "rounding": "stochastic"}),
    # The usual FP8 recipe: weight gradients leave the matrix product in FP32 and meet FP32 weights.
    Strategy("fp8", {"weight": _fp8("e4m3fn"), "activation": _fp8("e4m3fn"), "gradient": _fp8("e5m2")}),
)
STRATEGIES = {strategy.name: strategy for strategy in _BUILT_IN}


def load_strategies(names: str | Iterable[str]) -> list[Strategy]:
    """The strategies that are named.

    Args:
        names: Names of built-in strategies and paths of TOML or YAML files, as a list or with commas between.
            A file holds the fields of one ``Strategy``; without a ``name`` it is called as the file is.

    Returns:
        The strategies, in that order.

    Raises:
        ValueError: an unknown name or key, a file that cannot be read, or a name that is taken twice.
        TypeError: a value of the wrong kind in a file.

    Example:
        >>> [strategy.name for strategy in load_strategies("fp32, fp16-nearest")]
        ['fp32', 'fp16-nearest']
    """
    asked = names.split(",") if isinstance(names, str) else list(names)
    strategies = [_load(name.strip()) for name in asked if name.strip()]
    check_names(strategies)
    return strategies


def check_names(strategies: list[Strategy]) -> None:
    """Refuse an empty list, and strategies that share a name."""
    if not strategies:
        raise ValueError(
            f"no strategy given; choose from {', '.join(STRATEGIES)} or name a .toml or .yaml file"
        )
    for i, strategy in enumerate(strategies):
        if strategy.name in [other.name for other in strategies[:i]]:
            raise ValueError(f"two strategies are called {strategy.name!r}; name each once, or rename one")


def _load(name: str) -> Strategy:
    if name in STRATEGIES:
        return STRATEGIES[name]
    path = Path(name)
    if path.suffix.lower() not in _FILE_TYPES:
        raise ValueError(
            f"unknown strategy {name!r}; choose from {', '.join(STRATEGIES)} or name a .toml or .yaml file"
        )
    content = _read(path)
    _check_keys(content, [item.name for item in fields(Strategy)], f"strategy file {name}")
    try:
        return Strategy(**{"name": path.stem, **content})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _read(path: Path) -> Any:
    try:
        return read_mapping(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read strategy file {path}: {reason}") from None
    except ValueError as error:
        raise ValueError(f"strategy file {error}") from None
