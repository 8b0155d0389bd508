"""Activation checkpoints of bare functions: their recomputation must run under the mode, as the forward did.

A checkpointed module brings its hooks with it. A checkpointed function that multiplies does not: what torch
keeps to run again is wrapped, at the first product inside, to run in the frames it ran in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

DEEPEST = 100  # Python frames between a product and the checkpoint around it, at most


class Again:
    """A function that runs in the module frames it first ran in, their parameters rounded as they were."""

    def __init__(self, function: Callable[..., Any], mode: Any, frames: list[Any]) -> None:
        self.function, self.mode, self.frames = function, mode, frames

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        if self.mode.frames:
            return self.function(*args, **kwargs)
        try:
            for frame in self.frames:
                frame.hooks.before(frame.module, ())
            return self.function(*args, **kwargs)
        finally:
            for frame in reversed(self.frames):
                frame.hooks.restore(frame.module)


def region() -> Any:
    """The checkpoint without reentry that code runs in now, None outside."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        return None
    return hooks[0]


def remember(mode: Any) -> None:
    """Have a checkpoint that code runs in now recompute under the mode."""
    inside = region()
    frame = mode.frames[-1]
    if inside is not None and frame.region is not inside:
        names = inside.__code__.co_freevars
        kept = inside.__closure__[names.index("frame")].cell_contents
        kept.recompute_fn = _again(
            kept.recompute_fn, mode, [f for f in mode.frames if f.region is not inside]
        )
    elif frame.grad and not torch.is_grad_enabled():
        context = _reentrant()
        if context is not None:
            context.run_function = _again(context.run_function, mode, list(mode.frames))


def _again(function: Callable[..., Any], mode: Any, frames: list[Any]) -> Callable[..., Any]:
    return function if isinstance(function, Again) else Again(function, mode, frames)


def _reentrant() -> Any:
    """The context of the innermost reentrant checkpoint that runs now, None outside."""
    frame = sys._getframe(1)
    for _ in range(DEEPEST):
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            return frame.f_locals["ctx"]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
