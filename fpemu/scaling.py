"""Loss scaling: by which power of two gradients fit a format, and a scaler that says why it gave up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from .formats import Format, as_format
from .stats import Tally

EXPONENTS = range(-64, 65)  # of the scales that `window` looks at


@dataclass(frozen=True)
class Window:
    """The scales that keep the numbers of a tally in a format.

    Attributes:
        fmt: The format.
        lost: By exponent of the scale, the share of nonzero values that become zero; exact.
        lowest: Smallest scale, a power of two, at which no more is lost than is tolerated; None if there is
            none up to 2**64.
        highest: Largest scale at which nothing overflows; None if there is none down to 2**-64, or no value.
    """

    fmt: Format
    lost: Mapping[int, float]
    lowest: float | None
    highest: float | None

    @property
    def empty(self) -> bool:
        """Whether every scale meets one of the two cliffs."""
        return self.lowest is None or self.highest is None or self.lowest > self.highest

    def __str__(self) -> str:
        if self.empty:
            low, high = _power(self.lowest), _power(self.highest)
            return f"{self.fmt}: no scale; few are lost only from {low}, and nothing overflows up to {high}"
        return f"{self.fmt}: scales {_power(self.lowest)} to {_power(self.highest)}"


def _power(scale: float | None) -> str:
    return "none" if scale is None else f"2**{math.frexp(scale)[1] - 1}"


def window(tally: Tally, fmt: str | Format, tolerance: float = 0.0) -> Window:
    """The range of loss scales in which the values of a tally neither vanish nor overflow in a format.

    Args:
        tally: Of unscaled gradients; any format, or none, may have been counted.
        fmt: Signed format with a zero, or its name.
        tolerance: Share of the nonzero values that may become zero, 0 to 1.

    Returns:
        A Window, of nearest_even rounding.

    Raises:
        ValueError: ``tolerance`` is out of range, or the format has no zero or no sign.

    Example:
        >>> import numpy as np
        >>> from fpemu import tally
        >>> print(window(tally(np.float32([2**-30, 1.0])), "fp16"))
        binary16: scales 2**6 to 2**15
    """
    fmt = as_format(fmt)
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance must be a share from 0 to 1, got {tolerance!r}")
    lost = {exponent: tally.lost(fmt, 2.0**exponent) for exponent in EXPONENTS}
    lowest = next((2.0**e for e in EXPONENTS if lost[e] <= tolerance), None)
    fits = [2.0**e for e in EXPONENTS if 0 < tally.amax and tally.amax * 2.0**e < _overflow(fmt)]
    return Window(fmt, lost, lowest, fits[-1] if fits else None)


def _overflow(fmt: Format) -> float:
    """The least magnitude that rounds to nearest past the largest value: half an ulp above it."""
    ulp = math.ldexp(1.0, fmt.emax - fmt.precision + 1)
    # Where the next value would be odd, the tie stays; see `quantize` on e4m3fn's 464.
    odd = math.frexp(fmt.max)[0] * 2**fmt.precision % 2 == 1
    tie = fmt.max + ulp / 2
    return tie if odd else math.nextafter(tie, math.inf)


class Collapse(RuntimeError):
    """A loss scale that backing off did not save."""


class LossScaler(GradScaler):
    """torch.amp.GradScaler with bounds, that stops with a diagnosis instead of scaling to nothing.

    As torch's: ``scale(loss).backward()``, ``step(optimizer)``, ``update()``. To clip norms, first
    ``unscale_(optimizer)``, then clip, then ``step``: a norm of scaled gradients is ``scale`` times as large.
    Float16 gradients are not unscaled in place, where the small ones would become zero again: an optimizer
    with ``fused=True`` unscales inside its update, and ``clip_grad_norm_`` clips them scaled.

    Args:
        scale: The scale to begin with.
        dynamic: Whether skipped steps lower it and others raise it; if not, it stays.
        growth_factor: By which it rises after ``growth_interval`` steps without a skip.
        backoff_factor: By which it falls after a skipped step.
        growth_interval: Steps.
        floor: It never falls below; or a function of the number of steps that tells.
        ceiling: It never rises above.
        patience: Skipped steps in a row at which `update` raises.
        emulation: The `Emulation` of the model, or anything with ``tallies()``: names what overflowed first.
        device: ``"cpu"`` or ``"cuda"``, by default what is there.

    Raises:
        ValueError: bounds that exclude each other or the scale, or factors that do not rise and fall.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer, scaler = torch.optim.SGD([w], lr=0.5), LossScaler(8.0, device="cpu")
        >>> scaler.scale(w.sum()).backward()
        >>> w.grad.tolist()
        [8.0, 8.0]
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> w.tolist(), scaler.skipped
        ([0.5, 0.5], 0)
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        floor: float | Callable[[int], float] = 1.0,
        ceiling: float = 2.0**24,
        patience: int = 20,
        emulation: Any = None,
        device: str | None = None,
    ) -> None:
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"growth_factor must be above 1 and backoff_factor between 0 and 1, got {growth_factor!r} "
                f"and {backoff_factor!r}"
            )
        if patience < 1:
            raise ValueError(f"patience must be at least 1 skipped step, got {patience!r}")
        self.floor, self.ceiling, self.dynamic = floor, ceiling, dynamic
        self.patience, self.emulation = patience, emulation
        self.steps, self.skipped, self.skipped_in_a_row = 0, 0, 0
        self._before: dict[tuple[str, str], Tally] = {}
        if not 0 < self._lowest() <= scale <= ceiling:
            raise ValueError(
                f"the scale must lie between floor and ceiling, got floor {self._lowest():g}, "
                f"scale {scale:g}, ceiling {ceiling:g}"
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, scale, growth_factor, backoff_factor, growth_interval)

    def _lowest(self) -> float:
        return float(self.floor(self.steps) if callable(self.floor) else self.floor)

    def follow(self, tally: Tally, fmt: str | Format) -> float:
        """Set the scale to the largest that keeps a tally's values in a format; within the bounds.

        Args:
            tally: Of unscaled gradients.
            fmt: The format they are rounded to when scaled.

        Returns:
            The new scale.
        """
        highest = window(tally, fmt).highest
        if highest is not None:
            self._set(min(max(highest, self._lowest()), self.ceiling))
        return float(self.get_scale())

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, in place, as torch does.

        Raises:
            ValueError: a gradient is float16.
        """
        if any(gradient.dtype == torch.float16 for gradient in _gradients(optimizer)):
            raise ValueError(
                "float16 gradients are not unscaled in place: what scaling saved would become zero again. "
                "Make the optimizer with fused=True, which unscales inside its update, and clip with the "
                "scaler's clip_grad_norm_; or keep float32 parameters and round them with LowPrecision"
            )
        super().unscale_(optimizer)

    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the norm of all gradients of an optimizer, scaled or not.

        Args:
            optimizer: Whose gradients; they stay scaled if they are.
            max_norm: Largest Euclidean norm of the unscaled gradients.

        Returns:
            That norm before, float32, infinite or NaN if a gradient is; then nothing is changed, and `step`
            will skip.

        Raises:
            ValueError: ``max_norm`` is not above zero.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {max_norm!r}")
        scaled = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        scale = self.get_scale() if scaled else 1.0
        gradients = _gradients(optimizer)
        # Squares of float16 numbers overflow from 256 on.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / scale if norms else torch.zeros(())
        if torch.isfinite(norm) and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm.to(gradient.device))
        return norm

    def _set(self, scale: float) -> None:
        self._init_scale = scale
        if self._scale is not None:
            self._scale.fill_(scale)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """After the steps of an iteration: lower the scale if one was skipped, raise it in time.

        Without a step since the last update, as after an iteration left out by hand, nothing happens.

        Args:
            new_scale: A scale to set instead.

        Raises:
            Collapse: ``patience`` steps in a row were skipped, or one at the lowest scale.
        """
        found = [
            value
            for state in self._per_optimizer_states.values()
            for value in state["found_inf_per_device"].values()
        ]
        if not found and new_scale is None:
            return
        skipped = any(float(value) > 0 for value in found)
        used = float(self.get_scale())
        keep = None if self.dynamic else used
        super().update(keep if new_scale is None else new_scale)
        self.steps += 1
        if self._scale is not None:
            self._scale.clamp_(self._lowest(), self.ceiling)
        if not skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        at_floor = self.dynamic and used <= self._lowest()
        if at_floor or self.skipped_in_a_row >= self.patience:
            why = f"at the lowest scale, {used:g}" if at_floor else f"{self.skipped_in_a_row} in a row"
            raise Collapse(f"step {self.steps} was skipped, {why}; {self.diagnosis()}")
        if self.skipped_in_a_row == 1:
            self._before = {} if self.emulation is None else self.emulation.tallies()

    def diagnosis(self) -> str:
        """Where the first infinity or NaN since the first of the skipped steps came from."""
        if self.emulation is None:
            return "give the scaler emulation= to learn where infinities come from"
        tallies = self.emulation.tallies()
        grown = [
            where for where, tally in tallies.items() if _bad(tally) > _bad(self._before.get(where, Tally()))
        ]
        forward = [where for where in grown if where[1] in ("input", "weight", "activation")]
        backward = [where for where in reversed(grown) if where not in forward]
        if not grown:
            return "no rounding gave infinities or NaNs: the loss, or the model without rounding, did"
        name, role = where = (*forward, *backward)[0]
        tally, before = tallies[where], self._before.get(where, Tally())
        overflows, nans, count = (
            getattr(tally, what) - getattr(before, what) for what in ("overflow", "nan", "count")
        )
        return (
            f"the {role} of {name or '(model)'} is the first that overflows or is infinite or NaN: "
            f"{overflows} overflows and {nans} NaNs in {count} elements of {tally.fmt}, largest finite "
            f"magnitude {tally.amax:.3g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's, and the counts of steps."""
        mine = {"steps": self.steps, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return super().state_dict() | mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        state = dict(state_dict)
        for name in ("steps", "skipped", "skipped_in_a_row"):
            setattr(self, name, state.pop(name))
        super().load_state_dict(state)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _bad(tally: Tally) -> int:
    return tally.overflow + tally.nan + tally.positive_infinity + tally.negative_infinity
