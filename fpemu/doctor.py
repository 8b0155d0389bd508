"""What is installed, and whether it works."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import numba
import numpy as np
import torch

from . import __version__
from .formats import as_format
from .kernels import launch
from .kernels.rules import plan
from .quantize import quantize
from .random import Key

PATTERNS = 2**20
CASES = (("fp16", "nearest_even"), ("bf16", "nearest_even"), ("e4m3fn", "to_odd"), ("e5m2", "stochastic"))


def lines() -> Iterator[tuple[str, str]]:
    """Name and text of each line of the report; what takes long comes when it is known."""
    yield "fpemu", __version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield (
        "packages",
        ", ".join(f"{name} {_version(name)}" for name in ("numpy", "numba", "torch", "numba-cuda")),
    )
    features = numba.core.codegen.get_host_cpu_features().split(",")
    known = [name for name in ("avx2", "avx512f", "f16c", "neon") if f"+{name}" in features]
    yield "CPU", f"{launch.threads()} threads; {' '.join(known) or 'no vector extension known here'}"
    yield "kernels", _compiles()
    yield "GPU", _gpus()
    if torch.cuda.is_available() and _version("numba-cuda") != "missing":
        yield "agreement", _agreement()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _compiles() -> str:
    x = np.array([0.1, 65520.0], np.float32)
    rounded = bool((quantize(x, "fp16") == np.array([0.0999755859375, np.inf], np.float32)).all())
    cpu = "compile for the CPU" if rounded else "WRONG on the CPU"
    if _version("numba-cuda") == "missing":
        return f"{cpu}; for CUDA install fpemu[cuda13] or fpemu[cuda12]"
    from numba import cuda, types

    from .kernels.cuda import KERNELS

    array = types.Array(types.uint32, 1, "C")
    loop = plan(as_format("fp16"), "nearest_even", "ieee").loop
    cuda.compile_ptx(KERNELS[loop].guarded.py_func, (array, array, array), cc=(9, 0))  # type: ignore[attr-defined]
    return f"{cpu}, and to PTX"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return f"none that torch sees (torch built for CUDA {torch.version.cuda or 'none'})"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _agreement() -> str:
    bits = np.random.default_rng(0).integers(0, 2**32, PATTERNS, np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    for fmt, rounding in CASES:
        key = Key(0) if rounding == "stochastic" else None
        there = quantize(x.cuda(), fmt, rounding, key=key).cpu()
        here = quantize(x, fmt, rounding, key=key)
        wrong = int((there.view(torch.int32) != here.view(torch.int32)).sum())
        if wrong:
            return f"WRONG: {fmt} {rounding} differs on {wrong} of {PATTERNS} patterns"
    return f"CPU and GPU give the same bits on {PATTERNS} patterns in {len(CASES)} ways of rounding"
