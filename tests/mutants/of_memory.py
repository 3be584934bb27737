"""Faults in what the backward computes again for a budget."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_BUDGET = ("tests/passes/test_recompute_for_budget.py",)

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
        "order, held = steps_of_backward(split, with_gradients=True)",
        "order, held = steps_of_backward(split)",
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
)
