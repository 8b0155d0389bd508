"""What dashboards get is what was recorded."""

from __future__ import annotations

import numpy as np
import pytest

from fpemu import tally
from fpemu.export import scalars, tensorboard
from fpemu.parts import row_of
from fpemu.records import records_of
from fpemu.watching import Counted, Step

VALUES = {0: [2.0**-30, 0.0, 1.5, np.nan], 10: [2.0**-30, 2.0**-30, 2.0**-5]}


@pytest.fixture
def records():
    counted = [(s, Counted("a", "gradient", 4.0, [tally(np.array(v) * 4)])) for s, v in VALUES.items()]
    return records_of([row_of(*one) for one in counted], [Step(s, 4.0, False, None, None) for s in range(11)])


def test_each_recorded_step_has_a_dict_of_scalars(records):
    rows = dict(scalars(records, "fp16"))
    assert rows == {
        0: {"a/gradient/largest": 6.0, "a/gradient/zero": 0.25, "a/gradient/to_zero_in_binary16": 0.5,
            "a/gradient/infinities_and_nans": 1.0, "loss_scale": 4.0},
        10: {"a/gradient/largest": 0.125, "a/gradient/zero": 0.0, "a/gradient/to_zero_in_binary16": 2 / 3,
             "a/gradient/infinities_and_nans": 0.0, "loss_scale": 4.0},
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_reads_back_scalars_and_histograms(records, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard(records, tmp_path)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("a/gradient/largest")]
    assert seen == [(0, 6.0), (10, 0.125)]
    first = events.Histograms("a/gradient/binade")[0].histogram_value
    assert (first.num, first.min, first.max) == (2, -28, 3)
    assert sum(first.bucket) == 2


def test_without_tensorboard_the_error_says_what_to_install(records, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        tensorboard(records, tmp_path)
