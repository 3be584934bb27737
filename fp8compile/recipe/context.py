"""What a pass gets in addition to its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from fp8compile.fx.aot import is_parameter, plain_position
from fp8compile.recipe.patterns import in_module
from fp8compile.recipe.recipe import Recipe


@dataclass(frozen=True)
class StatsInputs:
    """Where a graph's extra inputs stand (fp8compile/observe/slot.py), and the paths of its parameters.

    Attributes:
        statistics: position among the graph's inputs of ``statistics``; ``limit`` is the next.
        rows: how many rows ``statistics`` has.
        names: (position, path) of each parameter.
    """

    statistics: int
    rows: int
    names: tuple[tuple[int, str], ...]

    @property
    def limit(self) -> int:
        return self.statistics + 1


@dataclass(frozen=True)
class Context:
    """The recipe in force for the graph being compiled, and what is known of its inputs.

    Attributes:
        parameters: positions of the ``nn.Parameter``s.
        stats_inputs: the inputs that fp8compile added, if it added any.
        is_whole_model: whether the graph is known to be the whole model, so that a name missing from it does not exist.
    """

    recipe: Recipe
    parameters: frozenset[int] = frozenset()
    stats_inputs: StatsInputs | None = None
    is_whole_model: bool = False

    def parameters_of(self, graph: Graph) -> set[Node]:
        """The placeholders of a joint graph that are parameters."""
        return {n for n in graph.find_nodes(op="placeholder") if is_parameter(n, self.parameters)}

    def input_at(self, graph: Graph, position: int) -> Node | None:
        """The placeholder of a joint graph for the Dynamo graph's input at ``position``."""
        return next((n for n in graph.find_nodes(op="placeholder") if plain_position(n) == position), None)

    def recipe_at(self, path: str) -> Recipe:
        """The recipe for a value made in the module at ``path`` (see ``Recipe.modules``)."""
        return self.recipe.at(path)

    def skip_reason(self, path: str, switch: str, skips: Sequence[str]) -> str | None:
        """Why the recipe leaves the module at ``path`` as it is; None where it does not.

        ``switch`` is the field that may be "off", ``skips`` are fields that hold patterns on modules.
        """
        recipe = self.recipe_at(path)
        if getattr(recipe, switch) == "off":
            return f"Recipe.{switch} is off for module {path!r}"
        matches = ((field, each) for field in skips for each in getattr(recipe, field) if in_module(path, each))
        return next((f"Recipe.{field}: module {path!r} matches {each!r}" for field, each in matches), None)
