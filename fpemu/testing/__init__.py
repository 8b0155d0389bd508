"""Checks for any quantizer, one's own included, and hypothesis strategies for tests of one's own."""

from .conformance import check
from .report import Example, Report, Row
from .strategies import formats, hard_inputs, values

__all__ = ["Example", "Report", "Row", "check", "formats", "hard_inputs", "values"]
