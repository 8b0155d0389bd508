"""`fpemu bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import bad_input


def bench(
    size_log2: Annotated[
        int | None,
        typer.Option(
            min=10, max=30, help="elements, as a power of two: 24, with --gemm 20; not for --training"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="rounds; medians are compared")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    training: Annotated[
        bool, typer.Option("--training", help="measure training steps with rounding, beside FP32")
    ] = False,
    gemm: Annotated[
        bool, typer.Option("--gemm", help="measure matrix products rounded as they accumulate, on the CPU")
    ] = False,
) -> None:
    """Measure rounding beside the copies it cannot beat, on one thread of a CPU or on a GPU."""
    from ..bench import run, run_cuda

    with bad_input():
        if device not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {device!r}; choose from cpu, cuda")
        if gemm:
            from ..bench_gemm import run as run_gemm

            if training or device != "cpu":
                raise ValueError("bench --gemm runs on the CPU, and without --training")
            run_gemm(size_log2 or 20, repeats)
        elif training:
            from ..bench_training import run as run_training

            run_training(repeats, device)
        elif device == "cpu":
            run(size_log2 or 24, repeats)
        else:
            run_cuda(size_log2 or 24, repeats)
