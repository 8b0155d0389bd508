"""The ratios of the benchmark are those of its times."""

from __future__ import annotations

import pytest
import torch

from fpemu import bench
from fpemu.formats import ROUNDINGS

TIMES = {
    "np.copyto": 0.004,
    "torch copy_": 0.002,
    "x ^= 1": 0.001,
    "fp16 nearest_even out=": 0.008,
    "fp16 nearest_even in place": 0.002,
}


def columns(times: dict[str, float], n: int) -> dict[str, list[str]]:
    return {column.header: list(column.cells) for column in bench.table(times, n).columns}


def test_each_way_is_compared_with_its_own_limit():
    shown = columns(TIMES, 10**6)
    assert shown["case"] == list(TIMES)
    assert shown["ms"] == ["4.00", "2.00", "1.00", "8.00", "2.00"]
    assert shown["10^9/s"] == ["0.25", "0.50", "1.00", "0.12", "0.50"]
    assert shown["of best copy"] == ["0.50", "1.00", "", "0.25", ""]
    assert shown["of x ^= 1"] == ["", "", "1.00", "", "0.50"]


def test_every_case_is_measured_and_rounds_in_place_or_into_out():
    times = bench.measure(10, 3)
    both, one = ("nearest_even", "stochastic"), set(ROUNDINGS) - {"nearest_even", "stochastic"}
    cases = {(rounding, way) for rounding in both for way in ("out=", "in place")}
    cases |= {(rounding, "out=") for rounding in one}
    assert list(times)[:3] == ["np.copyto", "torch copy_", "x ^= 1"]
    split = [name.split(maxsplit=2) for name in list(times)[3:]]
    assert {tuple(name) for name in split} == {(f, *case) for f in bench.FORMATS for case in cases}
    assert len(split) == 4 * len(cases) and all(seconds > 0 for seconds in times.values())


def test_buffers_start_on_a_cache_line():
    for n in (1, 1000, 1024):
        buffer = bench._buffer(n)
        assert buffer.size == n and buffer.ctypes.data % 64 == 0 and not buffer.any()


def test_the_number_of_threads_is_put_back_even_after_an_error(monkeypatch):
    def fails(size_log2, repeats):
        assert torch.get_num_threads() == 1
        raise RuntimeError("stop")

    monkeypatch.setattr(bench, "measure", fails)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="stop"):
            bench.run(10, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
