"""``fp8compile.check``: does a model have the same gradients under a recipe as when nothing is encoded?

    exact      one step with Recipe.linears and Recipe.saved "off", in the model's own dtypes
    encoded    the same step with the recipe: same batch, random numbers, buffers and code generation (node by node)
    compared   gradient by gradient, in dB (numerics/gradient_quality.py: when a difference has a meaning)
    repaired   the modules to leave exact, found by encoding parts alone (repair.py), and run once more
    generated  the step once more as the code that is generated for the recipe, compared with the graph (generated.py)

The first two steps differ in the encoding alone: both run the same decompositions node by node. So the encoding is blamed
neither for what a generated kernel does nor for the rounding of the dtype.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8compile.numerics.gradient_quality import BAR, Gradients, error_powers
from fp8compile.recipe.recipe import Recipe, uncounted
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.tools.checking.exact_modules import leaving, options_text
from fp8compile.tools.checking.generated import Generated, generated_step
from fp8compile.tools.checking.repair import Errors, RepairCandidate, Search, candidates_of
from fp8compile.tools.checking.rows import BELOW, IN_CODE, NOT_FINITE, OK, ROUNDING, Cause, GradientRow
from fp8compile.tools.checking.text import text_of
from fp8compile.tools.checking.trials import Trials
from fp8compile.tools.trial_step import arguments, check_bar, check_is_module, chosen_recipe

SCHEMA = "fp8compile.check/2"
MOST_STEPS = 48
GRAPH, CODE = "graph", "generated code"
SHARE = 0.05  # a cause below this share of the largest cause's error is not worth a line
NOWHERE = (
    "no choice of modules repairs this: with every encoded tensor and FP8 linear left exact, gradients are still below "
    'the bar. What is wrong is not in a code; run with options={"preset": "off"} and please report it'
)
WRONG_CODE = (
    "the code that Inductor generates does not compute its graph, and what is encoded is not the cause. "
    'options={"codegen": "eager"} runs the graph itself; please report it'
)
ORDER = (BELOW, IN_CODE, NOT_FINITE, OK, ROUNDING)
ITSELF = (
    "the exact step's own gradients are not finite for {}: there is nothing to compare with. "
    "fp8compile.tools.debug_step(model, batch) names the operation"
)


@dataclass(frozen=True)
class Check:
    """What ``fp8compile.check`` found: ``str()`` is a short table, ``to_json()`` all of it.

    Attributes:
        rows: every gradient, worst first.
        outputs: every floating-point output, as far as generated code ran.
        bar: the bar, in dB.
        ok: whether every gradient was above the bar as the recipe stands, and generated code computes its graph.
        ran: "generated code", or "graph" where only graphs were run, node by node.
        recipe: the recipe that was checked, if all is well; else one that repairs it; None if none was found.
        line: the options that give ``recipe``, to paste into torch.compile; "" if there is nothing to repair, or no way to.
        exact: the candidates left exact in it, as (module, "saved" or "linears").
        steps: how many steps were run.
        remarks: what else one should know.
    """

    rows: tuple[GradientRow, ...]
    bar: float
    ok: bool
    recipe: Recipe | None
    line: str = ""
    exact: tuple[tuple[str, str], ...] = ()
    steps: int = 0
    remarks: tuple[str, ...] = ()
    outputs: tuple[GradientRow, ...] = ()
    ran: str = GRAPH

    @property
    def below(self) -> tuple[GradientRow, ...]:
        """The gradients below the bar."""
        return tuple(row for row in self.rows if row.verdict == BELOW)

    def to_json(self) -> str:
        """All attributes; an infinite number is the string "inf" or "-inf", and a NaN is null."""
        data = {"schema": SCHEMA} | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {name: [dataclasses.asdict(row) for row in getattr(self, name)] for name in ("rows", "outputs")}
        data["recipe"] = None if self.recipe is None else str(self.recipe)
        return json.dumps(_plain(data), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return text_of(self.rows, self.outputs, self.bar, self.steps, self.line, self.remarks)


def check(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    bar: float = BAR,
) -> Check:
    """Compare every gradient of one step with the exact one; where one is below the bar, find the cause and a recipe.

        result = fp8compile.check(model, batch)
        print(result)
        model = torch.compile(model, backend="fp8compile", options={"recipe": result.recipe})

    It runs a handful of steps if all is well, else up to some 50 more, node by node (see
    fp8compile/tools/checking/repair.py). Then it compiles once, as training will, and compares the generated code with
    its graph; a recipe with ``debug.codegen="eager"`` has none. Gradients, buffers, random number generators and the mode of
    modules are left as they were; a model that is compiled goes on as it was. Call it under the autocast of training.

    Args:
        model: a module, compiled or not.
        args: what the model is called with: a tensor, a sequence of positional arguments, or a mapping of keywords.
        kwargs: keyword arguments beside positional ones.
        recipe: a Recipe, the name of a preset or a dict of fields; by default that of the running model, else the
            default recipe. ``{"emulate": True}`` shows what FP8 linears do where there is no FP8 hardware.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs. Give the loss of training: gradients are judged by it.
        bar: the SQNR in dB that every gradient should have.

    Raises:
        ValueError: no graph was compiled, nothing to differentiate, ``loss`` is not a scalar, ``bar`` is not a number from
            0 to 100, or ``args`` is a mapping beside ``kwargs``.
    """
    check_is_module(model, "check")
    check_bar(bar, "check")
    positional, keywords = arguments(args, kwargs, "check")
    chosen = chosen_recipe(recipe, model)
    trials = Trials(getattr(model, "_orig_mod", model), positional, keywords, loss)
    try:
        return _Comparison(trials, chosen, float(bar)).run()
    finally:
        trials.close()


class _Comparison:
    """The exact step once, then the encoded one, then the steps that the search asks for."""

    def __init__(self, trials: Trials, recipe: Recipe, bar: float) -> None:
        self.trials, self.recipe, self.bar = trials, recipe, bar
        self.exact, self.judge = trials.judged(recipe, bar)
        self.outputs = frozenset(trials.outputs)
        self.graph: Gradients = {}  # what the last step gave
        self.known: dict[RepairCandidate, list[str]] = {}

    def run(self) -> Check:
        errors, _ = self.measure(frozenset())
        if not self.judge.failing(errors):
            return self._result(errors, ok=True, recipe=self.recipe)
        search = Search(self.judge, self.measure, MOST_STEPS)
        found = search.run(list(self.known), errors)
        if found is None:
            return self._result(errors, ok=False, recipe=None, alone=search.alone, remarks=(NOWHERE,))
        chosen, after = found
        repaired = leaving(self.recipe, frozenset(chosen), self.known)
        after, _ = self._errors(uncounted(repaired))  # as the recipe will be written down
        if self.judge.failing(after):
            return self._result(errors, ok=False, recipe=None, alone=search.alone, remarks=(NOWHERE,))
        alone = {candidate: search.alone.get(candidate, {}) for candidate in chosen}
        remarks = () if search.minimal else (f"found in {MOST_STEPS} steps; fewer modules may do",)
        return self._result(errors, ok=False, recipe=repaired, alone=alone, after=after, remarks=remarks)

    def measure(self, left: frozenset[RepairCandidate]) -> tuple[Errors, tuple[GraphReport, ...]]:
        """The errors of a step in which these candidates are exact."""
        return self._errors(leaving(uncounted(self.recipe), left, self.known) if left else uncounted(self.recipe))

    def _errors(self, recipe: Recipe) -> tuple[Errors, tuple[GraphReport, ...]]:
        trial = self.trials.step(recipe)
        for candidate, tensors in candidates_of(trial.reports).items():
            self.known.setdefault(candidate, tensors)
        self.graph = trial.values
        errors = error_powers(self.exact, trial.values)
        return {name: error for name, error in errors.items() if name not in self.outputs}, trial.reports

    def _generated(self, recipe: Recipe) -> Generated | None:
        """A step of generated code for the recipe that was run last."""
        return generated_step(self.trials, uncounted(recipe), self.judge, self.exact, self.graph)

    def _result(
        self,
        errors: Errors,
        ok: bool,
        recipe: Recipe | None,
        alone: Mapping[RepairCandidate, Errors] | None = None,
        after: Errors | None = None,
        remarks: Sequence[str] = (),
    ) -> Check:
        of_graph = error_powers(self.exact, self.graph)
        code = self._generated(recipe) if recipe is not None else None
        rows = [self._row(name, errors[name], code, alone or {}, after) for name in errors]
        rows.sort(key=lambda row: (ORDER.index(row.verdict), row.db))
        outputs = [self._row(name, of_graph[name], code, {}) for name in of_graph if name in self.outputs and code]
        infinite = [row.name for row in rows if row.verdict == NOT_FINITE]
        remarked = tuple(remarks) + ((ITSELF.format(", ".join(infinite[:5])),) if infinite else ())
        if wrong := bool(code and code.wrong):
            recipe, remarked = None, (*remarked, WRONG_CODE)
        left = tuple((c.module, c.kind) for c in alone or {}) if after is not None else ()
        line = options_text(recipe) if recipe is not None and not ok else ""
        well = ok and not infinite and not wrong
        facts = tuple(rows), self.bar, well, recipe, line, left, self.trials.count, remarked
        return Check(*facts, tuple(outputs), CODE if code else GRAPH)

    def _row(
        self,
        name: str,
        error: float,
        code: Generated | None,
        alone: Mapping[RepairCandidate, Errors],
        after: Errors | None = None,
    ) -> GradientRow:
        judge = self.judge
        failing = bool(judge.failing({name: error})) and name not in self.outputs
        verdict = OK if judge.determined(name, self.bar) else ROUNDING
        if judge.powers[name] == math.inf:
            verdict = NOT_FINITE
        elif failing:
            verdict = BELOW
        elif code and name in code.wrong:
            verdict = IN_CODE
        causes = self._causes(name, alone) if failing else ()
        repaired = math.nan if after is None else judge.sqnr(name, after[name])
        generated = judge.sqnr(name, code.errors[name]) if code else math.nan
        return GradientRow(name, judge.sqnr(name, error), judge.floors[name], verdict, causes, repaired, generated)

    def _causes(self, name: str, alone: Mapping[RepairCandidate, Errors]) -> tuple[Cause, ...]:
        """The causes, largest first; one that was only run as part of a group comes last, without a figure."""
        sized = sorted(((errors.get(name, -1.0), c) for c, errors in alone.items()), key=lambda pair: -pair[0])
        least = SHARE * sized[0][0] if sized else 0.0
        return tuple(
            Cause(c.module, c.kind, self.judge.sqnr(name, error) if error >= 0 else math.nan, tuple(self.known[c]))
            for error, c in sized
            if error < 0 or error >= least
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
