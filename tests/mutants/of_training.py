"""Faults in what stands around a compilation, in loss scaling and in optimizers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AROUND = (
    Mutant(
        "nothing compiled: wrapped models are not looked at",
        "fp8compile/compiler/nothing_compiled.py",
        "if not wrapped and not vars(each)",
        "if not vars(each)",
        ("tests/compiler/test_nothing_compiled.py",),
    ),
    Mutant(
        "recipe: what has no effect is taken",
        "fp8compile/recipe/effects.py",
        "if not any(map(has_effect, every)):",
        "if False:",
        ("tests/recipe/test_effects.py",),
    ),
    Mutant(
        "recipe: what has an effect in one module is refused",
        "fp8compile/recipe/effects.py",
        "every = (recipe, *recipe.modules.values())",
        "every = (recipe,)",
        ("tests/recipe/test_effects.py",),
    ),
    Mutant(
        "optim: a misspelt option of a group is taken",
        "fp8compile/optim/checking.py",
        "n=1, cutoff=0.85",
        "n=1, cutoff=1.0",
        ("tests/recipe/test_effects.py",),
    ),
    Mutant(
        "amp: options of another mode are taken",
        "fp8compile/amp/options.py",
        "and self.mode not in modes:",
        "and self.mode not in MODES:",
        ("tests/recipe/test_effects.py",),
    ),
    Mutant(
        "whole step: a step that raised is counted",
        "fp8compile/whole_step/updates.py",
        "self._values(group))\n        return [*torch._foreach_add(self._counts(parameters), 1)]",
        "self._values(group))\n        torch._foreach_add_(of := self._counts(parameters), 1)\n        return of",
        ("tests/whole_step/test_failing_step.py",),
    ),
    Mutant(
        "whole step: states begin in a step that raised",
        "fp8compile/whole_step/updates.py",
        "[p for p in optimizer.state if p not in begun]",
        "[]",
        ("tests/whole_step/test_failing_step.py",),
    ),
    Mutant(
        "store: the reports of the first model",
        "fp8compile/compiler/report_store.py",
        "serving[-1].alive",
        "serving[0].alive",
        ("tests/compiler/test_report_store_serving.py",),
    ),
    Mutant(
        "recipe: a pattern matches no module beneath",
        "fp8compile/recipe/patterns.py",
        "for n in range(1, len(parts) + 1)",
        "for n in range(len(parts), len(parts) + 1)",
        ("tests/recipe/test_recipe.py",),
    ),
    Mutant(
        "overflow: a mask of -inf is the culprit",
        "fp8compile/observe/history.py",
        "if pair[0] == made[0] or _held_nan(",
        "if True or _held_nan(",
        ("tests/observe/test_overflow.py",),
    ),
)

WHOLE_STEP = (
    Mutant(
        "whole step: an update waits for no read of its parameter",
        "fp8compile/whole_step/early.py",
        "needed |= {each for each in readers[storage_root(written)] if each not in own}",
        "pass",
        ("tests/whole_step/test_early.py",),
    ),
    Mutant(
        "whole step: what is kept for the backward is not stored",
        "fp8compile/whole_step/joined.py",
        "root.meta[private.STORED] = True",
        "pass",
        ("tests/whole_step/test_generated.py",),
    ),
    Mutant(
        "whole step: updates of large parameters share a kernel",
        "fp8compile/whole_step/compiling.py",
        "SMALL = 2**12",
        "SMALL = 2**30",
        ("tests/whole_step/test_generated.py",),
    ),
    Mutant(
        "whole step: options of the optimizer are read once",
        "fp8compile/whole_step/running.py",
        "known = self._updates.options(), ",
        "known = None, ",
        ("tests/whole_step/test_train_step.py",),
    ),
    Mutant(
        "whole step: codes that an update has written are not left for the next step",
        "fp8compile/whole_step/running.py",
        "self._updates.leave(p, coded[p])",
        "pass",
        ("tests/whole_step/test_own_inputs.py",),
    ),
    Mutant(
        "whole step: a step whose scales are not known does not measure",
        "fp8compile/whole_step/own_inputs.py",
        "if self._scales is None or not",
        "if True or not",
        ("tests/whole_step/test_own_inputs.py",),
    ),
    Mutant(
        "whole step: statistics of delayed scaling are lost",
        "fp8compile/whole_step/running.py",
        "given.histories.add(statistics)",
        "pass",
        ("tests/whole_step/test_own_inputs.py",),
    ),
    Mutant(
        "whole step: the first momentum of SGD is damped behind a step that measures",
        "fp8compile/whole_step/updates.py",
        'self.optimizer.state[p].pop("momentum_buffer", None)',
        "pass",
        ("tests/whole_step/test_own_inputs.py",),
    ),
    Mutant(
        "whole step: packed codes are as they were where their tensors are the same",
        "fp8compile/scaling/packed_weights.py",
        "made() is each and version == each._version",
        "made() is each",
        ("tests/whole_step/test_own_inputs.py",),
    ),
    Mutant(
        "whole step: an update writes codes from the dtype that another graph wants",
        "fp8compile/optim/code_writer.py",
        "!= [dtype, *there]",
        "!= [wanted.dtype, *there]",
        ("tests/whole_step/test_own_inputs.py",),
    ),
    Mutant(
        "whole step: what follows from codes shares a kernel with their scale",
        "fp8compile/whole_step/placing.py",
        "last.meta[APART] = True",
        "pass",
        ("tests/sm90/test_whole_step_sm90.py",),
    ),
)

AMP = (
    Mutant(
        "amp: -inf of other dtypes clipped to +65504",
        "fp8compile/amp/buckets.py",
        "neginf=-FP16_MAX",
        "neginf=FP16_MAX",
        ("tests/amp/test_interrupted.py",),
    ),
    Mutant(
        "amp: quiet is not reset when the scale is halved",
        "fp8compile/amp/policies.py",
        "Outcome(0.5, 0.0, 0.0, verdict)",
        "Outcome(0.5, 1.0, 0.0, verdict)",
        ("tests/amp/test_policies.py",),
    ),
    Mutant(
        "amp: quiet is not reset when the scale is doubled",
        "fp8compile/amp/policies.py",
        "Outcome(2.0, 0.0, 0.0 if settled else -1.0, verdict)",
        "Outcome(2.0, 1.0, 0.0, verdict)",
        ("tests/amp/test_policies.py",),
    ),
    Mutant(
        "amp: the dynamic scale grows to inf",
        "fp8compile/amp/policies.py",
        "torch.where(scale < torch.inf, scale, now.scale)",
        "scale",
        ("tests/amp/test_policies.py", "tests/amp/test_dynamic.py"),
    ),
    Mutant(
        "amp: inf in FP32 rows says nothing",
        "fp8compile/amp/histogram.py",
        "weights[i, [INF, NAN], 1] = 1",
        "weights[i, [INF, NAN], 1] = 0",
        ("tests/amp/test_histogram_mode.py",),
    ),
    Mutant(
        "amp: bad updates count though good ones are between",
        "fp8compile/amp/collapse.py",
        "self.bad_in_a_row + 1 if verdict < 0 else 0",
        "self.bad_in_a_row + (verdict < 0)",
        ("tests/amp/test_collapse.py",),
    ),
    Mutant(
        "amp: means of ranks weigh alike",
        "fp8compile/amp/accumulation.py",
        "mean.float() * (self._counts[i] / total)",
        "mean.float()",
        ("tests/amp/test_accumulation.py",),
    ),
)

OPTIM = (
    Mutant(
        "optim: short groups draw the bits of full ones",
        "fp8compile/optim/plan.py",
        "first + self.offset",
        "first",
        ("tests/optim/test_row_views.py",),
    ),
    Mutant(
        "optim: Adam's bias correction of v is of m",
        "fp8compile/optim/updates.py",
        'root = states.get("max_exp_avg_sq", v).sqrt() / ((1 - n["beta2"] ** step)',
        'root = states.get("max_exp_avg_sq", v).sqrt() / ((1 - n["beta1"] ** step)',
        ("tests/optim/test_against_torch.py",),
    ),
    Mutant(
        "optim: the low bits point away from the master",
        "fp8compile/optim/low_bits.py",
        "master.abs() > p.float().abs(), 127, -128",
        "master.abs() > p.float().abs(), -128, 127",
        ("tests/optim/test_checkpoint.py::test_a_tie_keeps_the_weight_that_is_there",),
    ),
    Mutant(
        "optim: a pattern on names goes before an override",
        "fp8compile/optim/placement.py",
        "asked = overridden(p) or names.overridden.get(id(p))",
        "asked = None if patterns else overridden(p) or names.overridden.get(id(p))",
        ("tests/optim/test_overrides.py", "tests/optim/test_placement.py"),
    ),
    Mutant(
        "optim: shards of columns are encoded",
        "fp8compile/_distributed.py",
        "if dims != {0}:",
        "if not dims:",
        ("tests/optim/test_distributed.py::test_shards_of_columns_keep_fp32",),
    ),
    Mutant(
        "whole step: a parameter is written in its own shape",
        "fp8compile/whole_step/placing.py",
        "if value.target is aten.view.default and",
        "if False and",
        ("tests/whole_step/test_writing.py",),
    ),
    Mutant(
        "near functions: a short form for the rest of a power that cancels",
        "fp8compile/numerics/near_functions.py",
        '"rest": lambda b, t: 1 - b**t,',
        '"rest": lambda b, t: 1 - (t * b.log()).exp(),',
        ("tests/fx/test_near_lowerings.py", "tests/optim/test_compress.py"),
    ),
)
