"""Files that a broken run goes on from."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import replace_whole


def write_checkpoint(path: Path, run: str, state: dict[str, Any]) -> None:
    """Write a run's state in place of an earlier one."""
    content = {"fpemu": __version__, "run": run, "state": state}
    replace_whole(path, lambda part: torch.save(content, part))


def read_checkpoint(path: Path, run: str) -> dict[str, Any]:
    """The state that `write_checkpoint` wrote.

    Raises:
        ValueError: it is no checkpoint, or one of another run or version of fpemu.
    """
    try:
        content = torch.load(path, weights_only=True)
        version, name, state = content["fpemu"], content["run"], content["state"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint ({type(error).__name__}); move it away") from None
    if (version, name) != (__version__, run):
        raise ValueError(
            f"{path} is of another run, or of fpemu {version} where this is {__version__}; move it away or "
            "name another file"
        )
    return state
