"""fpemu.testing: right quantizers pass, each kind of wrong one is caught where it is wrong."""

from __future__ import annotations

import math
import pathlib
import runpy
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same import differ, same
from typer.testing import CliRunner

import fpemu
from fpemu.__main__ import app
from fpemu.formats import OVERFLOWS, ROUNDINGS, Format, as_format
from fpemu.reference import round_value
from fpemu.testing import Example, Report, Row, check, exact, formats, hard_inputs, inputs, values

MODES = [mode for mode in ROUNDINGS if mode != "stochastic"]
INF, NAN = math.inf, math.nan


def wrong_regions(report):
    return {row.region for row in report.rows if row.wrong}


# The oracle of check is the reference


@settings(max_examples=300, deadline=None)
@given(data=st.data(), fmt=formats(), rounding=st.sampled_from(MODES), overflow=st.sampled_from(OVERFLOWS))
def test_what_is_expected_is_what_the_reference_says(data, fmt, rounding, overflow):
    x = np.array(data.draw(st.lists(hard_inputs(fmt), min_size=1, max_size=20)), np.float32)
    expected = [round_value(v, fmt, rounding, overflow=overflow) for v in x.tolist()]
    assert same(exact.expected(x, fmt, rounding, overflow), np.array(expected))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), fmt=formats(), overflow=st.sampled_from(OVERFLOWS))
def test_neighbours_are_those_of_the_reference(data, fmt, overflow):
    x = np.array(data.draw(st.lists(hard_inputs(fmt), min_size=1, max_size=20)), np.float32)
    down, up = exact.neighbours(x, fmt, overflow)
    for word, expected in ((0, down), (2**32 - 1, up)):
        # Of a smaller fraction even the largest word leaves nothing to carry.
        shown = (exact.split_quanta(x, fmt).remainder >= 2.0**-32) | (word == 0) | ~differ(down, up)
        got = [round_value(v, fmt, "stochastic", overflow=overflow, word=word) for v in x[shown].tolist()]
        assert same(np.array(got, np.float64), expected[shown])


# Right quantizers


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize(
    "fmt", ["fp16", "e4m3fn", "e5m2fnuz", "e8m0", "e2m1", "dlfloat16", "binary8p1uf", "tf32"]
)
def test_quantize_has_nothing_wrong(fmt, rounding, overflow):
    report = check(
        lambda x: fpemu.quantize(x, fmt, rounding, overflow=overflow), fmt, rounding, overflow=overflow
    )
    assert report.ok, str(report)
    assert report.tried > 2 ** as_format(fmt).bits * (as_format(fmt).bits <= 16)


@pytest.mark.parametrize(
    "fmt, dtype",
    [
        ("fp16", np.float16),
        ("bf16", ml_dtypes.bfloat16),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e4m3fn", ml_dtypes.float8_e4m3fn),
        ("fp32", np.float32),
        ("fp64", np.float64),
    ],
)
@pytest.mark.parametrize("exhaustive", [None, 16])
def test_numpy_and_ml_dtypes_have_nothing_wrong(fmt, dtype, exhaustive):
    report = check(lambda x: x.astype(dtype), fmt, exhaustive=exhaustive)
    assert report.ok, str(report)
    assert exhaustive is None or report.tried == 2**16


@pytest.mark.parametrize("fmt, dtype", [("fp16", torch.float16), ("e5m2", torch.float8_e5m2)])
def test_tensors_are_taken(fmt, dtype):
    assert check(lambda x: torch.from_numpy(x).to(dtype), fmt).ok


@pytest.mark.slow
def test_every_float32():
    report = check(lambda x: x.astype(np.float16), "fp16", exhaustive=32)
    assert report.ok, str(report)
    assert report.tried == 2**32


def test_all_patterns_are_walked_once(monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK", 1 << 30)
    monkeypatch.setattr(np, "arange", lambda stop, dtype: np.array([0, stop - 1], dtype))
    ends = np.concatenate(list(inputs.patterns(as_format("fp16"), 32, 0))).tolist()
    assert ends == [0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 3 * 2**30 - 1, 3 * 2**30, 2**32 - 1]


# Wrong ones


def ties_away(x):
    return fpemu.quantize(x, "fp16", "nearest_away")


def saturated(x):
    return fpemu.quantize(x, "fp16", overflow="saturate")


def minus_zero_lost(x):
    return fpemu.quantize(x, "fp16") + np.float32(0)


def subnormals_flushed(x):
    return fpemu.quantize(x, "fp16", flush_subnormals=True)


def smallest_normal_one_too_high(x):
    """Below 2**-13, not 2**-14, the fixed grid; and one binade coarser."""
    fixed = np.rint(x * np.float32(2**23)) * np.float32(2**-23)
    return np.where(np.abs(x) < 2**-13, fixed, fpemu.quantize(x, "fp16"))


def rounded_twice(x):
    return fpemu.quantize(fpemu.quantize(x, "bf16"), "fp16")


def bits_cut_off(x):
    """Right but for NaNs whose payload is in the low bits."""
    return (x.view(np.uint32) & np.uint32(0xFFFF_0000)).view(np.float32)


@pytest.mark.parametrize(
    "quantizer, regions, region, sign, example",
    [
        (ties_away, {"tie"}, "tie", "+", Example(2**-25, 2**-24, 0.0)),
        (saturated, {"tie", "overflow", "special"}, "special", "-", Example(-INF, -65504.0, -INF)),
        (saturated, {"tie", "overflow", "special"}, "tie", "+", Example(65520.0, 65504.0, INF)),
        (minus_zero_lost, {"underflow", "tie", "special"}, "special", "-", Example(-0.0, 0.0, -0.0)),
        (
            subnormals_flushed,
            {"underflow", "subnormal", "tie"},
            "subnormal",
            "+",
            Example(2**-14 - 2**-25 + 2**-38, 0.0, 2**-14),  # the first that rounds up to the normals
        ),
        (
            smallest_normal_one_too_high,
            {"underflow", "subnormal", "normal"},  # even neighbours of a tie are on the coarse grid too
            "subnormal",
            "-",
            Example(-(2**-24), -0.0, -(2**-24)),
        ),
    ],
)
def test_a_wrong_quantizer_is_caught_where_it_is_wrong(quantizer, regions, region, sign, example):
    report = check(quantizer, "fp16")
    assert wrong_regions(report) == regions
    got = report.row(region, sign).example
    assert same(list(got), list(example)), str(report)


def test_rounding_by_way_of_another_type_is_caught_beside_ties():
    # 464 is a tie of e4m3fn's 448 and 480, beyond its range; float16 takes 464 + 2**-15 for it.
    report = check(lambda x: fpemu.quantize(fpemu.quantize(x, "fp16"), "e4m3fn"), "e4m3fn")
    assert wrong_regions(report) == {"underflow", "subnormal", "normal", "overflow"}
    assert same(list(report.row("overflow").example), [464 + 2**-15, 448.0, NAN])
    assert {"normal", "subnormal", "tie"} <= wrong_regions(check(rounded_twice, "fp16"))


def test_a_nan_that_becomes_infinity_is_caught():
    report = check(bits_cut_off, "bf16", "toward_zero")
    assert report.wrong == 2 and wrong_regions(report) == {"special"}
    assert same(list(report.row("special").example), [NAN, INF, NAN])


def test_a_wrong_mode_or_overflow_is_caught():
    for rounding in MODES:
        for other in MODES:
            report = check(lambda x, mode=other: fpemu.quantize(x, "e5m2", mode), "e5m2", rounding)
            assert report.ok == (rounding == other)


def test_the_input_may_be_overwritten():
    def in_place(x):
        return fpemu.quantize(x, "e4m3", out=x)

    assert check(in_place, "e4m3").ok


# Stochastic rounding


def keyed(x, key):
    return fpemu.quantize(x, "fp16", "stochastic", key=fpemu.Key(key))


def unkeyed(**options):
    steps = iter(range(10_000))
    return lambda x: fpemu.quantize(x, "fp16", "stochastic", key=fpemu.Key(7, step=next(steps)), **options)


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("fmt", ["fp16", "e4m3fn", "e8m0", "e2m1", "tf32", "binary8p3se"])
def test_stochastic_quantize_has_nothing_wrong(fmt, overflow):
    def quantizer(x, key):
        return fpemu.quantize(x, fmt, "stochastic", overflow=overflow, key=fpemu.Key(key))

    report = check(quantizer, fmt, "stochastic", overflow=overflow)
    assert report.ok, str(report)
    properties = {"neighbour", "exact", "probability", "bias", "fresh", "same key"}
    assert {row.region for row in report.rows} == properties


def test_without_a_key_repeatability_is_not_asked_for():
    report = check(unkeyed(), "fp16", "stochastic")
    assert report.ok, str(report)
    assert "same key" not in {row.region for row in report.rows}


def test_a_format_with_all_of_float32_leaves_nothing_to_chance():
    report = check(lambda x: x, "fp32", "stochastic")
    assert report.ok and {row.region for row in report.rows} == {"neighbour", "exact"}


def test_few_random_bits_rounded_down_are_a_bias():
    report = check(unkeyed(random_bits=4, variant="A"), "fp16", "stochastic")
    assert wrong_regions(report) == {"probability", "bias"}
    bias = report.row("bias", "-").example
    assert bias.input is None and bias.wanted == 0
    assert -1 / 16 < bias.got < 0  # on average half of 2**-4 ulp, less where the fraction has few bits


def test_the_bias_of_8_random_bits_is_seen():
    # 2**-9 ulp on average, of fractions with more bits.
    report = check(unkeyed(random_bits=8, variant="A"), "fp16", "stochastic")
    assert report.row("bias").wrong and report.row("bias", "-").wrong
    assert -(2**-8) < report.row("bias").example.got < -(2**-10)
    assert check(unkeyed(random_bits=8, variant="C"), "fp16", "stochastic").row("bias").wrong == 0


def test_a_probability_of_one_half_is_caught_though_the_mean_is_right():
    rng = np.random.default_rng(0)

    def coin(x):
        up = fpemu.quantize(x, "e4m3", "toward_positive", overflow="saturate")
        down = fpemu.quantize(x, "e4m3", "toward_negative", overflow="saturate")
        return np.where(rng.random(x.size) < 0.5, up, down)

    report = check(coin, "e4m3", "stochastic", overflow="saturate")
    assert report.row("probability").wrong > 30
    assert report.row("exact").wrong == report.row("neighbour").wrong == 0


def test_rounding_to_nearest_is_not_stochastic():
    report = check(lambda x: fpemu.quantize(x, "e4m3"), "e4m3", "stochastic")
    assert wrong_regions(report) == {"probability", "fresh"} | (wrong_regions(report) & {"bias"})


def test_the_same_words_at_each_call_are_caught():
    report = check(lambda x: keyed(x, 3), "fp16", "stochastic")
    assert report.row("fresh", "").wrong == 1


def test_a_key_that_is_not_read_is_caught():
    draws = unkeyed()
    report = check(lambda x, key: draws(x), "fp16", "stochastic")
    assert wrong_regions(report) == {"same key"}
    example = report.row("same key", "").example
    assert example.got != example.wanted


def test_a_dither_that_leaves_the_neighbours_is_caught():
    rng = np.random.default_rng(0)

    def dithered(x):
        noise = rng.uniform(-1, 1, x.size) * fpemu.ulp(np.abs(x), "e4m3")
        return np.where(np.isfinite(x) & (np.abs(x) < 240), fpemu.quantize(x + noise.astype("f4"), "e4m3"), x)

    report = check(dithered, "e4m3", "stochastic")
    assert {"neighbour", "exact"} <= wrong_regions(report)


# The report


def test_the_report_is_a_table():
    first, *rows, last = str(check(ties_away, "fp16")).splitlines()
    assert first.split() == "region sign tried wrong worst: input got wanted".split()
    row = next(line for line in rows if line.startswith("tie        +"))
    example = "2.9802322387695312e-08 = 0x1p-25  5.960464477539063e-08 = 0x1p-24  0.0"
    assert row.split() == ["tie", "+", "31744", "15872", *example.split()]
    assert last.startswith("binary16, nearest_even, ieee: 31744 of ")


def test_a_report_adds_up():
    rows = (Row("tie", "+", 5, 2, Example(1.5, 1.0, 2.0)), Row("tie", "-", 5, 0, None))
    report = Report(as_format("fp16"), "nearest_even", "ieee", rows)
    assert (report.tried, report.wrong, report.ok) == (10, 2, False)
    with pytest.raises(KeyError, match=r"no row 'ties' with sign '\+'; choose from tie \+, tie -"):
        report.row("ties")


# What is refused


@pytest.mark.parametrize(
    "result, error, text",
    [
        (lambda x: x.tolist(), TypeError, "must return a numpy array or a torch tensor, got list"),
        (lambda x: x.view(np.int32), TypeError, "floating numbers that float64 holds, got dtype int32"),
        (lambda x: x[1:], ValueError, r"one number for each input, shape \(\d+,\), got shape \(\d+,\)"),
    ],
)
def test_a_result_that_is_no_array_of_numbers_is_refused(result, error, text):
    with pytest.raises(error, match=text):
        check(result, "fp16")


@pytest.mark.parametrize(
    "arguments, options, text",
    [
        (("fp17",), {}, "unknown format 'fp17'"),
        (("fp16", "nearest"), {}, "unknown rounding 'nearest'"),
        (("fp16",), {"overflow": "wrap"}, "unknown overflow 'wrap'"),
        (("fp16",), {"exhaustive": 8}, "exhaustive must be 16, 32 or None for the hard inputs, got 8"),
        (("fp16", "stochastic"), {"exhaustive": 16}, "does not apply to rounding='stochastic'"),
        (
            ("fp16", "stochastic"),
            {"repeats": 1},
            "repeats must be at least 2 .*, got 1",
        ),
        ((Format("wide", 11, 20),), {}, "float32 cannot hold all of that"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, text):
    with pytest.raises(ValueError, match=text):
        check(lambda x: x, *arguments, **options)
    with pytest.raises(TypeError, match="quantizer must be a function of one array, got 'fp16'"):
        check("fp16", "fp16")


# Strategies


@given(data=st.data(), fmt=formats())
def test_values_are_values_and_float32_holds_them(data, fmt):
    x = data.draw(values(fmt))
    with np.errstate(invalid="ignore"):
        assert same(float(np.float32(x)), x)
    # Unless the format has no such value: then rounding leaves what decode made of the code.
    assert same(round_value(x, fmt), x)


@given(data=st.data(), fmt=formats())
def test_formats_are_carried_by_float32(data, fmt):
    x = np.array([data.draw(hard_inputs(fmt))])
    assert x.dtype == np.float32
    assert same(fpemu.quantize(x, fmt).astype(np.float64), np.array([round_value(float(x[0]), fmt)]))


@pytest.mark.parametrize(
    "wanted",
    [
        lambda fmt: fmt.specials == "p3109e" and not fmt.signed,
        lambda fmt: fmt.name == "custom" and not fmt.subnormal,
        lambda fmt: fmt.name == "e4m3fn",
        lambda fmt: fmt.precision == 1,
    ],
)
def test_formats_of_every_kind_are_drawn(wanted):
    from hypothesis import find

    assert wanted(find(formats(), wanted))


@pytest.mark.parametrize(
    "x",
    [
        2**-25,  # the tie of zero and the smallest
        -(2**-25) + 2**-49,
        2**-14 - 2**-25,  # the tie below the smallest normal
        65504,
        65520,  # the tie beyond the largest
        -65520 + 2**-8,
        INF,
        -0.0,
        NAN,
    ],
)
def test_hard_inputs_hold_what_is_hard(x):
    from hypothesis import find

    found = find(
        hard_inputs("fp16"),
        lambda y: same(float(y), float(x)),
        settings=settings(max_examples=50_000, database=None),
    )
    assert same(found, np.float32(x))


def test_strategies_say_how_to_get_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for make in (formats, lambda: values("fp16"), lambda: hard_inputs("fp16")):
        with pytest.raises(ImportError, match=r"needs hypothesis; install it: pip install 'fpemu\[test\]'"):
            make()
    assert check(lambda x: x.astype(np.float16), "fp16").ok


# The command


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nimport fpemu\n\nnumber = 1\n\n"
        "def half(x):\n    return x.astype(np.float16)\n\n"
        "def away(x):\n    return fpemu.quantize(x, 'fp16', 'nearest_away')\n\n"
        "def codes(x):\n    return fpemu.encode(x, 'fp16')\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *words: CliRunner().invoke(app, ["check", *words])
    sys.modules.pop("mine", None)


def test_the_command_prints_the_report(run):
    result = run("mine:half", "fp16")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{check(lambda x: x.astype(np.float16), 'fp16')}\n"


def test_the_command_exits_with_1_if_anything_is_wrong(run):
    result = run("mine:away", "fp16")
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout == f"{check(ties_away, 'fp16')}\n"
    assert run("mine:away", "fp16", "--rounding", "nearest_away").exit_code == 0
    assert run("mine:half", "fp16", "--overflow", "saturate").exit_code == 1
    assert "0 of 65536 wrong" in run("mine:half", "fp16", "--exhaustive", "16").stdout


@pytest.mark.parametrize(
    "words, text",
    [
        (["mine.half", "fp16"], "a quantizer is given as package.module:function, got 'mine.half'"),
        (["theirs:half", "fp16"], "cannot import 'theirs': ModuleNotFoundError: No module named 'theirs'"),
        (["broken:half", "fp16"], "cannot import 'broken': ZeroDivisionError: division by zero"),
        (["mine:quarter", "fp16"], "'mine' has no 'quarter'; give the name of a function in it"),
        (["mine:number", "fp16"], "'mine:number' is no function but 1"),
        (["mine:half", "fp17"], "unknown format 'fp17'"),
        (["mine:half", "fp16", "--exhaustive", "8"], "exhaustive must be 16, 32 or None"),
        (["mine:codes", "fp16"], "got dtype uint16; decode codes and scale integers first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, words, text):
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("fpemu: ") and text in result.stderr
    assert result.stderr.count("\n") == 1


# The page of other libraries


def test_the_script_of_peers_leaves_out_what_is_not_installed(capsys, monkeypatch):
    script = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "docs" / "peers.py"))
    monkeypatch.setitem(sys.modules, "qtorch", None)
    monkeypatch.setitem(sys.modules, "pychop", None)
    for name in ("torch", "gfloat", "ml_dtypes"):
        script["PEERS"].pop(name)
    script["main"]()
    printed = capsys.readouterr().out
    assert "qtorch left out: ModuleNotFoundError" in printed
    assert f"numpy {np.__version__}  nearest_even  binary16\n" in printed
    assert f"numpy {np.__version__}  binary16  0 of 2048\n" in printed


def test_the_script_of_peers_sees_double_rounding():
    rounded_twice = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "docs" / "peers.py"))[
        "rounded_twice"
    ]
    # float32 takes the number for the tie, which goes the wrong way in half of the cases.
    assert rounded_twice(lambda x: x.astype(np.float32).astype(np.float16), "fp16") == "1024 of 2048"
    assert rounded_twice(lambda x: fpemu.quantize(x, "fp16"), "fp16") == "0 of 2048"
