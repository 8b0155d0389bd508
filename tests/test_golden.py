"""Casts and decodings from public bug reports, each with the right value: golden/format_cases.jsonl."""

from __future__ import annotations

import json
import pathlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from same import same

import fpemu
from fpemu import reference
from fpemu.formats import E8M0FNU, Format

CASES = pathlib.Path(__file__).with_name("golden") / "format_cases.jsonl"
LINES = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
DECODE = [row for row in LINES[1:] if row["rounding"] == "decode"]
STOCHASTIC = [row for row in LINES[1:] if row["rounding"] == "stochastic"]
CAST = [row for row in LINES[1:] if row["rounding"] not in ("decode", "stochastic")]


def rows(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in cases])


def float_rows(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in cases if row["input_dtype"] in ("float32", "float64")]


def make_format(name: str, d: dict[str, Any]) -> Format:
    if d["kind"] == "e8m0":
        return E8M0FNU
    sizes = d["exp_bits"], d["man_bits"] + 1, d["bias"]
    return Format(name, *sizes, d["kind"], bool(d["subnormals"]), bool(d["signed"]))


FORMATS = {name: make_format(name, definition) for name, definition in LINES[0]["formats"].items()}


def given_value(row: dict[str, Any]) -> int | float:
    """The exact input of a cast."""
    bits = int(row["input_bits"], 16)
    if row["input_dtype"] == "int64":
        return bits
    width = {"float32": 32, "float64": 64}[row["input_dtype"]]
    return float(np.array(bits, f"u{width // 8}").view(row["input_dtype"]))


def from_bits(bits: str) -> float:
    return float(np.array(int(bits, 16), np.uint32).view(np.float32))


def words(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Random words around the one where a stochastic case goes up, and the right value for each.

    With probability P it goes up, so the P * 2**32 highest words must; each P here is a multiple of 2**-32.
    """
    ends = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    if row["p_hi"] is None:
        return [(word, from_bits(row["expected_bits"])) for word in ends]
    threshold = 2**32 - Fraction(row["p_hi"]) * 2**32
    assert threshold.denominator == 1
    near = [word for word in (int(threshold) - 1, int(threshold)) if word < 2**32]
    return [(w, from_bits(row["hi_bits"] if w >= threshold else row["lo_bits"])) for w in ends + near]


def test_every_line_is_a_case():
    assert len(LINES) == 141
    assert len({row["id"] for row in LINES[1:]}) == len(DECODE) + len(STOCHASTIC) + len(CAST) == 140


@rows(CAST)
def test_reference_rounds(row):
    fmt = FORMATS[row["format"]]
    got = reference.round_value(given_value(row), fmt, row["rounding"], overflow=row["overflow"])
    assert same(got, from_bits(row["expected_bits"]))
    if "expected_code" in row:
        assert reference.encode(got, fmt) == int(row["expected_code"], 16)


@rows(DECODE)
def test_reference_decodes(row):
    got = reference.decode(int(row["input_bits"], 16), FORMATS[row["input_dtype"]])
    assert same(got, from_bits(row["expected_bits"]))


@rows(STOCHASTIC)
def test_reference_rounds_up_from_the_right_word_on(row):
    x, fmt = given_value(row), FORMATS[row["format"]]
    for word, expected in words(row):
        got = reference.round_value(x, fmt, "stochastic", overflow=row["overflow"], word=word)
        assert same(got, expected), f"word {word:#x}"


@rows(float_rows(CAST))
def test_quantize_rounds(row):
    x, fmt = np.full(3, given_value(row), row["input_dtype"]), FORMATS[row["format"]]
    expected = np.full(3, from_bits(row["expected_bits"]), row["input_dtype"])
    assert same(fpemu.quantize(x, fmt, row["rounding"], overflow=row["overflow"]), expected)
    if "expected_code" in row:
        codes = fpemu.encode(x, fmt, row["rounding"], overflow=row["overflow"])
        assert codes.tolist() == [int(row["expected_code"], 16)] * 3


@rows(DECODE)
def test_decode_of_arrays(row):
    fmt = FORMATS[row["input_dtype"]]
    codes = np.full(3, int(row["input_bits"], 16), np.uint8 if fmt.bits <= 8 else np.uint16)
    assert same(fpemu.decode(codes, fmt), np.full(3, from_bits(row["expected_bits"]), np.float32))


@rows(float_rows(STOCHASTIC))
def test_quantize_rounds_up_where_the_key_says(row):
    n, key = 3000, fpemu.Key(1)
    x, fmt = np.full(n, given_value(row), row["input_dtype"]), FORMATS[row["format"]]
    got = fpemu.quantize(x, fmt, "stochastic", overflow=row["overflow"], key=key)
    if row["p_hi"] is None:
        expected = np.full(n, from_bits(row["expected_bits"]), x.dtype)
    else:
        up = np.array([key.word(i) for i in range(n)]) >= 2**32 - int(Fraction(row["p_hi"]) * 2**32)
        expected = np.where(up, from_bits(row["hi_bits"]), from_bits(row["lo_bits"])).astype(x.dtype)
    assert same(got, expected)
