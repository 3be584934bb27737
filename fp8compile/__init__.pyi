"""The public names with their types; ``__init__.py`` imports each where it is first used."""

from fp8compile import amp, optim
from fp8compile._version import __version__
from fp8compile.analysis.sensitivity.declared import declare
from fp8compile.compiler.running_model import mark_head
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.calibrate import calibrate
from fp8compile.tools.checking.check import check
from fp8compile.tools.compile_blocks import compile_blocks
from fp8compile.tools.explain import explain, report
from fp8compile.tools.set_recipe import set_recipe
from fp8compile.whole_step.step import train_step

__all__ = [
    "Recipe",
    "__version__",
    "amp",
    "calibrate",
    "check",
    "compile_blocks",
    "declare",
    "explain",
    "mark_head",
    "optim",
    "report",
    "set_recipe",
    "train_step",
]
