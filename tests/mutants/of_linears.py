"""Faults in which linears are in FP8, and in how SwiGLU is smoothed for one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SMOOTH = ("tests/linears/test_smooth_swiglu.py",)
SMOOTH_NUMBERS = ("tests/numerics/test_smoothing.py",)

COST = ("tests/cost/test_linear_cost.py",)
PAYING = ("tests/linears/test_paying.py",)

LINEARS = (
    Mutant(
        "smooth SwiGLU: all of a channel's spread goes to the weight",
        "fp8compile/numerics/smoothing.py",
        "return (above >> 1).clamp_max(MOST)",
        "return above.clamp_max(MOST)",
        SMOOTH_NUMBERS,
    ),
    Mutant(
        "smooth SwiGLU: channels of zeros have a say",
        "fp8compile/numerics/smoothing.py",
        "known = (biased > 0) &",
        "known = (biased >= 0) &",
        SMOOTH_NUMBERS,
    ),
    Mutant(
        "smooth SwiGLU: the weight's gradient is that of the scaled weight",
        "fp8compile/linears/smooth_swiglu.py",
        "((DGRAD, divided), (WGRAD, multiplied))",
        "((DGRAD, divided),)",
        SMOOTH,
    ),
    Mutant(
        "smooth SwiGLU: the backward may make the exponents anew",
        "fp8compile/linears/smooth_swiglu.py",
        'exponents.meta["recompute"] = CheckpointPolicy.MUST_SAVE\n',
        "pass\n",
        SMOOTH,
    ),
    Mutant(
        "smooth SwiGLU: who else reads the input does not matter",
        "fp8compile/linears/smooth_swiglu.py",
        "if others := {*readers(value)} - linear.nodes:",
        "if others := set[Node]():",
        SMOOTH,
    ),
    Mutant(
        "linear cost: who shares an input pays all of it",
        "fp8compile/cost/linear_cost.py",
        'return whole / (linear.sharing if operand == "input" else 1)',
        "return whole",
        COST,
    ),
    Mutant(
        "linear cost: one reader of two pays its half alone",
        "fp8compile/cost/linear_cost.py",
        "len(set(READ_BY[each]) & set(in_fp8))",
        "2",
        COST,
    ),
    Mutant(
        "linear cost: any gain is worth FP8",
        "fp8compile/cost/linear_cost.py",
        "(1 - LEAST_GAIN) * costs[()]",
        "costs[()]",
        COST,
    ),
    Mutant(
        "linear cost: a frozen weight's operands are transposed",
        "fp8compile/cost/linear_cost.py",
        "else ONE_ORDER",
        "else 1.0",
        COST,
    ),
    Mutant(
        "linear cost: an FP8 matmul writes one byte",
        "fp8compile/cost/linear_cost.py",
        "(width if direction in READ_BY[name] else itemsize)",
        "width",
        COST,
    ),
    Mutant(
        "auto: one matmul of a linear decides for all",
        "fp8compile/linears/paying.py",
        "if matmul.direction in prediction.directions:",
        "if prediction.directions:",
        PAYING,
    ),
    Mutant(
        "auto: unknown rates are an H100's",
        "fp8compile/recipe/rates.py",
        "if is_there else None\n",
        'if is_there else RATES["h100"]\n',
        PAYING,
    ),
)
