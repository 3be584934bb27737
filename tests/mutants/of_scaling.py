"""Faults in delayed scaling."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NUMBERS = ("tests/numerics/test_delayed.py",)
TRAINING = "tests/scaling/test_delayed.py"

SCALING = (
    Mutant(
        "delayed: saturation hides an inf",
        "fp8compile/numerics/delayed.py",
        "torch.where(x.abs() < torch.inf, scaled.clamp",
        "torch.where(x.abs() <= torch.inf, scaled.clamp",
        NUMBERS,
    ),
    Mutant(
        "delayed: clipping counted from the largest code on",
        "fp8compile/numerics/delayed.py",
        "return fmt.max + step / 2",
        "return fmt.max",
        NUMBERS,
    ),
    Mutant(
        "delayed: an amax that is not finite is remembered",
        "fp8compile/numerics/delayed.py",
        "torch.where(amax < torch.inf, pushed, history)",
        "pushed",
        NUMBERS,
    ),
    Mutant(
        "delayed: a spike stays in the history",
        "fp8compile/numerics/delayed.py",
        "torch.where(falls_back(statistics)[:, None], alone, pushed)",
        "pushed",
        NUMBERS,
    ),
    Mutant(
        "delayed: the gradients' statistics stand first",
        "fp8compile/numerics/delayed.py",
        "for is_late in (False, True)])",
        "for is_late in (True, False)])",
        NUMBERS,
    ),
    Mutant(
        "known_scales: every operand has the first one's scale",
        "fp8compile/encoding/known_scales.py",
        "scales.narrow(0, index, 1)",
        "scales.narrow(0, 0 * index, 1)",
        (f"{TRAINING}::test_histories_are_the_reference_s_over_fifty_steps",),
    ),
    Mutant(
        "measure_operands: statistics in the order of the graph, rows in another",
        "passes/measure_operands.py",
        "own.sort(key=lambda operand: (rows_in(operand), operand[0].index))",
        "own.sort(key=lambda operand: -operand[0].index)",
        ("tests/passes/test_measure_operands.py", TRAINING),
    ),
    Mutant(
        "slot: two calls share a leaf",
        "fp8compile/scaling/slot.py",
        "leaf = histories.scales.detach().requires_grad_()",
        "leaf = histories.scales.requires_grad_()",
        (f"{TRAINING}::test_two_calls_in_one_backward_are_two_entries",),
    ),
    Mutant(
        "history: a step that clipped is followed by one with known scales",
        "fp8compile/scaling/history.py",
        "return self.entries == 0 or bool(self._any_fell_back)",
        "return self.entries == 0",
        (f"{TRAINING}::test_a_jump_is_seen_and_the_next_step_takes_its_own_scales",),
    ),
    Mutant(
        "state: who fell back is not saved",
        "fp8compile/scaling/history.py",
        'self._note(state["fell_back"].to(device))',
        "pass",
        (f"{TRAINING}::test_a_state_saved_behind_a_jump_goes_on_measuring",),
    ),
    Mutant(
        "apart: the second compilation shares the first one's context",
        "fp8compile/compiler/apart.py",
        "private.tracing(copy.copy(context))",
        "private.tracing(context)",
        ("tests/compiler/test_apart.py",),
    ),
)
