"""Questions to records against the tensors that were recorded."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import fpemu
from fpemu import Recorder, Tally, as_format, load, quantize, tally

FORMATS = ["fp16", "bf16", "e5m2", "e4m3fn", "e4m3", "e3m2", "e2m1", "e4m3fnuz", "dlfloat16", "tf32"]
SCALES = [2.0**e for e in (-12, -3, -1, 0, 1, 3, 5, 8, 10, 14, 15, 20)]
OTHERS = ["nearest_away", "toward_zero", "to_odd"]
GROUPS = [(name, role) for name in ("first", "second") for role in ("activation", "gradient")]


class Stored(nn.Module):
    """Two layers that return numbers given, with gradients given."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()


def numbers(seed, count=400, low=-40, high=18):
    """Numbers of all sizes, powers of two and zeros among them."""
    rng = np.random.default_rng(seed)
    spread = np.ldexp(rng.standard_normal(count), rng.integers(low, high, count))
    powers = np.ldexp(1.0, np.arange(low, high))
    return np.concatenate([spread, powers, -powers, [0.0, -0.0]]).astype(np.float32)


VALUES = {
    (step, name): (numbers(10 * step + place), numbers(10 * step + place + 5, low=-60, high=-2))
    for step in range(3)
    for place, name in enumerate(("first", "second"))
}


def record(directory, scaler=None, formats=("fp16",)):
    model = Stored()
    with Recorder(directory, every=1, formats=formats).watch(model, scaler=scaler) as recorder:
        for step in range(3):
            for name in ("first", "second"):
                values, gradients = VALUES[step, name]
                x = torch.from_numpy(values.copy()).requires_grad_()
                getattr(model, name)(x).backward(torch.from_numpy(gradients) * (scaler or 1.0))
            recorder.step()
    return load(directory)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return record(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return record(tmp_path_factory.mktemp("scaled"), 2.0**8)


def stored(name, role, steps=range(3)):
    """All numbers of a layer and role, exact, one after the other."""
    place = ("activation", "gradient").index(role)
    return np.concatenate([VALUES[step, name][place] for step in steps]).astype(np.float64)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_if_is_what_quantizing_the_stored_tensors_gives(records, fmt):
    for scale, rounding in [(s, "nearest_even") for s in SCALES] + [(4.0, other) for other in OTHERS]:
        found = records.what_if(fmt, scale=scale, rounding=rounding)
        assert [(one.module, one.role) for one in found.losses] == GROUPS
        total, over = 0, 0
        for one in found.losses:
            x = stored(one.module, one.role) * scale
            lost = int(((quantize(x, fmt, rounding) == 0) & (x != 0)).sum())
            overflow = tally(x, fmt).overflow
            assert (one.values, one.lost) == ((x != 0).sum(), lost)
            assert one.share == lost / (x != 0).sum()
            assert one.overflow[0] <= overflow <= one.overflow[1]
            total, over = total + lost, over + overflow
        assert found.total.lost == total
        assert found.total.overflow[0] <= over <= found.total.overflow[1]


@pytest.mark.parametrize("fmt, scale", list(zip(FORMATS, SCALES, strict=False)))
def test_gradients_are_divided_by_the_loss_scale_first(scaled, fmt, scale):
    gradients = scaled.select(role="gradient")
    assert set(gradients.table.column("scale").to_pylist()) == {256.0}
    for one in gradients.what_if(fmt, scale).losses:
        x = stored(one.module, "gradient") * scale
        assert one.lost == ((quantize(x, fmt) == 0) & (x != 0)).sum()
    seen = gradients.select("first").seen("fp16")
    assert seen == tally(stored("first", "gradient") * 256, "fp16")


@pytest.mark.parametrize(
    "chosen, count",
    [
        ({"module": "first"}, 2 * 3),
        ({"module": "f*", "role": "gradient"}, 3),
        ({"module": ["first", "second"], "role": ["gradient"]}, 6),
        ({"role": "*", "steps": 1}, 4),
        ({"steps": slice(1, None)}, 8),
        ({"steps": slice(None, 1)}, 4),
        ({"steps": range(0, 3, 2)}, 8),
        ({"rank": 0}, 12),
    ],
)
def test_select(records, chosen, count):
    found = records.select(**chosen)
    assert len(found) == count == found.table.num_rows
    assert len(found.steps_table) == len(found.steps)


def test_merging_is_exact_over_steps_and_modules(records):
    x = np.concatenate([stored(m, r) for m in ("first", "second") for r in ("activation", "gradient")])
    whole = records.tally()
    assert whole == tally(x) and whole.amax == tally(x).amax
    parts = [records.select(module, role, step).tally() for module in ("first", "second")
             for role in ("activation", "gradient") for step in range(3)]  # fmt: skip
    assert sum(parts, Tally()) == whole


def test_a_module_s_pattern_means_what_is_in_it(tmp_path):
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "ab": nn.Linear(2, 2)})
    with Recorder(tmp_path, every=1).watch(model) as recorder:
        recorder.step()
    assert load(tmp_path).select("a").modules == ["a.b"]


def test_what_is_not_there_is_refused_with_what_is(records):
    with pytest.raises(
        ValueError,
        match=r"nothing was recorded for module='third'; there are modules first, second, roles activation, "
        r"gradient, steps 0, 1, 2",
    ):
        records.select("third")
    with pytest.raises(ValueError, match="a slice of steps has no step of its own"):
        records.select(steps=slice(0, 3, 2))
    with pytest.raises(ValueError, match="bfloat16 was not counted in all records; they have binary16"):
        records.seen("bf16")
    with pytest.raises(ValueError, match="threshold must be a share from 0 to 1, got 2"):
        records.first_underflow(2)
    with pytest.raises(ValueError, match="nothing was recorded for role="):
        records.select(role="activation").suggest_scale("fp16")


def test_suggested_scales_keep_what_they_promise(records):
    suggestion = records.suggest_scale("fp16", tolerance=0.5)
    x = np.concatenate([stored(m, "gradient") for m in ("first", "second")])
    low, high = suggestion.overall.lowest, suggestion.overall.highest
    for scale, few in ((low, True), (low / 2, False)):
        lost = ((quantize(x * scale, "fp16") == 0) & (x != 0)).sum() / (x != 0).sum()
        assert (lost <= 0.5) == few
    assert np.isfinite(quantize(x * high, "fp16")).all()
    assert not np.isfinite(quantize(x * high * 2, "fp16")).all()
    assert suggestion.scale == max(low, high / 4)
    assert set(suggestion.layers) == {("first", "gradient"), ("second", "gradient")}
    assert str(suggestion).splitlines()[-1].startswith("all")
    assert records.suggest_scale("e2m1", tolerance=0.0).scale is None


def test_the_first_overflow_is_where_a_plain_search_finds_it(records):
    event = records.first_overflow("fp16")
    wanted = next(
        (step, name)
        for step in range(3)
        for name in ("first", "second")
        if np.isinf(quantize(VALUES[step, name][0], "fp16")).any()
    )
    assert (event.step, event.module, event.role) == (*wanted, "activation")
    assert "a largest finite magnitude of" in str(event)
    assert records.first_overflow() is None and records.first_overflow("bf16") is None


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.43, 0.9])
def test_the_first_underflow_is_where_a_plain_search_finds_it(records, scaled, threshold):
    for found, scale in ((records, 1.0), (scaled, 256.0)):
        event = found.first_underflow(threshold, "fp16")
        wanted = None
        for step in range(3):
            for name in ("first", "second"):
                for role, by in (("activation", 1.0), ("gradient", scale)):
                    x = stored(name, role, [step]) * by
                    lost = ((quantize(x, "fp16") == 0) & (x != 0)).sum() / (x != 0).sum()
                    if wanted is None and lost > threshold:
                        wanted = (step, name, role)
        assert (event and (event.step, event.module, event.role)) == wanted


def test_nan_is_an_overflow_and_named(tmp_path):
    model = nn.Linear(2, 2)
    with Recorder(tmp_path, every=1).watch(model) as recorder:
        for value in (1.0, math.nan):
            model(torch.full((3, 2), value))
            recorder.step()
    event = load(tmp_path).first_overflow()
    assert str(event) == "step 1, rank 0: the activation of (model) has 0 infinities and 6 NaNs"


def test_two_runs_side_by_side(records, scaled):
    compared = records.compare(scaled.select("first"), "fp16")
    assert [(m, r, b is None) for m, r, a, b in compared.rows] == [
        ("first", "activation", False), ("first", "gradient", False),
        ("second", "activation", True), ("second", "gradient", True),
    ]  # fmt: skip
    for module, role, a, b in compared.rows[:2]:
        x = stored(module, role)
        assert a.share == ((quantize(x, "fp16") == 0) & (x != 0)).sum() / (x != 0).sum()
        assert b.share == a.share  # loss scales are divided out
    assert "+0.00%" in str(compared) and str(compared).splitlines()[-1].endswith("-")
    assert compared.to_pandas().shape == (4, 4)


def test_several_runs_load_together(records, tmp_path):
    for name in ("a", "b"):
        record(tmp_path / name)
    both = load(tmp_path / "*")
    assert len(both) == 2 * len(records) and len(both.runs) == 2
    assert both.tally() == records.tally() + records.tally()
    one = both.select(run=str(tmp_path / "a"))
    assert one.tally() == records.tally()
    assert load([tmp_path / "a", tmp_path / "b"]).tally() == both.tally()


def test_a_loss_scale_that_is_no_power_of_two_is_told(tmp_path):
    records = record(tmp_path, 1000.0)
    assert records.select(role="activation").tally().count > 0
    assert records.seen().count > 0
    with pytest.raises(ValueError, match="no power of two, 1000"):
        records.tally()


def test_pandas_has_one_row_for_each_format(tmp_path):
    records = record(tmp_path, formats=["fp16", "e5m2"])
    frame = records.to_pandas()
    assert len(frame) == 2 * len(records)
    for module, role in (("first", "activation"), ("second", "gradient")):
        for fmt in ("fp16", "e5m2"):
            rows = frame[
                (frame.module == module) & (frame.role == role) & (frame.format == as_format(fmt).name)
            ]
            wanted = tally(stored(module, role), fmt)
            assert rows.underflow.sum() == wanted.underflow and rows.overflow.sum() == wanted.overflow
            assert rows["count"].sum() == wanted.count
    assert records.to_arrow().schema.field("histogram").type == pa.list_(pa.int64())
    plain = record(tmp_path / "plain", formats=())
    assert plain.to_pandas().underflow.isna().all() and len(plain.to_pandas()) == len(plain)


def test_tables_in_words(records):
    lines = str(records).splitlines()
    assert lines[0].split() == "module role tallies values zero median largest inf and NaN".split()
    assert lines[1].split()[:4] == ["first", "activation", "3", str(stored("first", "activation").size)]
    table = str(records.what_if("fp16")).splitlines()
    assert table[-1].startswith("total") and len(table) == 6


def test_the_files_are_plain_parquet(tmp_path):
    record(tmp_path)
    query = (
        "SELECT module, sum(zero) FROM read_parquet('{}/tallies/*/*.parquet', hive_partitioning = true) "
        "GROUP BY module ORDER BY module"
    )
    duckdb = pytest.importorskip("duckdb")
    assert duckdb.sql(query.format(tmp_path)).fetchall() == [("first", 12), ("second", 12)]


def test_pyarrow_reads_them_as_a_data_set(tmp_path):
    import pyarrow.dataset as ds

    record(tmp_path)
    table = ds.dataset(tmp_path / "tallies", partitioning="hive").to_table()
    assert table.column("rank").to_pylist() == [0] * 12
    assert sum(table.column("count").to_pylist()) == fpemu.load(tmp_path).tally().count
