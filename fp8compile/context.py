"""What a pass is told beside its graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from fp8compile.recipe import Recipe


@dataclass(frozen=True)
class Context:
    """The recipe in force for the graph being compiled, and which of its inputs are parameters (``nn.Parameter``)."""

    recipe: Recipe
    parameters: frozenset[int] = frozenset()

    def parameters_of(self, graph: Graph) -> set[Node]:
        """The placeholders of a joint graph that are parameters."""
        return {n for n in graph.find_nodes(op="placeholder") if self._is_parameter(n.meta.get("desc"))}

    def _is_parameter(self, desc: object) -> bool:
        kind = type(desc).__name__
        return kind == "ParamAOTInput" or (kind == "PlainAOTInput" and getattr(desc, "idx", -1) in self.parameters)

    def recipe_at(self, path: str) -> Recipe:
        """The recipe for a value made in the module at ``path`` (see ``Recipe.modules``)."""
        return self.recipe.at(path)
