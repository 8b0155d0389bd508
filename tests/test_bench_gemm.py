"""The benchmark of matrix products measures every way, and its ratios are those of its times."""

from __future__ import annotations

from fpemu import bench_gemm


def test_every_way_is_measured_beside_torch():
    times = bench_gemm.measure(16, 2)
    assert list(times) == [bench_gemm.PLAIN, *bench_gemm.WAYS]
    assert min(times.values()) > 0


def test_rates_and_shares_are_those_of_the_times():
    shown = bench_gemm.table({"torch.mm": 0.02, "fp16": 0.1}, 1000)
    columns = {column.header: list(column.cells) for column in shown.columns}
    assert columns == {
        "sums": ["torch.mm", "fp16"],
        "ms": ["20.0", "100.0"],
        "GMAC/s": ["50.00", "10.00"],
        "of torch.mm": ["1.000", "0.200"],
    }
