"""Is the code that is generated for a recipe the graph that was checked? One compilation more, and a step of it.

    graph       the rewritten graph, node by node
    generated   what Inductor makes of it; random numbers are those of the graph
    wrong       |generated - exact| and |generated - graph| are both larger than is allowed (numerics/gradient_quality.py)

Outputs are compared as gradients are: the gradient of a sum does not know what was summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8compile.numerics.gradient_quality import GradientJudge, Gradients, error_powers
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.checking.trials import Generating, Trials

MOST_PASSES = (
    3  # delayed scales: the first pass measures, node by node, and the code that is generated takes the next
)


@dataclass(frozen=True)
class Generated:
    """A step of generated code: the powers of its errors, and the names of what is wrong in it alone."""

    errors: Mapping[str, float]
    wrong: frozenset[str] = frozenset()


def generated_step(
    trials: Trials, recipe: Recipe, judge: GradientJudge, exact: Gradients, graph: Gradients
) -> Generated | None:
    """A step with ``recipe`` as generated code beside what its graph gave; None where no generated code ran."""
    if recipe.debug.codegen == "eager":
        return None
    generate = Generating()
    for _ in range(MOST_PASSES):
        trial = trials.step(recipe, generate=generate)
        if trial.generated:
            errors = error_powers(exact, trial.values)
            off_the_graph = error_powers(graph, trial.values)
            wrong = {name for name in judge.failing(off_the_graph) if errors[name] > judge.allowed[name]}
            return Generated(errors, frozenset(wrong))
    return None
