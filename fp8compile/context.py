"""What a pass is told beside its graph."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.recipe import Recipe


@dataclass(frozen=True)
class Context:
    """The recipe in force for the graph being compiled."""

    recipe: Recipe

    def recipe_at(self, path: str) -> Recipe:
        """The recipe for a value made in the module at ``path`` (see ``Recipe.modules``)."""
        return self.recipe.at(path)
