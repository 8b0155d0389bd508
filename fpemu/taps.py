"""Taps: hooks that count what modules return and the gradients arriving there, and change neither.

The operator ``fpemu::tally`` counts one tensor for several formats; being an operator, it is still there in a
compiled model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import stats
from .arrays import CARRIERS, carrier_of
from .autograd import LIBRARY
from .emulation.tensors import map_tensors, unsuitable
from .formats import Format
from .kernels.layout import COUNTS, SUMS
from .quantize import round_tensor
from .quantizer import Quantizer, quantizer_of
from .stats import Tally

LIBRARY.define(
    "tally(Tensor x, str specs, Tensor(a!) counts, Tensor(b!) sums) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
DTYPES = tuple(getattr(torch, name) for name in CARRIERS)


def _tally(x: Tensor, specs: str, counts: Tensor, sums: Tensor) -> None:
    # float16 and bfloat16 are widened first, which is exact: they do not hold the values of other formats.
    wide = x if x.dtype == torch.float64 else x.float()
    for place, spec in enumerate(specs.split("\n")):
        rounded, fmt = wide, None
        if spec:
            quantizer = quantizer_of(spec)
            fmt = quantizer.format
            rounded = round_tensor(wide, quantizer.plan(carrier=carrier_of(wide)), None)
        stats.add(counts[place], sums[place], wide, rounded, fmt)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("tally", _tally, _device)


@torch.library.register_fake("fpemu::tally", lib=LIBRARY)
def _(x: Tensor, specs: str, counts: Tensor, sums: Tensor) -> None:
    return None


class _Watched(torch.autograd.Function):
    """The same numbers in a new tensor, whose gradient is counted.

    A new one: a view would break on an in-place module after it.
    """

    @staticmethod
    def forward(ctx, x, specs, counts, sums):  # type: ignore[no-untyped-def]
        ctx.inputs = specs, counts, sums
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        # torch.compile lets nothing be asked of a gradient, which is a plain tensor there.
        if torch.compiler.is_compiling() or uncountable(gradient) is None:
            torch.ops.fpemu.tally.default(gradient.detach(), *ctx.inputs)
        return gradient, None, None, None


class Counter:
    """Tallies of the numbers of one module and role, one for each format, or one without.

    Args:
        formats: Whose rounding is counted.
        device: Where counts begin; they follow the tensors.

    Attributes:
        left_alone: Why tensors were not counted.
    """

    def __init__(self, formats: tuple[Format, ...], device: torch.device | str = "cpu") -> None:
        self.formats = formats
        self.specs = "\n".join(Quantizer(fmt).spec for fmt in formats)
        rows = max(1, len(formats))
        with torch.inference_mode(False):
            self.counts = torch.zeros((rows, COUNTS), dtype=torch.int64, device=device)
            self.sums = torch.zeros((rows, SUMS), dtype=torch.float64, device=device)
        self.left_alone: set[str] = set()

    def add(self, x: Tensor) -> None:
        """Count a tensor, if it can be; it is neither changed nor kept."""
        reason = uncountable(x)
        if reason is not None:
            if reason:
                self.left_alone.add(reason)
            return
        torch.ops.fpemu.tally.default(x.detach(), *self.inputs(x.device))

    def inputs(self, device: torch.device) -> tuple[str, Tensor, Tensor]:
        """What the operator takes for a tensor on that device; counting goes on there, without waiting."""
        if self.counts.device != device:
            self.counts, self.sums = self.counts.to(device), self.sums.to(device)
        return self.specs, self.counts, self.sums

    @property
    def used(self) -> bool:
        """Whether something was counted since it was last taken."""
        return bool(self.counts[0, 0])


def take(counters: Sequence[Counter]) -> list[list[Tally]]:
    """The tallies of each counter since the last call; none of one that counted nothing.

    All counts of a device come in one copy: each would wait for the device.
    """
    taken: list[list[Tally]] = [[] for _ in counters]
    for device in {counter.counts.device for counter in counters}:
        here = [place for place, counter in enumerate(counters) if counter.counts.device == device]
        both = [[counters[place].counts for place in here], [counters[place].sums for place in here]]
        counts, sums = (torch.stack(parts).cpu().numpy() for parts in both)
        torch._foreach_zero_([*both[0], *both[1]])
        for row, place in enumerate(here):
            if counts[row, 0, 0]:
                formats = counters[place].formats or (None,)
                taken[place] = [Tally(counts[row, i], sums[row, i], fmt) for i, fmt in enumerate(formats)]
    return taken


def uncountable(x: Tensor) -> str | None:
    """Why a tensor cannot be counted: None if it can, an empty reason if its numbers are no floats."""
    reason = unsuitable(x, DTYPES)
    if reason is not None:
        return reason
    if x.device.type not in ("cpu", "cuda"):
        return f"device {x.device.type}"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "it is within a transform of torch.func"
    return None


class Switch:
    """Whether taps count now.

    Attributes:
        on: They do.
        inference: Also in forwards of a model in eval mode without gradients.
    """

    def __init__(self, inference: bool) -> None:
        self.on, self.inference = False, inference


class Tap:
    """The hooks of one module; a copy of the module has them too, but they count nothing."""

    def __init__(self, switch: Switch, activation: Counter, gradient: Counter) -> None:
        self.switch, self.activation, self.gradient = switch, activation, gradient

    def see(self, module: nn.Module, args: Any, output: Any) -> None:
        """As a forward hook: count what the module returns."""
        if not self.switch.on or not (self.switch.inference or module.training or torch.is_grad_enabled()):
            return
        # Within a backward pass runs the recomputation of a checkpoint, whose forward was counted.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        map_tensors(self._count, output, self._unopened)

    def tap(self, module: nn.Module, args: Any, output: Any) -> Any:
        """As a forward hook: have the gradients counted that arrive at what the module returns."""
        if not self.switch.on or not torch.is_grad_enabled():
            return output
        return map_tensors(self._watched, output, lambda leaf: None)

    def _count(self, x: Tensor) -> Tensor:
        self.activation.add(x)
        return x

    def _unopened(self, leaf: Any) -> None:
        if not isinstance(leaf, (type(None), bool, int, float, complex, str, bytes)):
            self.activation.left_alone.add(f"a {type(leaf).__name__} is not opened")

    def _watched(self, x: Tensor) -> Tensor:
        if not x.requires_grad or uncountable(x) is not None:
            return x
        return _Watched.apply(x, *self.gradient.inputs(x.device))

    def __getstate__(self) -> dict[str, Any]:
        return {"switch": Switch(False), "activation": None, "gradient": None}
