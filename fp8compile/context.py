"""What a pass is told beside its graph."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.recipe import Recipe


@dataclass(frozen=True)
class Context:
    """The recipe in force for the graph being compiled."""

    recipe: Recipe
