"""A program that trains from a checkpoint and is killed at given steps, each time in a process of its own.

Called with a directory and the strategy, settings and steps as JSON. The processes are forked from one that
has loaded everything and trained a step, on one thread: to start each anew would take longer than training.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fpemu.experiments import Data, Settings, Strategy, load_data, train


def kill_after(steps: int) -> None:
    """Die by SIGKILL once torch's own optimizer has made that many steps in this process."""
    done = 0

    def count(optimizer, *_):
        nonlocal done
        done += isinstance(optimizer, torch.optim.SGD)
        if done == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


def child(
    directory: pathlib.Path, strategy: Strategy, settings: Settings, data: Data, steps: int | None
) -> None:
    if steps is not None:
        kill_after(steps)
    path = directory / "run.pt"
    result = train(strategy, settings, 0, data, checkpoint=path, every=1)
    state = torch.load(path, weights_only=True)["state"]
    torch.save({"result": result.as_dict(), "state": state}, directory / "end.pt")


def main(directory: str, job: str) -> None:
    given = json.loads(job)
    strategy, settings = Strategy(**given["strategy"]), Settings(**given["settings"])
    torch.set_num_threads(1)
    data = load_data(settings.data)
    train(strategy, dataclasses.replace(settings, steps=1), 1, data)
    for steps in (*given["steps"], None):
        pid = os.fork()
        if pid == 0:
            try:
                child(pathlib.Path(directory), strategy, settings, data, steps)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        print("killed" if os.WIFSIGNALED(status) else "ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
