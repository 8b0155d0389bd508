"""Batch normalization whose statistics may be rounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import Key, Quantizer, cast


class BatchNorm2d(nn.BatchNorm2d):
    """torch's, until something is to round the statistics of its batches.

    Attributes:
        round_statistic: Gives a rounded mean or variance of a batch, float32 (channels,), for it and its
            name, ``"batch_mean"`` or ``"batch_var"``. None leaves all to torch.
    """

    round_statistic: Callable[[str, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """float32 (images, channels, height, width) to the same shape."""
        if self.round_statistic is None or not self.training:
            return super().forward(x)
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        mean, var = self.round_statistic("batch_mean", mean), self.round_statistic("batch_var", var)
        self._add_to_running(mean, var, x.numel() // x.shape[1])
        scale = self.weight * torch.rsqrt(var + self.eps)
        mean, scale, bias = (part[:, None, None] for part in (mean, scale, self.bias))
        y: Tensor = (x - mean) * scale + bias
        return y

    @torch.no_grad()
    def _add_to_running(self, mean: Tensor, var: Tensor, count: int) -> None:
        assert self.momentum is not None and self.running_mean is not None and self.running_var is not None
        # torch keeps the unbiased variance.
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            running.mul_(1 - self.momentum).add_(new, alpha=self.momentum)


class RoundedStatistics:
    """Rounds the statistics of a model's batch normalization from now on.

    Mean and variance of a batch are computed in FP32 and rounded before they normalize it; gradients pass
    that rounding as they are. The running ones are made of the rounded ones, and rounded after each step.

    Args:
        model: Its `BatchNorm2d` modules are meant.
        quantizer: How to round.
        key: Random words of stochastic rounding: others for each module, statistic and step.
    """

    def __init__(self, model: nn.Module, quantizer: Quantizer, key: Key) -> None:
        self.model, self.quantizer, self.key, self.step = model, quantizer, key, 0
        for name, module in model.named_modules():
            if isinstance(module, BatchNorm2d):
                module.round_statistic = lambda which, x, name=name: self._rounded(f"{name}.{which}", x)

    def _key(self, name: str) -> Key | None:
        return self.key.fold_in(name).at(self.step) if self.quantizer.stochastic else None

    def _rounded(self, name: str, x: Tensor) -> Tensor:
        return cast(x, self.quantizer, key=self._key(name))

    def round_running(self, step: int) -> None:
        """Round the running mean and variance after that many steps."""
        self.step = step
        for name, statistic in running_statistics(self.model).items():
            self.quantizer(statistic, key=self._key(name), out=statistic)


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of batch normalization."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    }
