"""Faults in what the backward computes again for a budget."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_BUDGET = ("tests/passes/test_recompute_for_budget.py", "tests/budget")

MEMORY = (
    Mutant(
        "budget: all copies where the first is",
        "fp8compile/budget/placing.py",
        "inserting_before(late[at])",
        "inserting_before(late[min(placed)])",
        OF_BUDGET,
    ),
    Mutant(
        "budget: random numbers are drawn again",
        "fp8compile/budget/repeatable.py",
        "torch.Tag.nondeterministic_seeded in target.tags",
        "False",
        OF_BUDGET,
    ),
    Mutant(
        "budget: operators of any namespace are repeated",
        "fp8compile/budget/repeatable.py",
        'target.namespace not in ("aten", "prims")',
        'target.namespace == ""',
        OF_BUDGET,
    ),
    Mutant(
        "budget: gradients of parameters do not count",
        "fp8compile/analysis/liveness.py",
        "_beyond_saved(split, limits, with_gradients=True)",
        "_beyond_saved(split, limits)",
        OF_BUDGET,
    ),
    Mutant(
        "budget: what the caller has is given up",
        "passes/recompute_for_budget.py",
        '.startswith("output")',
        '.startswith("nothing")',
        OF_BUDGET,
    ),
    Mutant(
        "budget: policies are not followed",
        "passes/recompute_for_budget.py",
        "in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)",
        "in ()",
        OF_BUDGET,
    ),
    Mutant(
        "budget: the last state, not the first",
        "fp8compile/budget/frontier.py",
        "within = (state for state in states if",
        "within = (state for state in reversed(states) if",
        OF_BUDGET,
    ),
    Mutant(
        "budget: copies share the encoding of what they copy",
        "fp8compile/budget/placing.py",
        "dataclasses.replace(encoding)",
        "encoding",
        OF_BUDGET,
    ),
    Mutant(
        "budget: gradients are not held while the optimizer steps",
        "fp8compile/budget/fitting.py",
        "MOMENTS * gradients, 2 * gradients,",
        "MOMENTS * gradients, gradients,",
        ("tests/budget/test_fitting.py",),
    ),
    Mutant(
        "budget: frozen parameters have moments",
        "fp8compile/budget/fitting.py",
        'gradients = sum(nbytes(node.meta["val"]) for node in gradients_of_parameters(split))',
        "gradients = weights",
        ("tests/budget/test_fitting.py",),
    ),
    Mutant(
        "budget: kernels hold values from both sides of a matmul",
        "fp8compile/compiler/near_kernels.py",
        "return len(places) < 2",
        "return len(places) < 3",
        ("tests/compiler/test_near_kernels.py",),
    ),
    Mutant(
        "budget: an operation of several stands where the first does",
        "fp8compile/compiler/near_kernels.py",
        "return (max(found),)",
        "return (min(found),)",
        ("tests/compiler/test_near_kernels.py",),
    ),
)
