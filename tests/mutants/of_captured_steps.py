"""Faults in how a step is captured, in what is proven of its states, and in its numbers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CAPTURED_STEPS = (
    Mutant(
        "captured: what Python decided by a number is not asked again",
        "fp8compile/optim/capture.py",
        "return all(guard.xreplace(known) == True for guard in self.guards)",
        "return True",
        ("tests/optim/test_capture.py",),
    ),
    Mutant(
        "captured: random numbers are drawn once",
        "fp8compile/optim/capture.py",
        "raise NotCaptured(RANDOM)",
        "pass",
        ("tests/optim/test_capture.py",),
    ),
    Mutant(
        "captured: an attribute that a step changes stays as it was",
        "fp8compile/optim/standing_in.py",
        "if name not in was or name not in now or was[name] != now[name]:",
        "if False:",
        ("tests/optim/test_capture_attributes.py", "tests/optim/test_capture.py"),
    ),
    Mutant(
        "captured: a changed option is seen where no number stands",
        "fp8compile/optim/captured_updates.py",
        "or not _hold(mine, group):",
        "or False:",
        ("tests/optim/test_capture.py",),
    ),
    Mutant(
        "captured: numbers may leave the bounds that proofs assumed",
        "fp8compile/optim/captured_update.py",
        "_classes(self.captured, group) == self.classes",
        "True",
        ("tests/optim/test_capture.py",),
    ),
    Mutant(
        "captured: all numbers are fixed where an operation takes one",
        "fp8compile/optim/as_tensors.py",
        "for i, each in enumerate(self._numbers) if each in made_of}",
        "for i, each in enumerate(self._numbers)}",
        ("tests/optim/test_capture.py",),
    ),
    Mutant(
        "captured: the first momentum is of zeros",
        "fp8compile/optim/captured_update.py",
        "torch.where(before == 0, begun[name], value)",
        "torch.where(before == 0, value, value)",
        ("tests/optim/test_short_forms.py",),
    ),
    Mutant(
        "captured: a lerp begins at its end",
        "fp8compile/optim/short_forms.py",
        "(start, rest)",
        "(end, rest)",
        ("tests/optim/test_short_forms.py",),
    ),
    Mutant(
        "captured: numbers are those of the step before",
        "fp8compile/optim/captured_update.py",
        "step - 1, *(",
        "step - 2, *(",
        ("tests/optim/test_short_forms.py",),
    ),
    Mutant(
        "proofs: almost one forgets as well",
        "fp8compile/optim/proofs.py",
        "BELOW_ONE = 1 - 2.0**-20",
        "BELOW_ONE = 1.0",
        ("tests/optim/test_proofs.py",),
    ),
    Mutant(
        "proofs: what is kept with the other sign is forgotten",
        "fp8compile/optim/proofs.py",
        "low >= -BELOW_ONE and high <= BELOW_ONE",
        "high <= BELOW_ONE",
        ("tests/optim/test_proofs.py",),
    ),
    Mutant(
        "proofs: an interval around zero has an inverse",
        "fp8compile/optim/proofs.py",
        "if a[0] < 0 < a[1] or a == (0.0, 0.0):",
        "if a == (0.0, 0.0):",
        ("tests/optim/test_proofs.py",),
    ),
    Mutant(
        "proofs: a lerp past its ends stays between them",
        "fp8compile/optim/proofs.py",
        "if 0 <= w[0] <= w[1] <= 1 else EVERYTHING",
        "if w[0] <= w[1] else EVERYTHING",
        ("tests/optim/test_proofs.py",),
    ),
    Mutant(
        "proofs: no state is asked whether it may be negative",
        "fp8compile/optim/proofs.py",
        "if kept == never_negative:",
        "if True:",
        ("tests/optim/test_proven_states.py",),
    ),
    Mutant(
        "proofs: what a sum is made of is rounded",
        "fp8compile/optim/proofs.py",
        "for kept_whole in [*exact]:",
        "for kept_whole in []:",
        ("tests/optim/test_proven_states.py",),
    ),
    Mutant(
        "step numbers: those of the first learning rate stay",
        "fp8compile/optim/step_numbers.py",
        "if known != floats:",
        "if not there:",
        ("tests/optim/test_step_numbers.py",),
    ),
    Mutant(
        "step numbers: a row is another tensor at every step",
        "fp8compile/optim/step_numbers.py",
        "if known is None or",
        "if True or",
        ("tests/optim/test_step_numbers.py",),
    ),
    Mutant(
        "captured: what our shell keeps is watched as an optimizer's own",
        "fp8compile/optim/standing_in.py",
        '(*OF_EVERY_OPTIMIZER, *getattr(type(optimizer), "own_names", ()))',
        "OF_EVERY_OPTIMIZER",
        ("tests/optim/test_capture_attributes.py",),
    ),
)
