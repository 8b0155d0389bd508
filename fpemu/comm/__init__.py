"""Gradients averaged over ranks in a low-precision format, emulated or really sent."""

from .hooks import ReduceScatter, hook
from .ranks import emulate_ranks
from .reduction import AllReduce

__all__ = ["AllReduce", "ReduceScatter", "emulate_ranks", "hook"]
