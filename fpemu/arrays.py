"""The arrays that fpemu takes: numpy's and torch's, of four dtypes, and what those can hold."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from .formats import BFLOAT16, BINARY16, BINARY32, BINARY64, Format

CARRIERS = {"float32": BINARY32, "float64": BINARY64, "float16": BINARY16, "bfloat16": BFLOAT16}


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_array(x: Any) -> Any:
    """``x``; a numpy scalar as a 0-d array, another library's CUDA array as a tensor on its memory."""
    if isinstance(x, np.generic):
        return np.asarray(x)
    if isinstance(x, np.ndarray) or is_tensor(x) or not hasattr(x, "__cuda_array_interface__"):
        return x
    import torch

    return torch.as_tensor(x, device="cuda")


def carrier_of(x: Any, name: str = "x") -> Format:
    """The format that the elements of an array are stored in.

    Raises:
        TypeError: it is no plain, dense numpy array or torch tensor of a dtype in CARRIERS, CPU or CUDA.
        RuntimeError: a CUDA tensor, and numba-cuda is missing.
    """
    if isinstance(x, np.ndarray):
        return _numpy_carrier(x, name)
    if is_tensor(x):
        return _torch_carrier(x, name)
    raise TypeError(f"{name} must be a numpy array or a torch tensor, got {type(x).__name__}")


def _numpy_carrier(x: npt.NDArray[Any], name: str) -> Format:
    carrier = CARRIERS.get(x.dtype.name)
    if carrier is None or not x.dtype.isnative or isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be an array of {', '.join(CARRIERS)} in native byte order, got {type(x).__name__} "
            f"of {x.dtype}; cast first ({name}.astype('float32')), and mind that a cast down rounds once "
            "before fpemu does"
        )
    return carrier


def _torch_carrier(x: Any, name: str) -> Format:
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{name} must be a plain torch tensor, got {type(x).__name__}; unwrap it first "
            "(a DTensor: to_local())"
        )
    if x.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got layout {x.layout}; round {name}.values() instead"
        )
    carrier = _TORCH.get(x.dtype) if _TORCH else _torch_dtypes().get(x.dtype)
    if carrier is None:
        raise TypeError(
            f"{name} must be of {', '.join(CARRIERS)}, got {x.dtype}; cast first ({name}.float()), and mind "
            "that a cast down rounds once before fpemu does"
        )
    if x.is_cuda:
        from .kernels import device

        device.check()
    elif x.device.type != "cpu":
        raise TypeError(
            f"{name} must be on the CPU or a CUDA device, got a tensor on {x.device}; move it first "
            f"({name}.cpu())"
        )
    return carrier


_TORCH: dict[Any, Format] = {}  # no functools.cache: torch.compile warns of those, and traces through


def _torch_dtypes() -> dict[Any, Format]:
    import torch

    _TORCH.update({getattr(torch, name): carrier for name, carrier in CARRIERS.items()})
    return _TORCH
