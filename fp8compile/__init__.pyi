"""The public names with their types; ``__init__.py`` imports each where it is first used."""

from fp8compile import amp, optim
from fp8compile._version import __version__
from fp8compile.analysis.sensitivity.declared import declare
from fp8compile.compiler.running_model import mark_head
from fp8compile.observe.overflow_report import OverflowReport, overflow_report
from fp8compile.optim.compress import compress, decompress
from fp8compile.recipe.calibration import Calibration
from fp8compile.recipe.recipe import Recipe
from fp8compile.recipe.saved_bits import SavedBits
from fp8compile.reporting.memory import Fit
from fp8compile.reporting.report import Report
from fp8compile.scaling.state import scaling_state
from fp8compile.tools.calibrate import calibrate
from fp8compile.tools.calibrate_bits import calibrate_bits
from fp8compile.tools.checking.check import Check, check
from fp8compile.tools.compile_blocks import CompiledBlocks, compile_blocks
from fp8compile.tools.debug_step import debug_step
from fp8compile.tools.explain import explain, report
from fp8compile.tools.first_non_finite import FirstNonFinite
from fp8compile.tools.set_recipe import set_recipe
from fp8compile.watching.watcher import Watcher, watch
from fp8compile.whole_step.step import TrainStep, train_step
from fp8compile.whole_step.told import WholeStep

__all__ = [
    "Calibration",
    "Check",
    "CompiledBlocks",
    "FirstNonFinite",
    "Fit",
    "OverflowReport",
    "Recipe",
    "Report",
    "SavedBits",
    "TrainStep",
    "Watcher",
    "WholeStep",
    "__version__",
    "amp",
    "calibrate",
    "calibrate_bits",
    "check",
    "compile_blocks",
    "compress",
    "debug_step",
    "declare",
    "decompress",
    "explain",
    "mark_head",
    "optim",
    "overflow_report",
    "report",
    "scaling_state",
    "set_recipe",
    "train_step",
    "watch",
]
