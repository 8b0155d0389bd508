"""What the figures show is what was counted."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

import fpemu
from fpemu import plot
from fpemu.parts import row_of
from fpemu.records import records_of
from fpemu.watching import Counted, Step

# Two below the tie at 2**-25, one on it, then one subnormal, three normal in one binade, one too large.
VALUES = np.float32([2**-27, 1.5 * 2**-27, -(2.0**-25), 2**-20, 1, -1.25, 1.5, 2**17, 0, np.inf, np.nan])
COLOURS = {"becomes zero": "#d55e00", "subnormal": "#e69f00", "normal": "#0072b2", "overflow": "#cc79a7"}


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    assert pyplot.get_fignums() == []


def bars(ax):
    """Left edge -> height of the bars that are not empty; every bar is one binade wide."""
    container = ax.containers[0]
    assert all(bar.get_width() == 1 for bar in container)
    return {bar.get_x(): bar.get_height() for bar in container if bar.get_height()}


def ranges(ax):
    """Name -> edges of the coloured ranges."""
    spans = [patch for patch in ax.patches if patch.get_label() in COLOURS]
    for span in spans:
        assert to_hex(span.get_facecolor()) == COLOURS[span.get_label()]
    return {span.get_label(): (span.get_x(), span.get_x() + span.get_width()) for span in spans}


def test_each_binade_has_a_bar_of_its_share(ax):
    assert plot.histogram(fpemu.tally(VALUES), "fp16", ax=ax) is ax
    # 8 nonzero finite values: zero, infinity and NaN are not among them.
    assert bars(ax) == {-27: 25.0, -25: 12.5, -20: 12.5, 0: 37.5, 17: 12.5}
    assert len(ax.containers[0]) == 17 + 27 + 1
    assert ax.get_ylabel() == "share of nonzero values, %"


def test_the_ranges_of_fp16_meet_at_its_limits(ax):
    plot.histogram(fpemu.tally(VALUES), "fp16", ax=ax)
    low, high = ax.get_xlim()
    assert (low, high) == (-29, 20)  # two binades around the values
    top = math.log2(65504)
    assert ranges(ax) == {
        "becomes zero": (-29, -25),
        "subnormal": (-25, -14),
        "normal": (-14, pytest.approx(top, abs=1e-12)),
        "overflow": (pytest.approx(top, abs=1e-12), 20),
    }
    assert ax.get_legend().get_title().get_text() == "binary16"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(COLOURS)


def test_a_format_without_subnormals_has_no_range_of_them(ax):
    fmt = fpemu.Format("flushed", exponent_bits=5, precision=11, subnormal=False)
    plot.histogram(fpemu.tally(VALUES), fmt, ax=ax)
    # Nearest to {0, 2**-14}: the tie at 2**-15 becomes zero.
    assert ranges(ax)["becomes zero"] == (-29, -15) and ranges(ax)["normal"][0] == -15
    assert "subnormal" not in ranges(ax)


def test_ranges_outside_the_picture_are_left_out_but_both_small_edges_are_always_in_it(ax):
    plot.histogram(fpemu.tally(np.float32([1.0])), "fp16", ax=ax)
    assert ax.get_xlim() == (-27, 3)
    assert list(ranges(ax)) == ["becomes zero", "subnormal", "normal"]


def test_the_title_has_the_share_that_tally_lost_gives(ax):
    tally = fpemu.tally(VALUES)
    assert tally.lost("fp16") == 3 / 8
    plot.histogram(tally, "fp16", ax=ax)
    assert ax.get_title() == "37.5 % of nonzero values become zero in binary16"


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e5m2", "e2m1"])
@pytest.mark.parametrize("log2_scale", [-3, 1, 2, 3, 20])
def test_a_scale_moves_the_bars_by_binades_and_the_title_with_them(ax, fmt, log2_scale):
    tally = fpemu.tally(VALUES)
    plot.histogram(tally, fmt, scale=2.0**log2_scale, ax=ax)
    assert bars(ax) == {
        b + log2_scale: h for b, h in {-27: 25.0, -25: 12.5, -20: 12.5, 0: 37.5, 17: 12.5}.items()
    }
    share = f"{100 * tally.lost(fmt, 2.0**log2_scale):.1f} %"
    assert ax.get_title() == (
        f"{share} of nonzero values become zero in {fpemu.as_format(fmt).name} at scale $2^{{{log2_scale}}}$"
    )


def test_what_a_tally_counted_for_makes_no_difference(ax):
    other = Figure().subplots()
    plot.histogram(fpemu.tally(VALUES), "fp16", ax=ax)
    plot.histogram(fpemu.tally(VALUES, "e4m3fn"), "fp16", ax=other)
    assert bars(ax) == bars(other) and ax.get_title() == other.get_title()


def test_the_smallest_and_the_largest_float32_are_drawn(ax):
    plot.histogram(fpemu.tally(np.float32([2**-149, 3e38])), "bf16", ax=ax)
    assert bars(ax) == {-149: 50.0, 127: 50.0}
    ax.figure.canvas.draw()


def test_ticks_are_powers_of_two(ax):
    plot.histogram(fpemu.tally(VALUES), "fp16", ax=ax)
    assert ax.xaxis.get_major_formatter()(-25.0, 0) == "$2^{-25}$"
    assert all(tick == round(tick) for tick in ax.get_xticks())


@pytest.mark.parametrize(
    "values, fmt, scale, match",
    [
        ([], "fp16", 1.0, "needs a tally with a nonzero finite value, got one without; nothing to draw"),
        ([0, np.inf, np.nan], "fp16", 1.0, "needs a tally with a nonzero finite value"),
        ([1], "fp16", 3.0, "scale must be a power of two .* got 3.0"),
        ([1], "fp16", 0.0, "scale must be a power of two .* got 0.0"),
        ([1], "fp16", -2.0, "scale must be a power of two .* got -2.0"),
        ([1], "e8m0fnu", 1.0, "e8m0fnu has no zero"),
        ([1], "fp17", 1.0, "'fp17'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_a_figure_opens(values, fmt, scale, match):
    with pytest.raises(ValueError, match=match):
        plot.histogram(fpemu.tally(np.float32(values)), fmt, scale)


GRADIENTS = {
    ("a", 0): [2.0**-30, 2.0**-20, 1.0],
    ("a", 10): [2.0**-30, 2.0**-30, 2.0**-40, 1.5],
    ("b", 0): [2.0**-10, 2.0**-12],
    ("b", 10): [2.0**-26, np.nan],
}
RATIOS = [2.0**8, 2.0**11, 1.5 * 2.0**11, 2.0**14, 0.0]


def records(scale=1.0):
    """Gradients of two modules at two steps, taken under a loss scale, and ratios of updates."""
    counted = [
        (step, Counted(module, "gradient", scale, [fpemu.tally(np.array(values) * scale)]))
        for (module, step), values in GRADIENTS.items()
    ]
    counted.append((0, Counted("a", "update_ratio", 1.0, [fpemu.tally(np.array(RATIOS))])))
    steps = [Step(step, scale, step == 5, None, None) for step in range(11)]
    return records_of([row_of(*one) for one in counted], steps)


def test_records_are_drawn_like_the_tally_of_their_values(ax):
    other = Figure().subplots()
    plot.histogram(records(2.0**6), "fp16", ax=ax, module="a", role="gradient")
    plot.histogram(fpemu.tally(np.array(GRADIENTS["a", 0] + GRADIENTS["a", 10])), "fp16", ax=other)
    assert bars(ax) == bars(other) and ax.get_title() == other.get_title()


def test_a_scale_shows_where_the_bars_were(ax):
    plot.histogram(fpemu.tally(VALUES), "fp16", 2.0**10, ax=ax)
    outline = next(p for p in ax.patches if isinstance(p, StepPatch))
    assert outline.get_data().edges[[0, -1]].tolist() == [-27, 18]
    assert [text.get_text() for text in ax.texts if text.get_text()] == ["\u00d7 $2^{10}$"]


def test_the_smallest_thousandth_lies_outside_the_picture(ax):
    plot.histogram(fpemu.tally(np.float32([2.0**-100] + [1.0] * 2000)), "fp16", ax=ax)
    assert ax.get_xlim()[0] == -27


def test_titles_break_into_lines_that_narrow_axes_hold():
    figure = Figure(figsize=(3.4, 2.5), dpi=100, layout="constrained")
    ax = plot.histogram(fpemu.tally(VALUES), "fp16", 2.0**10, ax=figure.subplots())
    figure.canvas.draw()
    box = ax.title.get_window_extent()
    assert "\n" in ax.get_title() and box.x0 >= 0 and box.x1 <= 340
    assert ax.get_title().replace("\n", " ").endswith("become zero in binary16 at scale $2^{10}$")


def test_zeros_have_a_bar_of_their_own(ax):
    plot.histogram(fpemu.tally(VALUES), "fp16", ax=ax, zeros=True)
    # 9 finite values, one of them zero; the share in the title is of those that are not.
    assert bars(ax) == {
        b: pytest.approx(100 * n / 9) for b, n in {-27: 2, -25: 1, -20: 1, 0: 3, 17: 1}.items()
    }
    assert [(bar.get_x(), bar.get_height()) for bar in ax.containers[1]] == [(-32, pytest.approx(100 / 9))]
    assert ax.get_yscale() == "log" and ax.get_ylabel() == "share of finite values, %"
    assert "0" in [text.get_text() for text in ax.texts]
    assert ax.get_title() == "37.5 % of nonzero values become zero in binary16"


def test_each_module_has_a_ridge_and_its_share(ax):
    assert plot.ridgeline(records(), "fp16", ax=ax) is ax
    ridges = [p for p in ax.patches if isinstance(p, StepPatch)]
    assert [round(r.get_data().edges[0]) for r in ridges] == [-26, -40]  # the first module is at the top
    assert [t.get_text() for t in ax.texts] == ["33.3 %", "57.1 %", "to zero"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["b", "a"]
    ax.figure.canvas.draw()


def test_a_heatmap_has_a_row_of_binades_for_each_module(ax):
    plot.heatmap(records(), "fp16", ax=ax)
    shares = ax.collections[0].get_array()
    assert shares.shape[0] == 2
    assert np.nansum(shares, axis=1).tolist() == [pytest.approx(100), pytest.approx(100)]
    low = ax.get_xlim()[0]
    assert shares[0, round(-30 - low)] == pytest.approx(300 / 7)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    ax.figure.canvas.draw()


def test_a_heatmap_has_a_column_of_binades_for_each_step(ax):
    plot.heatmap(records(), "fp16", by="step", module="a", ax=ax)
    shares = ax.collections[0].get_array()
    assert shares.shape[1] == 2 and ax.get_xlim() == (0, 20)
    low = ax.get_ylim()[0]
    assert shares[round(-30 - low)].tolist() == [pytest.approx(100 / 3), pytest.approx(50)]
    ax.figure.canvas.draw()


def test_a_scale_curve_has_both_cliffs_and_marks_what_lies_between(ax):
    counted = fpemu.tally(np.array([2.0**-30, 1.0]))
    plot.scale_curve(counted, "fp16", ax=ax, exponents=range(0, 21))
    lost, over = (line.get_ydata() for line in ax.lines)
    assert lost.tolist() == [50.0] * 6 + [0.0] * 15  # 2**-30 * 2**5 is the tie
    assert over.tolist() == [0.0] * 16 + [50.0] * 5  # 2**16 is past 65504
    span = next(p for p in ax.patches if p.get_label())
    assert (span.get_x(), span.get_x() + span.get_width()) == (6, 15)
    assert span.get_label() == "$2^{6}$ to $2^{15}$: under 0.1 %"


def test_a_scale_curve_of_two_formats_has_two_pairs_of_lines(ax):
    plot.scale_curve(records().select(role="gradient"), ["fp16", "e5m2"], ax=ax)
    assert len(ax.lines) == 4 and len(ax.get_legend().get_texts()) == 4
    assert not [p for p in ax.patches if p.get_label()]


def test_a_timeline_has_what_was_seen_with_its_scale_and_skips(ax):
    plot.timeline(records(2.0**4), "fp16", ax=ax)
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["largest magnitude"].get_xdata()) == [0, 10]
    assert list(lines["largest magnitude"].get_ydata()) == [4.0, pytest.approx(math.log2(24))]
    assert set(lines["loss scale"].get_ydata()) == {4.0}
    assert list(lines["step left out"].get_xdata()) == [5]
    assert list(lines["infinity or NaN"].get_xdata()) == [10]
    right = next(other for other in ax.figure.axes if other is not ax)
    # times 2**4: 2**-30 is lost in both steps, 2**-40 too, 2**-26 is not.
    assert list(right.lines[0].get_ydata()) == [pytest.approx(20.0), pytest.approx(60.0)]
    ax.figure.canvas.draw()


def test_updates_are_lost_above_the_precision(ax):
    plot.updates(records(), "fp16", ax=ax)
    assert ax.get_title() == "25.0 to 75.0 % of updates are lost in binary16 weights"
    assert bars(ax) == {8: 25.0, 11: 50.0, 14: 25.0}
    spans = {p.get_label(): p.get_x() for p in ax.patches if p.get_label() in ("lost", "some lost")}
    assert spans == {"lost": 12, "some lost": 11}
    plot.updates(fpemu.tally(np.array(RATIOS)), "bf16", ax=Figure().subplots())


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: plot.histogram(fpemu.tally(VALUES), module="a"), "a Tally has neither"),
        (lambda: plot.histogram(records(), module="c"), "nothing was recorded for module='c'"),
        (lambda: plot.heatmap(records(), by="rank"), "by must be 'module' or 'step', got 'rank'"),
        (lambda: plot.ridgeline(records(), role="weight"), "nothing was recorded for role='weight'"),
        (lambda: plot.ridgeline(records(), scale=3.0), "scale must be a power of two"),
        (lambda: plot.updates(fpemu.tally(np.zeros(3))), "updates needs a tally with a nonzero finite value"),
        (lambda: plot.scale_curve(fpemu.tally(np.zeros(3))), "scale_curve needs a tally"),
    ],
)
def test_wrong_use_is_refused_before_a_figure_opens(call, match):
    with pytest.raises(ValueError, match=match):
        call()


CURVES = {"fp32": [2.0, 1.0, 0.5], "broken": [2.0, math.nan, 1.5], "lost": [2.0, math.inf, math.nan]}


def test_losses_have_a_line_a_strategy_over_the_epochs(ax):
    assert plot.losses(CURVES, ax=ax) is ax
    assert [line.get_label() for line in ax.lines] == list(CURVES)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(CURVES)
    for line in ax.lines:
        assert list(line.get_xdata()) == [1, 2, 3]
    assert list(ax.lines[0].get_ydata()) == CURVES["fp32"]
    assert ax.get_yscale() == "log" and ax.get_xlabel() == "epoch"


def test_nan_and_infinity_leave_a_gap(ax):
    plot.losses(CURVES, ax=ax)
    for line, gaps in zip(ax.lines[1:], ([False, True, False], [False, True, True]), strict=True):
        assert [math.isnan(y) for y in line.get_ydata()] == gaps
    ax.figure.canvas.draw()


def test_a_curve_without_a_finite_loss_is_drawn_as_nothing(ax):
    plot.losses({"lost": [math.nan, math.nan]}, ax=ax)
    ax.figure.canvas.draw()


def test_one_epoch_is_a_point(ax):
    plot.losses({"short": [1.0], "long": [2.0, 1.0]}, ax=ax)
    assert [line.get_marker() for line in ax.lines] == ["o", "None"]


def test_eight_lines_are_told_apart(ax):
    plot.losses({str(i): [1.0, 0.5] for i in range(8)}, ax=ax)
    assert len({line.get_color() for line in ax.lines}) == 8


def test_losses_without_a_curve_are_refused():
    with pytest.raises(ValueError, match="losses needs at least one curve, got none; give a mapping"):
        plot.losses({})


def test_without_axes_a_new_figure_is_made():
    for draw in (lambda: plot.histogram(fpemu.tally(VALUES), "fp16"), lambda: plot.losses(CURVES)):
        ax = draw()
        assert pyplot.get_fignums() == [ax.figure.number]
        ax.figure.canvas.draw()
        pyplot.close(ax.figure)
