"""Which modules a pattern means: a name, a type, a function, the first or the last layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parameter import UninitializedParameter

ENDS = (":first", ":last")
Pattern = str | type | Callable[[str, nn.Module], bool]
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in what torch.compile, DistributedDataParallel or DataParallel made of it."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def compile_anew(model: nn.Module) -> None:
    """Forget what was compiled of a model: hooks added or removed later would go unseen."""
    if any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
        torch._dynamo.reset()


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """``named_modules``, whose names leave out what wraps a module; of wrapper and wrapped, the latter."""
    names = {}
    for name, module in model.named_modules():
        names[_without_wrappers(name)] = module
    return names


def bare_name(name: str) -> str:
    """The name of a module or parameter in the model itself, without what wraps that or a part of it."""
    name = _without_wrappers(name)
    while name.startswith("module."):  # of DistributedDataParallel
        name = name.removeprefix("module.")
    return name


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def as_patterns(value: Any, name: str) -> tuple[Pattern, ...]:
    """The patterns that an argument gives, checked."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, type, nn.Module))
    patterns = tuple(value) if several else (value,)
    for pattern in patterns:
        check_pattern(pattern, name, value)
    return patterns


def check_pattern(pattern: Any, name: str, value: Any) -> None:
    """Refuse what is no pattern."""
    if isinstance(pattern, nn.Module) or not (isinstance(pattern, (str, type)) or callable(pattern)):
        raise TypeError(
            f"{name} must be a module type, a pattern of names or a function of name and module, or several, "
            f"got {value!r}"
        )
    if isinstance(pattern, str) and pattern.startswith(":") and pattern not in ENDS:
        raise ValueError(f"unknown pattern {pattern!r}; choose from {', '.join(ENDS)}, or give names")


def matching(pattern: Pattern, modules: dict[str, nn.Module]) -> set[str]:
    """Names of the modules that a pattern matches, and of all that is in those."""
    if pattern in ENDS:
        layers = [name.partition(".parametrizations")[0] for name, m in modules.items() if has_matrix(m)]
        found = set(layers[:1] if pattern == ":first" else layers[-1:])
    else:
        found = {name for name, module in modules.items() if _matches(pattern, name, module)}
    if not found:
        some = [f"{name!r} ({type(module).__name__})" for name, module in modules.items()]
        more = f" and {len(some) - 8} more" if len(some) > 8 else ""
        raise ValueError(
            f"pattern {pattern!r} matches none of the {len(modules)} modules: {', '.join(some[:8])}{more}; "
            "patterns are module types, functions, or fnmatch patterns on these names"
        )
    if "" in found:
        return set(modules)
    return {name for name in modules if any(part in found for part in _prefixes(name))}


def has_matrix(module: nn.Module) -> bool:
    """Whether a module has a parameter of two dimensions or more, or one that is still to get its shape."""
    parameters = [p for p in module._parameters.values() if p is not None]
    return any(isinstance(p, UninitializedParameter) or p.dim() >= 2 for p in parameters)


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return isinstance(module, pattern) if isinstance(pattern, type) else bool(pattern(name, module))


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def written_pattern(pattern: Pattern) -> Any:
    """A pattern as files hold it."""
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, type):
        return {"type": f"{pattern.__module__}:{pattern.__qualname__}"}
    raise TypeError(
        f"a file cannot hold the function {getattr(pattern, '__name__', pattern)!r}; "
        "give names or types instead"
    )


def read_pattern(written: Any) -> Any:
    """The pattern that `written_pattern` wrote."""
    if not isinstance(written, Mapping):
        return written
    module, _, name = written["type"].partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
