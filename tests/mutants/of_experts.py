"""Faults in experts' grouped matmuls in FP8."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NUMBERS = ("tests/numerics/test_grouped_scales.py",)
MATMULS = ("tests/passes/test_quantize_linears_experts.py",)

EXPERTS = (
    Mutant(
        "experts: a row at an end is the expert's before it",
        "fp8compile/numerics/grouped_scales.py",
        "right=True",
        "right=False",
        NUMBERS,
    ),
    Mutant(
        "experts: rows of no one count in the last expert's scales",
        "fp8compile/numerics/grouped_scales.py",
        "amax.scatter_reduce(0, expert_T.long()",
        "amax.scatter_reduce(0, expert_T.long().clamp_max(experts - 1)",
        NUMBERS,
    ),
    Mutant(
        "experts: parts lie beside one another, without a multiple",
        "fp8compile/numerics/grouped_scales.py",
        ".clamp_min(1) * FP8_MULTIPLE",
        ".clamp_min(1) * (FP8_MULTIPLE - 1)",
        NUMBERS,
    ),
    Mutant(
        "experts: a weight's scales run along its columns",
        "fp8compile/linears/expert_matmuls.py",
        "across = len(views) % 2 == 0",
        "across = len(views) % 2 == 1",
        MATMULS,
    ),
    Mutant(
        "experts: auto has them on a device whose rates are known",
        "fp8compile/linears/expert_reasons.py",
        'recipe.linears.mode == "auto" and rates is not None',
        'recipe.linears.mode == "auto" and rates is None',
        MATMULS,
    ),
    Mutant(
        "experts: routers are in FP8",
        "fp8compile/linears/reasons.py",
        "or (forward in self.routers and ROUTER)",
        "",
        MATMULS,
    ),
)
