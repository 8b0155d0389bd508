"""Where rounding happens: a module and a role, with a Quantizer, random words and a tally of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..accumulation import spec_of
from ..autograd import key_tensor, new_tally, round_with_gradient
from ..kernels.layout import SUMS
from ..matmul import Accumulator
from ..quantizer import Quantizer
from ..random import Key
from ..stats import Tally

Inputs = tuple[str | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Inputs = (None, None, None, None)
_STEP = key_tensor(Key(0, step=1))


class Site:
    """One place where rounding happens: its Quantizer, its random words and its tally."""

    def __init__(self, quantizer: Quantizer, key: Key, count: bool = True) -> None:
        self.quantizer = quantizer
        self.counts_on = count or quantizer.scaling == "delayed"  # whose history lies by the sums
        # Sums of gradients, rounded again, must not draw the words that their last summand drew.
        stochastic = quantizer.stochastic
        self.key = key_tensor(key) if stochastic else None
        self.sum_key = key_tensor(key.fold_in("sum")) if stochastic else None
        self.counts, self.sums = new_tally(quantizer)

    def inputs(self, device: torch.device, axis: int | None = None) -> Inputs:
        """What the operator takes for a tensor on that device; counting goes on there, without waiting.

        ``axis``: along which blocks run; None: as the format has it.
        """
        spec = self.quantizer.spec if axis is None else self.quantizer.along(axis).spec
        if not self.counts_on:
            return spec, self.key, None, None
        if self.counts.device != device:
            self.counts, self.sums = self.counts.to(device), self.sums.to(device)
        return spec, self.key, self.counts, self.sums

    def next_step(self) -> None:
        """Draw new words from here on; what is already in a graph keeps its key. Note a step's amax."""
        if self.quantizer.scaling == "delayed":
            self.sums[SUMS:] = torch.cat([self.sums.new_zeros(1), self.sums[SUMS:-1]])
        for name in ("key", "sum_key"):
            key = getattr(self, name)
            if key is not None:
                setattr(self, name, key + _STEP)

    def tally(self) -> Tally:
        """A copy of the counts so far."""
        # A scaled tensor's format moves with its scale, so only the counts are of the format's name.
        counts, sums = (part.cpu().numpy().copy() for part in (self.counts, self.sums))
        return Tally(counts, sums[:SUMS], self.quantizer.format)

    def state_dict(self) -> dict[str, Tensor | None]:
        """Copies of what steps and counting change."""
        return {name: None if x is None else x.clone() for name, x in self._state().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor | None]) -> None:
        """Go on where `state_dict` was taken."""
        for name, x in self._state().items():
            saved = state_dict[name]
            if (x is None) != (saved is None):
                raise ValueError("load_state_dict needs a state_dict of the same rounding, got another one's")
            setattr(self, name, None if x is None or saved is None else saved.to(x.device, copy=True))

    def _state(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ("key", "sum_key", "counts", "sums")}

    @property
    def changes(self) -> bool:
        """Whether a new step changes it."""
        return self.key is not None or self.quantizer.scaling == "delayed"


class Sums:
    """How a module's matrix products are rounded as they accumulate, and their random words."""

    def __init__(self, how: Accumulator, key: Key) -> None:
        self.spec = spec_of(how)
        self.key = key_tensor(key) if how.rounding == "stochastic" else None

    def next_step(self) -> None:
        """Draw new words from here on."""
        if self.key is not None:
            self.key = self.key + _STEP


def cast_at(x: Tensor, forward: Site | None, backward: Site | None, axis: int | None = None) -> Tensor:
    """``x`` rounded at one site, and its gradient at another; None leaves that direction alone.

    ``axis``: along which the blocks of a block format run; None: as the format has it.
    """
    if forward is None and backward is None:
        return x
    directions = (NOTHING if site is None else site.inputs(x.device, axis) for site in (forward, backward))
    value, gradient = directions
    return round_with_gradient(x, *value, *gradient)
