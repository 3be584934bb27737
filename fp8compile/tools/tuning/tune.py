"""``tune``: which recipe is best for a model and a batch, measured on the user's own device.

    arms      plain Inductor, and recipes (tuning/arms.py)
    measured  seconds of a step, side by side in rounds; peak; bytes kept for the backward; gradients in dB (tuning/rounds.py)
    chosen    by a rule that is written down (tuning/choice.py)

A step is one forward and backward: gradients, but no optimizer. It is the step that the model is compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile import _torch as private
from fp8compile._arguments import check_number, check_one_of, is_number
from fp8compile._distributed import is_sharded
from fp8compile._messages import cause
from fp8compile.numerics.gradient_quality import BAR
from fp8compile.recipe.rates import device_name
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.trial_step import (
    LIMIT,
    NOTHING_TO_DIFFERENTIATE,
    arguments,
    check_bar,
    check_is_module,
    check_needs_no_batch,
    default_loss,
    left_as_it_was,
)
from fp8compile.tools.tuning.arms import arms_for
from fp8compile.tools.tuning.choice import GOALS, SPEED
from fp8compile.tools.tuning.measured_arm import TunedStep, give_memory_back, ran_out_of_memory
from fp8compile.tools.tuning.rounds import Rounds
from fp8compile.tools.tuning.tuned import Tuned
from fp8compile.tools.without_memory import is_on_meta

NO_BATCH = (
    "tune: batch={0}: one batch is needed, as the model is called with it: a tensor, a sequence of positional arguments, or "
    "a mapping of keywords; of a DataLoader next(iter(loader))"
)
NO_MINUTES = "tune: minutes={0!r}: a number above 0 is needed, such as 2"
ON_META = (
    "tune: the model is on the meta device and has no memory to run in; model.to_empty(device=...) and its weights give it "
    "some. fp8compile.explain needs none"
)
OF_RANKS = (
    "tune: {0} is of several ranks, and each would choose by itself. Tune the model on one rank before it is sharded or "
    "wrapped, and give all ranks the recipe that is chosen"
)
DOES_NOT_RUN = "tune: {0} does not run on this batch, before anything is compiled: {1}. It was called with {2}"
NO_LOSS = "tune: loss does not run on what the model returns, {0}: {1}"


def tune(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    minutes: float = 2.0,
    recipes: Iterable[Any] | Mapping[str, Any] | None = None,
    goal: str = SPEED,
    slower: float = 0.25,
    bar: float = BAR,
    show: Callable[[Tuned], object] = print,
) -> Recipe:
    """Measure a few recipes on this device, model and batch; print the table, and return the recipe that is best.

        from fp8compile.tools import tune

        recipe = tune(model, batch, loss=loss, minutes=2)
        model = torch.compile(model, backend="fp8compile", options={"recipe": recipe})

    Each recipe is compiled, and takes steps in turns with the others. Ctrl-C, or the end of its minutes, ends it with the
    best so far. Parameters, gradients, buffers, random number generators and train/eval mode are afterwards as before, also
    where it raises; a model that is compiled goes on as it was. Blocks that are compiled each by itself are compiled as one
    model here. Call it under the autocast that training runs under, in the mode that training has. It takes the memory of a
    step, and of one more set of gradients.

    What is chosen (fp8compile/tools/tuning/choice.py): of the recipes with no gradient below ``bar``, the fastest that is no
    more than 2 % slower than plain Inductor; with ``goal="memory"`` the one with the least peak that is at most ``slower``
    slower. Of those that are alike the simplest. Where that is plain Inductor, the preset "off" is returned.

    Args:
        model: a module, compiled or not, on the device that training runs on.
        batch: what the model is called with, as large as in training: a tensor, a sequence of positional arguments, or a
            mapping of keywords.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one, else the
            sum of the floating-point outputs. Give the loss of training: gradients are judged by it.
        minutes: how long it may take. What is being compiled at the end is not cut off.
        recipes: Recipes, names of presets or dicts of fields, from the simplest on; or a mapping from names to them. Plain
            Inductor is measured in any case. By default what suits the device: with FP8 units storage, linears, both,
            delayed scales, four bits; else storage, half of the peak, INT8 linears where the device is fast in them, four
            bits.
        goal: "speed" or "memory".
        slower: with ``goal="memory"``, how much slower than plain Inductor a step may be, 0 or more; 0.25 is a quarter.
        bar: the SQNR in dB that every gradient must have, as in ``fp8compile.check``.
        show: takes what was measured, a ``Tuned`` (fp8compile/tools/tuning/tuned.py), before the recipe is returned.

    Raises:
        ValueError: no batch; a model or a loss that does not run; a loss that is not a scalar; nothing to differentiate; a
            model on the meta device, or of several ranks; no graph was compiled; ``minutes`` is not above 0; an unknown
            recipe or goal; ``slower`` or ``bar`` out of range.
    """
    check_is_module(model, "tune")
    if not is_number(minutes) or not minutes > 0:
        raise ValueError(NO_MINUTES.format(minutes))
    check_one_of("tune: goal", goal, GOALS)
    check_number("tune: slower", slower)
    check_bar(bar, "tune")
    eager = getattr(model, "_orig_mod", model)
    _check_can_be_measured(eager)
    step = TunedStep(eager, *_called_with(eager, batch), loss)
    device = next((p.device for p in eager.parameters()), torch.device("cpu"))
    rounds = Rounds(arms_for(recipes, device), step, minutes, float(bar))
    with left_as_it_was(eager), private.dynamo_config.patch(recompile_limit=LIMIT):
        _check_it_runs(step)
        rounds.run()
    found = Tuned(rounds.rows(), goal, float(slower), float(bar), device_name(device), tuple(rounds.remarks))
    show(found)
    return found.recipe


def _check_can_be_measured(model: nn.Module) -> None:
    if is_on_meta(model):
        raise ValueError(ON_META)
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if wrapped or any(is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError(OF_RANKS.format(type(model).__name__))


def _called_with(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords."""
    if not isinstance(batch, (Tensor, Sequence, Mapping)) or isinstance(batch, (str, bytes)):
        raise ValueError(NO_BATCH.format("None" if batch is None else f"a {type(batch).__name__}"))
    if not isinstance(batch, Tensor) and not batch:
        check_needs_no_batch(model, "tune")
    return arguments(batch, None, "tune")


def _check_it_runs(step: TunedStep) -> None:
    """One eager step: what is wrong with it is found before anything is compiled. One that is out of memory says nothing."""
    stage = [DOES_NOT_RUN.format(type(step.model).__name__, "{}", _shapes(step))]

    def noted(output: Any) -> Tensor | None:
        stage.append(NO_LOSS.format(type(output).__name__, "{}"))
        scalar = (step.loss or default_loss)(output)
        stage.append("")
        return scalar

    try:
        found = TunedStep(step.model, step.args, step.kwargs, noted).run(step.model)  # type: ignore[arg-type]
    except Exception as error:
        if not ran_out_of_memory(error):
            if not stage[-1]:
                raise
            raise ValueError(stage[-1].replace("{}", cause(error))) from error
    else:
        if not found:
            raise ValueError(NOTHING_TO_DIFFERENTIATE.format("tune"))
        return
    give_memory_back()


def _shapes(step: TunedStep) -> str:
    named = [*((f"argument {i}", arg) for i, arg in enumerate(step.args)), *step.kwargs.items()]
    return ", ".join(f"{name}: {_shape(value)}" for name, value in named) or "nothing"


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]} on {value.device}"
    return type(value).__name__
