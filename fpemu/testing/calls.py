"""Calls of a quantizer that is checked, whose results may be of any kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import is_tensor
from ..formats import as_format

Floats = npt.NDArray[np.float64]
Quantizer = Callable[..., Any]


def call(quantizer: Quantizer, x: npt.NDArray[np.float32], *key: int) -> Floats:
    """What the quantizer makes of a copy of ``x``."""
    with np.errstate(all="ignore"):  # overflow, signalling NaNs: the input is meant to be hard
        return as_float64(quantizer(x.copy(), *key), x.size)


def as_float64(result: Any, size: int) -> Floats:
    """A quantizer's result, checked, as float64."""
    if not is_tensor(result) and not isinstance(result, np.ndarray):
        raise TypeError(
            f"the quantizer must return a numpy array or a torch tensor, got {type(result).__name__}"
        )
    try:
        as_format(result.dtype)
    except TypeError:
        raise TypeError(
            f"the quantizer must return floating numbers that float64 holds, got dtype {result.dtype}; "
            "decode codes and scale integers first"
        ) from None
    if tuple(result.shape) != (size,):
        raise ValueError(
            f"the quantizer must return one number for each input, shape ({size},), got shape "
            f"{tuple(result.shape)}"
        )
    if is_tensor(result):
        import torch

        result = result.detach().cpu().to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.asarray(result).astype(np.float64)


def takes_key(quantizer: Quantizer) -> bool:
    """Whether a second positional parameter waits for a key; one with a default is an option."""
    try:
        parameters = inspect.signature(quantizer).parameters.values()
    except (TypeError, ValueError):  # some compiled functions do not say
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name == "key" for p in positional[1:2])


def differ(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    """Where two arrays have other bits; NaN is NaN."""
    return (a.view(np.uint64) != b.view(np.uint64)) & ~(np.isnan(a) & np.isnan(b))
