"""Faults in how recipes are measured and chosen."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHOICE = ("tests/tools/test_tune_choice.py",)
TUNE = ("tests/tools/test_tune.py",)
TUNING = (
    Mutant(
        "tune: bad gradients are chosen",
        "fp8compile/tools/tuning/choice.py",
        "usable = [row for row in ran if row.below == 0] or",
        "usable = [row for row in ran if row.below is not None] or",
        CHOICE,
    ),
    Mutant(
        "tune: of what is alike the least simple",
        "fp8compile/tools/tuning/choice.py",
        "return next(row for row in rows if is_alike(row))",
        "return next(row for row in reversed(rows) if is_alike(row))",
        CHOICE,
    ),
    Mutant(
        "tune: memory at any price",
        "fp8compile/tools/tuning/choice.py",
        "most = 1 + (ALIKE if goal == SPEED else slower)",
        "most = 1 + (ALIKE if goal == SPEED else 1 + slower)",
        CHOICE,
    ),
    Mutant(
        "tune: ratios across rounds",
        "fp8compile/tools/tuning/rows.py",
        "ratios = [own[number] / plain[number] for number in own.keys() & plain.keys()]",
        "ratios = [one / other for one, other in zip(own.values(), plain.values(), strict=False)]",
        CHOICE,
    ),
    Mutant(
        "tune: Ctrl-C loses what was measured",
        "fp8compile/tools/tuning/rounds.py",
        "except KeyboardInterrupt:",
        "except TimeoutError:",
        TUNE,
    ),
    Mutant(
        "tune: what fails keeps its old times",
        "fp8compile/tools/tuning/measured_arm.py",
        "        self.turns.clear()\n",
        "",
        TUNE,
    ),
    Mutant(
        "tune: begins a compilation without time for it",
        "fp8compile/tools/tuning/rounds.py",
        'if self._left() > max(each.known.get("first_seconds", 0.0) for each in self.measured):',
        "if self.measured:",
        TUNE,
    ),
    Mutant(
        "a step for inspection: NumPy's generator goes on",
        "fp8compile/tools/trial_step.py",
        "        numpy.random.set_state(others[1])\n",
        "",
        ("tests/tools/test_trial_step.py",),
    ),
)
