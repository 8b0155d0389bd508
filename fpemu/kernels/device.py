"""From torch CUDA tensors to kernels: streams, pieces, and what is kept on the device.

Nothing here waits for the device: kernels go to torch's current stream, and results stay where they are.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ..formats import Format
from ..random import MASK, Key
from .layout import AMAX, COUNT, ERRORS, SQUARES
from .rules import Plan, tally_words


def check() -> None:
    """Refuse a CUDA tensor where the kernels cannot be compiled.

    Raises:
        RuntimeError: numba-cuda is not installed.
    """
    # Once a kernel was loaded the search, too slow for each call, is over.
    if "numba_cuda" not in sys.modules and find_spec("numba_cuda") is None:
        raise RuntimeError(
            "CUDA tensors need numba-cuda: pip install 'fpemu[cuda13]', or 'fpemu[cuda12]' for CUDA 12; or "
            "move the tensor to the CPU"
        )


def round_tensor(x: Any, out: Any, plan: Plan, key: Key | None) -> None:
    """Round a contiguous CUDA tensor of the plan's carrier to another, which may be the same."""
    if x.numel() == 0:
        return
    bits, pair = (torch.uint32, torch.uint64) if plan.words.itemsize == 4 else (torch.uint64, torch.uint64)
    with torch.cuda.device(x.device):
        addresses = (x.data_ptr(), out.data_ptr())
        views = x.view(-1).view(bits), out.view(-1).view(bits)
        round_bits(*views, addresses, pair, plan, _on_device(plan.words, x.device), key, _stream(x.device))


def round_bits(
    x: Any,
    out: Any,
    addresses: tuple[int, int],
    pair: Any,
    plan: Plan,
    words: Any,
    key: Key | None,
    stream: Any = 0,
) -> None:
    """Launch what rounds 1-d arrays of bits: whole aligned blocks in pairs, what is left one by one.

    Args:
        x: uint32, or uint64 for float64; a torch CUDA tensor, or what the simulator takes.
        out: The same.
        addresses: Of both.
        pair: The arrays' name for uint64.
        plan: How to round.
        words: The plan's words, where the kernels can read them.
        key: Random words, or None.
        stream: As numba takes it.
    """
    from . import cuda

    kernels = cuda.KERNELS[plan.loop]
    n, block = len(x), cuda.BLOCK
    drawn = () if key is None else (key.step & MASK, key.step >> 32, key.seed, key.stream)
    offset = 0 if key is None else key.offset
    head, whole = -offset % block, 0
    if kernels.whole is not None and all((address + 4 * head) % 8 == 0 for address in addresses):
        whole = max(n - head, 0) // block
    ends = [(0, n)]
    if whole:
        last = head + whole * block
        ends = [(0, head), (last, n)]
        at = () if key is None else (offset + head, *drawn)
        piece = slice(head, last)
        kernels.whole[whole, cuda.THREADS, stream](x[piece].view(pair), out[piece].view(pair), words, *at)
    for start, stop in ends:
        if start < stop:
            at = () if key is None else (offset + start, *drawn)
            first = (offset + start) // block
            blocks = -(-(offset + stop) // block) - first
            kernels.guarded[blocks, cuda.THREADS, stream](x[start:stop], out[start:stop], words, *at)


def encode_tensor(x: Any, codes: Any, plan: Plan) -> None:
    """Codes of a contiguous CUDA tensor of values of the plan's format."""
    if x.numel() == 0:
        return
    from . import cuda

    width = plan.words.itemsize
    kernel = cuda.KERNELS["encode" if width == 4 else "encode64"].guarded
    with torch.cuda.device(x.device):
        bits = x.view(-1).view(torch.uint32 if width == 4 else torch.uint64)
        blocks = -(-x.numel() // cuda.BLOCK)
        words = _on_device(plan.words, x.device)
        kernel[blocks, cuda.THREADS, _stream(x.device)](bits, codes.view(-1), words)


def tally_tensor(x: Any, q: Any, fmt: Format | None, carrier: Format, counts: Any, sums: Any) -> None:
    """Add what a contiguous CUDA tensor, rounded to another, comes to, to counts and sums on its device."""
    counts[COUNT] += x.numel()
    if x.numel() == 0:
        return
    from . import cuda

    words = tally_words(fmt, carrier)
    kernel, bits = (cuda.TALLY, torch.uint32) if words.itemsize == 4 else (cuda.TALLY64, torch.uint64)
    blocks = min(cuda.TALLY_BLOCKS, -(-x.numel() // cuda.BLOCK))
    with torch.cuda.device(x.device):
        parts = torch.empty((blocks, 3), dtype=torch.float64, device=x.device)
        kernel[blocks, cuda.THREADS, _stream(x.device)](
            x.view(-1).view(bits), q.view(-1).view(bits), _on_device(words, x.device), counts, parts
        )
    sums[SQUARES] += parts[:, 0].sum()
    sums[ERRORS] += parts[:, 1].sum()
    sums[AMAX] = torch.maximum(sums[AMAX], parts[:, 2].max())


def _stream(device: Any) -> Any:
    from numba import cuda

    return cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)


def _on_device(words: Any, device: Any) -> Any:
    return _kept(words.tobytes(), words.dtype.str, device)


@lru_cache(maxsize=4096)
def _kept(content: bytes, dtype: str, device: Any) -> Any:
    """Words on the device, copied there once: a copy would not be allowed while a graph is captured."""
    bits = {"<u4": torch.uint32, "<u8": torch.uint64}[dtype]
    return torch.from_numpy(np.frombuffer(content, dtype).copy()).view(bits).to(device)
