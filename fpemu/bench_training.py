"""What emulation costs in training: a step with everything rounded beside the same step in FP32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Policy, emulate
from .bench import cuda_seconds, medians, require_cuda, wall_seconds
from .columns import aligned
from .experiments.models import resnet8, transformer

POLICY = Policy(weight="fp16", activation="fp16", gradient="fp16")
IMAGES, TEXTS = 64, 16  # in a batch
SIDE, CONTEXT, VOCABULARY, CLASSES = 28, 64, 65, 10


@dataclass(frozen=True)
class StepTimes:
    """What a training step of one model takes.

    Attributes:
        batch: What a step is given.
        fp32: Median seconds of the plain model.
        fp16: Median seconds with weights, activations and gradients rounded to fp16, and counted.
        uncounted: The same without counts.
    """

    batch: str
    fp32: float
    fp16: float
    uncounted: float

    @property
    def ratio(self) -> float:
        """How many FP32 steps a rounded and counted one takes."""
        return self.fp16 / self.fp32

    @property
    def uncounted_ratio(self) -> float:
        """How many FP32 steps a rounded one takes."""
        return self.uncounted / self.fp32


@dataclass(frozen=True, eq=False)
class _Workload:
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    batch: str


def run(repeats: int = 9, device: str = "cpu") -> None:
    """Print what a training step of each model takes in FP32 and rounded to fp16, and what is counted.

    Args:
        repeats: Rounds; each runs every case once, and the medians are compared.
        device: ``"cpu"``, on as many threads as torch is set to, or ``"cuda"``: the current device.

    Raises:
        ValueError: there is no CUDA device.
    """
    times = measure(repeats, device)
    rows: list[tuple[str, ...]] = [("model", "fp32 ms", "fp16 ms", "ratio", "not counted ms", "ratio")]
    for name, step in times.items():
        cells = (step.fp32 * 1e3, step.fp16 * 1e3, step.ratio, step.uncounted * 1e3, step.uncounted_ratio)
        rows.append((name, *(f"{cell:.2f}" for cell in cells)))
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    threads = torch.get_num_threads()
    print(f"training steps on {where}, torch threads: {threads}, medians of {repeats}")
    print("\n".join(aligned(rows, right=range(1, 6))))
    print("a step: forward, loss, backward, SGD; fp16: weights, activations and gradients rounded")
    print("a batch:", "; ".join(f"{name}, {step.batch}" for name, step in times.items()))


def measure(
    repeats: int, device: str = "cpu", *, images: int = IMAGES, texts: int = TEXTS
) -> dict[str, StepTimes]:
    """Times of a training step of each model, FP32 and fp16 interleaved.

    Args:
        repeats: Rounds.
        device: ``"cpu"`` or ``"cuda"``.
        images: Images in a batch of ``resnet8``.
        texts: Texts in a batch of ``transformer``.

    Returns:
        Times by the model's name.

    Raises:
        ValueError: there is no CUDA device.
    """
    if device == "cuda":
        require_cuda()
    seconds = cuda_seconds if device == "cuda" else wall_seconds
    times = {}
    for name, workload in _workloads(images, texts).items():
        median = medians(_cases(workload, device), repeats, seconds)
        times[name] = StepTimes(workload.batch, **median)
    return times


def _workloads(images: int, texts: int) -> dict[str, _Workload]:
    """The models with random batches, on the CPU."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(images, 1, SIDE, SIDE, generator=random)
    labels = torch.randint(CLASSES, (images,), generator=random)
    tokens = torch.randint(VOCABULARY, (texts, CONTEXT + 1), generator=random)
    return {
        "resnet8": _Workload(
            resnet8(classes=CLASSES), pixels, labels, f"{images} images of {SIDE} x {SIDE} pixels"
        ),
        "transformer": _Workload(
            transformer(VOCABULARY, context=CONTEXT),
            tokens[:, :-1],
            tokens[:, 1:],
            f"{texts} texts of {CONTEXT} characters",
        ),
    }


def _cases(workload: _Workload, device: str) -> dict[str, Callable[[], None]]:
    """The step of the plain model and those of emulated copies."""
    plain = workload.model.to(device)
    rounded, uncounted = copy.deepcopy(plain), copy.deepcopy(plain)
    emulate(rounded, POLICY)
    emulate(uncounted, POLICY, count=False)
    inputs, targets = workload.inputs.to(device), workload.targets.to(device)
    return {
        name: partial(_step, model, torch.optim.SGD(model.parameters(), lr=0.01), inputs, targets)
        for name, model in (("fp32", plain), ("fp16", rounded), ("uncounted", uncounted))
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    logits = model(inputs)
    F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    optimizer.step()
