"""The command: what it prints, and one line about bad input."""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from pyarrow import parquet
from typer.testing import CliRunner

import fpemu
from fpemu import Key, reference
from fpemu.__main__ import app
from fpemu.bench_gemm import WAYS
from fpemu.formats import ALIASES, NAMED, ROUNDINGS

ROOT = pathlib.Path(fpemu.__file__).parent.parent


def run(*arguments: str) -> str:
    """What a command prints; it must succeed and print nothing on stderr."""
    result = CliRunner().invoke(app, list(arguments))
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def process(*arguments: str, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``python -m fpemu`` as a process of its own."""
    command = [sys.executable, "-m", "fpemu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def fields(output: str) -> dict[str, str]:
    """First word of each line -> the rest."""
    return {name: rest for name, _, rest in (line.partition("  ") for line in output.splitlines())}


# formats, show


def test_formats_lists_every_named_format_with_its_limits():
    head, *lines = run("formats").splitlines()
    assert head.split()[:4] == ["name", "bits", "largest", "smallest"]
    assert [line.split()[0] for line in lines] == [f.name for f in NAMED]
    for line, f in zip(lines, NAMED, strict=True):
        name, bits, largest, normal, smallest, eps, *aliases = line.split()
        assert (int(bits), largest, aliases) == (f.bits, f"{f.max:.6g}", list(ALIASES[f.name])), name
        for text, value in ((normal, f.smallest_normal), (smallest, f.smallest_subnormal), (eps, f.eps)):
            assert 2.0 ** int(text.removeprefix("2^")) == value


def test_show_has_the_limits_of_e4m3fn_and_all_256_values():
    text, _, table = run("show", "e4m3fn").partition("\n\n")
    assert text.splitlines()[0] == "e4m3fn"
    limits = dict(line.split(maxsplit=1) for line in text.splitlines()[1:] if "smallest normal" not in line)
    assert limits["bits"] == "8: 1 sign, 4 exponent, 3 fraction"
    assert limits["largest"] == "448.0" and limits["smallest"] == "2^-9 = 0.001953125"
    assert limits["exponents"] == "-6 to 8" and limits["eps"] == "2^-3 = 0.125"
    assert (limits["infinity"], limits["NaN"], limits["-0.0"], limits["subnormals"]) == ("no", *["yes"] * 3)
    head, *rows = table.splitlines()
    assert head == "code  value" and len(rows) == 256
    for code, row in enumerate(rows):
        assert row == f"0x{code:02x}  {reference.decode(code, 'e4m3fn')!r}"


@pytest.mark.parametrize(
    "name, codes", [("fp16", 0), ("bf16", 0), ("e2m1", 16), ("e3m2", 64), ("e8m0fnu", 256)]
)
def test_show_lists_values_of_up_to_8_bits(name, codes):
    output = run("show", name)
    assert output.count("0x") == codes and ("code  value" in output) == bool(codes)


@pytest.mark.parametrize("name", [f.name for f in NAMED])
def test_show_takes_every_named_format(name):
    assert run("show", name).startswith(f"{name}\n")


# round


def values(output: str) -> tuple[float, int]:
    """Value and code of a round command's output."""
    found = fields(output)
    return float(found["value"].split()[0]), int(found["code"].split()[0], 16)


@pytest.mark.parametrize(
    "text, exact",
    [
        ("0.1", Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        ("-1/3", Fraction(-1, 3)),
        ("0x1.8p-3", Fraction(3, 16)),
        ("-0x1.8P-3", Fraction(-3, 16)),
        ("0x.8", Fraction(1, 2)),
        ("0xffp0", Fraction(255)),
        ("+2", Fraction(2)),
        ("-1.5e-8", Fraction(-15, 10**9)),
        ("-.5", Fraction(-1, 2)),
        ("1e-7", Fraction(1, 10**7)),
        ("65519.99", Fraction(6551999, 100)),
        ("65520", Fraction(65520)),
        # A float between them and the format would round twice: to 1 + 2**-11, then to even.
        ("1.00048828125000000000000000000001", 1 + Fraction(1, 2**11) + Fraction(1, 10**32)),
        ("0x1.00200000000000000000001p0", 1 + Fraction(1, 2**11) + Fraction(1, 2**92)),
        ("0x1p-1080", Fraction(1, 2**1080)),
        ("1e400", Fraction(10**400)),
        ("-1e-400", Fraction(-1, 10**400)),
    ],
)
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_positive", "toward_negative"])
def test_a_number_is_rounded_once_exactly_as_it_is_written(text, exact, rounding):
    value, code = values(run("round", text, "fp16", "--rounding", rounding))
    expected = reference.round_value(exact, "fp16", rounding)
    assert struct.pack("d", value) == struct.pack("d", expected)
    assert code == reference.encode(expected, "fp16")


def test_round_shows_value_code_and_error():
    # 0.1 in binary16 is 0x2e66 = 1638 * 2**-14, as numpy's float16(0.1) prints it.
    assert run("round", "0.1", "fp16") == (
        "value  0.0999755859375 = 0x1.9980000000000p-4\n"
        "code   0x2e66 = 0 01011 1001100110\n"
        "error  -2.44141e-05, 0.000244 of the value\n"
    )
    assert run("round", "2", "e2m1").splitlines()[1:] == ["code   0x4 = 0 10 0", "error  0, 0 of the value"]


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["1e400", "e4m3fn", "--overflow", "saturate"], "-1e+400, 1 of the value"),
        (["1e-400", "fp16"], "-1e-400, 1 of the value"),
        (["1e-400", "fp16", "--rounding", "toward_positive"], "5.96046e-08, 5.96e+392 of the value"),
        (["0", "fp16"], "0"),
    ],
)
def test_errors_beyond_the_range_of_float_are_shown(arguments, error):
    found = fields(run("round", *arguments))["error"]
    for got, wanted in zip(found.split(), error.split(), strict=True):
        if wanted[-1].isdigit() or wanted[-1] == ",":
            assert Decimal(got.strip(",")) == Decimal(wanted.strip(","))


@pytest.mark.parametrize(
    "text, fmt, value, code",
    [
        ("inf", "fp16", "inf", 0x7C00),
        ("-Infinity", "fp16", "-inf", 0xFC00),
        ("nan", "fp16", "nan", 0x7E00),
        ("-0", "fp16", "-0.0", 0x8000),
        ("-0.0", "fp16", "-0.0", 0x8000),
        ("-0x0p0", "fp16", "-0.0", 0x8000),
        ("0", "fp16", "0.0", 0),
        ("-0", "e4m3fnuz", "0.0", 0),
        ("inf", "e4m3fn", "nan", 0x7F),
        ("464", "e4m3fn", "448.0", 0x7E),
        ("-1", "e8m0fnu", "nan", 0xFF),
    ],
)
def test_special_values_have_a_code_and_no_error_line(text, fmt, value, code):
    output = run("round", text, fmt)
    assert fields(output)["value"].split()[0] == value
    assert values(output)[1] == code
    if value in ("inf", "-inf", "nan", "-0.0"):
        assert "error" not in output


def test_nan_in_a_format_without_it_has_no_code():
    assert fields(run("round", "nan", "e2m1"))["code"].strip() == "none: e2m1 has no NaN"


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if r != "stochastic"])
@pytest.mark.parametrize("text", ["1.3", "-1.3", "0.5", "500", "-500", "1e-9"])
def test_every_rounding_and_overflow_is_that_of_the_reference(rounding, text):
    for overflow in ("ieee", "saturate", "propagate"):
        value, _ = values(run("round", text, "e4m3fn", "--rounding", rounding, "--overflow", overflow))
        expected = reference.round_value(Fraction(text), "e4m3fn", rounding, overflow=overflow)
        assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_stochastic_rounding_draws_the_first_word_of_its_seed():
    drawn = set()
    for seed in range(20):
        value, _ = values(run("round", "1.05", "e4m3fn", "--rounding", "stochastic", "--seed", str(seed)))
        word = Key(seed).word(0)
        assert value == reference.round_value(Fraction("1.05"), "e4m3fn", "stochastic", word=word)
        drawn.add(value)
    assert drawn == {1.0, 1.125}


# Bad input


BAD = {
    "unknown format": (["show", "fp17"], "'fp17'"),
    "unknown format to round to": (["round", "1", "fp17"], "'fp17'"),
    "no number": (
        ["round", "one", "fp16"],
        "'one' is no number; write 0.1, 1/3, -2e-8, 0x1.8p-3, inf or nan",
    ),
    "division by zero": (["round", "1/0", "fp16"], "'1/0' is no number"),
    "no digits": (["round", "0xp3", "fp16"], "'0xp3' is no number"),
    "no text": (["round", "", "fp16"], "'' is no number"),
    "huge exponent": (["round", "1e999999999", "fp16"], "the exponent of '1e999999999' is out of reach"),
    "huge hexadecimal exponent": (["round", "0x1p-999999999", "fp16"], "is out of reach; write at most five"),
    "unknown rounding": (
        ["round", "1", "fp16", "--rounding", "up"],
        "unknown rounding 'up'; choose from nearest",
    ),
    "unknown overflow": (
        ["round", "1", "fp16", "--overflow", "wrap"],
        "unknown overflow 'wrap'; choose from ieee",
    ),
    "bad seed": (
        ["round", "1", "fp16", "--rounding", "stochastic", "--seed", "-1"],
        "0 <= seed < 2**32, got -1",
    ),
    "unknown strategy": (
        ["ablate", "--strategies", "fp17"],
        "unknown strategy 'fp17'; choose from fp32, mixed",
    ),
    "strategy twice": (["ablate", "--strategies", "fp32,fp32"], "two strategies are called 'fp32'"),
    "missing strategy file": (["ablate", "--strategies", "gone.toml"], "cannot read strategy file gone.toml"),
    "unknown data": (
        ["ablate", "--data", "mnist"],
        "unknown data 'mnist'; choose digits, pydoc or fashion-mnist:DIR",
    ),
    "missing data": (
        ["ablate", "--data", "fashion-mnist:gone"],
        "data directory gone does not exist; it must",
    ),
    "no seeds": (["ablate", "--seeds", "0"], "seeds must be at least 1, got 0"),
    "no workers": (["ablate", "--workers", "0"], "workers must be at least 1, got 0"),
    "negative lr": (["ablate", "--lr", "-0.1"], "lr must be a positive number, got -0.1"),
    "lr no number": (["ablate", "--lr", "nan"], "lr must be a positive number, got nan"),
    "momentum": (["ablate", "--momentum", "1"], "momentum must be at least 0 and below 1, got 1.0"),
    "batch": (["ablate", "--batch", "0"], "batch must be at least 1, got 0"),
    "epochs": (["ablate", "--epochs", "0"], "epochs must be at least 1, got 0"),
    "steps": (["ablate", "--steps", "0"], "steps must be at least 1, got 0"),
    "warm-up": (["ablate", "--warmup", "-1"], "warmup must be at least 0, got -1"),
    "warm-up of the grid": (["ablate", "--grid", "--warmup", "-1"], "warmup must be at least 0, got -1"),
    "unknown model": (["ablate", "--model", "vgg"], "unknown model 'vgg'; choose from mlp, resnet8, gru, tr"),
    "unknown optimizer": (
        ["ablate", "--optimizer", "lion"],
        "unknown optimizer 'lion'; choose from sgd, adam",
    ),
    "text for images": (["ablate", "--data", "pydoc"], "model mlp takes images: digits or fashion-mnist:DIR"),
    "images for text": (["ablate", "--model", "gru", "--data", "digits"], "model gru takes text: pydoc; got"),
    "data twice": (["ablate", "--data", "digits", "--data-dir", "x"], "both name data; give one"),
    "missing data directory": (["ablate", "--data-dir", "gone"], "data directory gone does not exist"),
    "strategies of a grid": (["ablate", "--grid", "--strategies", "fp32"], "leave out --strategies"),
    "formats without grid": (["ablate", "--formats", "fp16"], "--formats is for --grid; add it"),
    "roundings without grid": (["ablate", "--roundings", "nearest"], "--roundings is for --grid; add it"),
    "scales without grid": (["ablate", "--scales", "8"], "--scales is for --grid; add it"),
    "quick without grid": (["ablate", "--quick"], "--quick is for --grid; add it"),
    "format of the grid": (["ablate", "--grid", "--formats", "fp17"], "'fp17'"),
    "rounding of the grid": (["ablate", "--grid", "--roundings", "up"], "unknown rounding 'up' of a grid"),
    "scale of the grid": (["ablate", "--grid", "--scales", "big"], "a number, none or dynamic; got 'big'"),
    "seeds of the grid": (["ablate", "--grid", "--seeds", "0"], "seeds must be at least 1, got 0"),
}


def one_line(result, message: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that begins with the command's name."""
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("fpemu: ") and message in line


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_line_and_no_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[name]
    one_line(CliRunner().invoke(app, arguments), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content, message",
    [
        ("policy.weight = 'fp17'", "bad.toml: policy.weight of strategy 'bad': "),
        ("x =", "strategy file bad.toml is not valid toml: "),
        ("policy = {weight = 'fp16', include = 'conv*'}", "pattern 'conv*' matches none of the 6 modules"),
        ("optimizer.kahan = true", "bad.toml: optimizer of strategy 'bad': "),
    ],
)
def test_a_bad_strategy_file_gives_one_line_and_no_directory(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text(content)
    one_line(CliRunner().invoke(app, ["ablate", "--strategies", "bad.toml"]), message)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"]


def test_damaged_files_and_directories_give_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("{}")
    one_line(CliRunner().invoke(app, ["ablate", "--out", "out"]), "does not hold results of ablate")
    assert (tmp_path / "out" / "results.json").read_text() == "{}"
    one_line(CliRunner().invoke(app, ["ablate", "--out", "out/results.json"]), "results.json")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"damaged")
    one_line(CliRunner().invoke(app, ["ablate", "--data", "fashion-mnist:."]), "train-images-idx3-ubyte.gz")


def test_bad_input_in_a_real_process_shows_no_traceback(tmp_path):
    result = process("ablate", "--seeds", "0", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "fpemu: seeds must be at least 1, got 0\n"
    assert list(tmp_path.iterdir()) == []


# ablate, bench, help


LOW_RATE = "The learning rate is low on purpose"


def test_ablate_prints_a_table_and_where_the_files_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('policy = {gradient = "e5m2"}\nloss_scale = "dynamic"\n')
    arguments = ["ablate", "--strategies", "fp16-nearest,mine.toml", "--epochs", "2", "--batch", "128"]
    arguments += ["--workers", "1", "--seeds", "2", "--out", "runs[a]"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    head, columns, nearest, mine, where, low = result.stdout.splitlines()
    assert columns.split()[0] == "strategy" and "test" in head
    assert nearest.split()[0] == "fp16-nearest" and mine.split()[0] == "mine" and "±" in mine
    assert where == (
        "results.json, gradients.png and losses.png are in runs[a]/. "
        "Means of 2 seeds, ± sample standard deviation."
    )
    assert low.startswith(LOW_RATE)
    assert "4/4" in result.stderr
    names = ["gradients.png", "losses.png", "results.json"]
    assert sorted(p.name for p in (tmp_path / "runs[a]").iterdir()) == names
    content = json.loads((tmp_path / "runs[a]" / "results.json").read_text())
    assert [entry["strategy"]["name"] for entry in content["results"]] == ["fp16-nearest"] * 2 + ["mine"] * 2
    again = CliRunner().invoke(app, arguments)
    assert again.stdout == result.stdout


@pytest.mark.parametrize(
    "options, low", [(["--lr", "0.1"], False), (["--momentum", "0.9"], False), (["--lr", "0.009"], True)]
)
def test_the_sentence_about_the_rate_comes_only_with_a_low_one(options, low, tmp_path):
    arguments = ["ablate", "--strategies", "fp32", "--epochs", "1", "--batch", "256", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0 and (LOW_RATE in result.stdout) == low
    assert "Means of" not in result.stdout


def test_ablate_where_everything_diverges_still_ends_with_a_table(tmp_path):
    arguments = ["ablate", "--strategies", "fp32,mixed", "--epochs", "2", "--lr", "1e6", "--workers", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0 and result.stdout.splitlines()[2].split()[:3:2] == ["fp32", "nan"]


def test_the_grid_writes_a_table_and_a_figure_and_says_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["ablate", "--grid", "--quick", "--formats", "bf16", "--roundings", "nearest, kahan"]
    arguments += [
        "--scales",
        "none,8",
        "--epochs",
        "1",
        "--batch",
        "256",
        "--workers",
        "1",
        "--out",
        "runs[a]",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    # FP32; weights in both roundings, four other parts; gradients scaled; everything in both, scaled or not.
    runs = 1 + 2 + 4 + 1 + 4 + (1 + 4)
    where, low = result.stdout.splitlines()
    assert where == f"results.parquet, of {runs} runs, and grid.png are in runs[a]/."
    assert low.startswith(LOW_RATE) and f"{runs}/{runs}" in result.stderr
    names = ["grid.png", "results.json", "results.parquet"]
    assert sorted(p.name for p in (tmp_path / "runs[a]").iterdir()) == names
    table = parquet.read_table(tmp_path / "runs[a]" / "results.parquet").to_pylist()
    assert {(row["model"], row["data"], row["lr"], row["steps"]) for row in table} == {
        ("mlp", "digits", 0.001, 6)
    }
    assert [row["warmup"] for row in table] == [0] * 12 + [100] * 5


def test_a_model_of_text_trains_on_pydoc_with_its_own_preset(tmp_path, monkeypatch):
    # As an attribute of the package, "train" is the function.
    monkeypatch.setattr(importlib.import_module("fpemu.experiments.train"), "SAMPLE", 64)
    arguments = ["ablate", "--model", "gru", "--strategies", "fp32", "--steps", "1", "--batch", "9"]
    result = CliRunner().invoke(
        app, [*arguments, "--optimizer", "adam", "--lr", "0.5", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0 and LOW_RATE not in result.stdout
    (entry,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert entry["settings"] | {"epochs": 0} == {
        "data": "pydoc", "lr": 0.5, "momentum": 0.0, "batch": 9, "epochs": 0, "model": "gru",
        "optimizer": "adam", "warmup": 0, "steps": 1,
    }  # fmt: skip


def test_bench_prints_a_ratio_for_every_case():
    output = run("bench", "--size-log2", "12", "--repeats", "1")
    assert "4096 float32, one thread, medians" in output
    for fmt in ("fp16", "bf16", "e5m2", "e4m3fn"):
        for rounding in ("nearest_even", "stochastic"):
            assert f"{fmt} {rounding}" in output
    assert output.endswith(" µs a call\n")


def test_bench_training_prints_a_ratio_for_both_models():
    output = run("bench", "--training", "--repeats", "1")
    title, head, *rows, step, batch = output.splitlines()
    assert title.startswith("training steps on cpu, torch threads: ") and title.endswith(", medians of 1")
    assert head.split() == ["model", "fp32", "ms", "fp16", "ms", "ratio", "not", "counted", "ms", "ratio"]
    assert [row.split()[0] for row in rows] == ["resnet8", "transformer"]
    assert all(float(number) > 0 for row in rows for number in row.split()[1:])
    assert step.startswith("a step: ") and batch == (
        "a batch: resnet8, 64 images of 28 x 28 pixels; transformer, 16 texts of 64 characters"
    )


def test_bench_gemm_prints_a_rate_for_every_way():
    output = run("bench", "--gemm", "--size-log2", "10", "--repeats", "1")
    assert "32 x 32 float32, " in output
    for name in WAYS:
        assert re.search(rf"^ *{re.escape(name)} +[\d.]+ +[\d.]+ +[\d.]+ *$", output, re.MULTILINE), name
    result = CliRunner().invoke(app, ["bench", "--gemm", "--training"])
    assert result.exit_code == 2
    assert result.stderr == "fpemu: bench --gemm runs on the CPU, and without --training\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_bench_says_that_there_is_no_card():
    for arguments in (["--device", "cuda"], ["--training", "--device", "cuda"]):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "fpemu: bench --device cuda needs a CUDA device, and torch sees none\n"
    result = CliRunner().invoke(app, ["bench", "--training", "--device", "tpu"])
    assert result.exit_code == 2 and "unknown device 'tpu'; choose from cpu, cuda" in result.stderr


def test_help_lists_the_commands():
    result = process("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for command in ("ablate", "bench", "formats", "show", "round"):
        assert f"\n  {command} " in result.stdout


def test_help_alone_and_a_wrong_command_are_told_apart():
    assert "Commands:" in CliRunner().invoke(app, ["--help"]).stdout
    result = CliRunner().invoke(app, ["rond"])
    assert result.exit_code == 2 and "No such command 'rond'" in result.stderr


@pytest.fixture
def recorded(tmp_path):
    model = torch.nn.Linear(4, 2)
    with fpemu.Recorder(tmp_path / "run", every=1).watch(model) as recorder:
        (model(torch.ones(3, 4)).sum() * 2.0**-26).backward()
        recorder.step()
    return tmp_path / "run"


def test_report_writes_a_page_and_prints_its_summary(recorded, tmp_path):
    out = tmp_path / "page.html"
    lines = run("report", str(recorded), "-o", str(out), "--format", "e5m2").splitlines()
    assert lines[1].startswith(
        "The model loses 100.0% of its activation gradients in e5m2; a loss scale of 2^"
    )
    assert lines[-1] == f"The page is {out}."
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_watch_shows_a_run_that_has_ended_once(recorded):
    text = run("watch", str(recorded))
    assert "ended, step 0" in text and "weight_gradient" in text


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_run_that_is_not_there_is_one_line(command, tmp_path):
    option = ["--once"] if command == "watch" else []
    result = CliRunner().invoke(app, [command, str(tmp_path / "none"), *option])
    if command == "watch":  # it may begin later
        assert result.exit_code == 0 and "nothing was recorded yet" in result.output
    else:
        assert result.exit_code == 2
        assert result.stderr.startswith("fpemu: no directory ") and result.stderr.count("\n") == 1


def test_watch_refuses_an_unknown_format(recorded):
    result = CliRunner().invoke(app, ["watch", str(recorded), "--format", "fp17"])
    assert result.exit_code == 2 and "unknown format 'fp17'" in result.stderr
