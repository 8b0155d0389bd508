"""Tensors in what modules take and return: which can be rounded, and how to reach them in containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def unsuitable(x: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> str | None:
    """Why a tensor of other dtypes, or not plain, cannot be rounded or counted.

    None if it can, an empty reason if its numbers are no floats.
    """
    if not x.is_floating_point() and not x.is_complex():
        return ""
    if type(x) not in (Tensor, nn.Parameter) and not isinstance(x, torch._subclasses.FakeTensor):
        return f"a {type(x).__name__} is not a plain tensor"
    if x.layout != torch.strided or x.is_nested:
        return "it is nested" if x.is_nested else f"layout {x.layout}"
    return None if x.dtype in dtypes else f"dtype {x.dtype}"


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, other: Callable[[Any], None]) -> Any:
    """``tree`` with every tensor in it replaced, in any containers; ``other`` is told of other leaves."""
    if isinstance(tree, Tensor):
        return function(tree)
    # torch.compile follows these, and not what comes after for tuples made within.
    if type(tree) in (tuple, list):
        return type(tree)([map_tensors(function, leaf, other) for leaf in tree])
    if type(tree) is dict:
        return {key: map_tensors(function, leaf, other) for key, leaf in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                value = map_tensors(function, getattr(tree, field.name), other)
                object.__setattr__(changed, field.name, value)
        return changed
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if structure.is_leaf():
        other(tree)
        return tree
    return pytree.tree_unflatten([map_tensors(function, leaf, other) for leaf in leaves], structure)
