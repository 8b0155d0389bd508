"""Networks to train."""

from __future__ import annotations

import torch


def mlp(inputs: int, classes: int, hidden: int = 128, *, seed: int = 0) -> torch.nn.Sequential:
    """Three linear layers with ReLU between: ``inputs - hidden - hidden - classes``.

    Args:
        inputs: Values an image.
        classes: Number of classes.
        hidden: Width of the two hidden layers.
        seed: Same seed, same initial weights; torch's own generator is left as it was.

    Returns:
        The model, its weights drawn as ``torch.nn.Linear`` does.

    Example:
        >>> sum(p.numel() for p in mlp(64, 10).parameters())
        26122
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(inputs, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, classes),
        )
