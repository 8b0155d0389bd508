"""`emulate`: rounding put into a model by hooks, and taken out again without a trace."""

from .attach import Emulation, emulate
from .audit import Audit
from .report import Report

__all__ = ["Audit", "Emulation", "Report", "emulate"]
