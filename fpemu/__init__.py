"""Emulate floating-point formats, put them into a PyTorch model, and see what is lost."""

from typing import Any

from .arithmetic import dot, is_representable, next_down, next_up, sum, ulp
from .block_codes import Blocks, decode_blocks, encode_blocks
from .blocks import BlockFormat, as_block_format
from .codes import decode, encode, pack, unpack
from .formats import Format, as_format
from .matmul import Accumulator, matmul
from .quantize import quantize
from .random import Key
from .rotation import hadamard
from .stats import Tally, tally

__all__ = [
    "Accumulator",
    "BlockFormat",
    "Blocks",
    "Emulation",
    "Format",
    "Key",
    "LowPrecision",
    "Policy",
    "Quantizer",
    "Recorder",
    "Records",
    "Tally",
    "accumulation",
    "as_block_format",
    "as_format",
    "cast",
    "comm",
    "decode",
    "decode_blocks",
    "dot",
    "emulate",
    "encode",
    "encode_blocks",
    "hadamard",
    "is_representable",
    "load",
    "matmul",
    "next_down",
    "next_up",
    "observe",
    "optim",
    "pack",
    "plot",
    "quantize",
    "scaling",
    "sum",
    "tally",
    "ulp",
    "unpack",
    "updates",
]

__version__ = "0.1.0"

# Names that need torch load it on first use.
_LAZY = {
    "cast": "autograd",
    "Quantizer": "quantizer",
    "Policy": "policy",
    "Emulation": "emulation",
    "emulate": "emulation",
    "LowPrecision": "optim",
    "Recorder": "record",
    "Records": "records",
    "load": "records",
    "observe": "observation",
}
_MODULES = (
    "accumulation",
    "comm",
    "export",
    "optim",
    "plot",
    "report",
    "scaling",
    "testing",
    "updates",
)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module 'fpemu' has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value
