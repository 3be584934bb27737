"""The tools with their types; ``__init__.py`` imports each where it is first used."""

from fp8compile.linears.state import scaling_state
from fp8compile.observe.overflow_report import overflow_report
from fp8compile.tools.choosing_bits import calibrate_bits
from fp8compile.tools.debugging import debug_step
from fp8compile.tools.tuning.tune import tune

__all__ = ["calibrate_bits", "debug_step", "overflow_report", "scaling_state", "tune"]
