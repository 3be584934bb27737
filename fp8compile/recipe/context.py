"""What a pass gets in addition to its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from fp8compile.fx.aot import is_parameter, plain_position
from fp8compile.recipe.patterns import OUTPUT_HEAD_PATTERNS, in_module
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
class ScaleInput:
    """Where a graph's scales stand among its inputs (fp8compile/linears/slot.py).

    Attributes:
        position: position among the graph's inputs.
        rows: how many operands they have room for, half of them for gradients.
        known: False for a graph that measures: it takes each scale from its operand, as current scaling does.
        names: (position, path) of each parameter.
    """

    position: int
    rows: int
    known: bool
    names: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Place:
    """Where a graph stands in the model that runs, and what the model says of its parameters.

    Attributes:
        prefix: the module path at which the graph's own paths begin; None where it is not known.
        core: the path of the model inside wrappers that hold nothing else; heads are looked for by their path from there.
        heads: positions of parameters that ``fp8compile.mark_head`` named.
    """

    prefix: str | None = None
    core: str = ""
    heads: frozenset[int] = frozenset()

    def from_top(self, path: str) -> str:
        """The path of a module of the graph, from the top of the model as far as that is known."""
        return ".".join(part for part in (self.prefix, path) if part)

    def from_core(self, path: str) -> str:
        """The same without wrappers around the model."""
        whole = self.from_top(path)
        return whole.removeprefix(self.core)[1:] if self.core and in_module(whole, self.core) else whole

    def spellings(self, path: str) -> tuple[str, ...]:
        """The ways in which a pattern may name a module of the graph: from the top of the graph or of the model."""
        return tuple(dict.fromkeys((path, self.from_top(path))))


@dataclass(frozen=True)
class Context:
    """The recipe in force for the graph being compiled, and what is known of its inputs.

    Attributes:
        parameters: positions of the ``nn.Parameter``s.
        stats_inputs: the inputs that fp8compile added, if it added any.
        is_whole_model: whether the graph is known to be the whole model, so that a name missing from it does not exist.
        place: where the graph stands in the model that runs.
        scale_input: the input that holds the scales of FP8 linears, if they are known before their tensors.
        weight_inputs: (position of a weight, position of the first of three inputs that hold its codes), for each weight
            whose codes come in (fp8compile/linears/weight_slot.py).
        packed_inputs: (positions of weights, position of the first of two inputs: their transposed codes side by side, and
            the largest of their scales), for weights that linears of one input take.
        measures_saved: whether what is saved stays exact and is marked with the ways to store it (passes/mark_saved.py).
    """

    recipe: Recipe
    parameters: frozenset[int] = frozenset()
    stats_inputs: StatsInputs | None = None
    is_whole_model: bool = False
    place: Place = Place()
    scale_input: ScaleInput | None = None
    weight_inputs: tuple[tuple[int, int], ...] = ()
    packed_inputs: tuple[tuple[tuple[int, ...], int], ...] = ()
    measures_saved: bool = False

    @property
    def has_own_inputs(self) -> bool:
        """Whether fp8compile added inputs to the graph; what they are about is in its report."""
        return bool(self.stats_inputs or self.scale_input or self.weight_inputs)

    @property
    def as_compiled(self) -> Context:
        """The same with a recipe without the fields that only observe."""
        return dataclasses.replace(self, recipe=self.recipe.as_compiled)

    @property
    def of_region(self) -> Context:
        """The context of a nested region of the graph, whose inputs have positions of their own."""
        return Context(self.recipe, place=dataclasses.replace(self.place, heads=frozenset()))

    def parameters_of(self, graph: Graph) -> set[Node]:
        """The placeholders of a joint graph that are parameters."""
        return {n for n in graph.find_nodes(op="placeholder") if is_parameter(n, self.parameters)}

    def input_at(self, graph: Graph, position: int) -> Node | None:
        """The placeholder of a joint graph for the Dynamo graph's input at ``position``."""
        return next((n for n in graph.find_nodes(op="placeholder") if plain_position(n) == position), None)

    def is_scales(self, node: Node) -> bool:
        """Whether a placeholder is the scales that come in with the inputs."""
        return self.scale_input is not None and plain_position(node) == self.scale_input.position

    def is_own_input(self, node: Node) -> bool:
        """Whether a placeholder is scales or codes that fp8compile added: no data, and without memory where none is read."""
        first = min((at for _, at in (*self.weight_inputs, *self.packed_inputs)), default=None)
        at = plain_position(node)
        return self.is_scales(node) or (first is not None and at is not None and at >= first)

    def recipe_at(self, path: str) -> Recipe:
        """The recipe for a value made in the module at ``path`` (see ``Recipe.modules``)."""
        return self.recipe.at(*self.place.spellings(path))

    def skip_reason(self, path: str, switch: str, skips: Sequence[str]) -> str | None:
        """Why the recipe leaves the module at ``path`` as it is; None where it does not.

        ``switch`` is the field that may be "off", ``skips`` are fields that hold patterns on modules; both by dotted names.
        """
        recipe, whole = self.recipe_at(path), self.place.from_top(path)
        if recipe.get(switch) == "off":
            written = switch.removesuffix(".mode").removesuffix(".format")  # as people switch it off
            return f"Recipe.{written} is off for module {whole!r}"
        found = ((field, each) for field in skips if (each := self._matching(path, recipe.get(field))) is not None)
        return next((f"Recipe.{field}: module {whole!r} matches {each!r}" for field, each in found), None)

    def said_of(self, path: str) -> tuple[Any, ...]:
        """All that the recipe says of the module at ``path``: equal for two modules that it does not tell apart."""
        recipe, spellings = self.recipe_at(path), self.place.spellings(path)
        fp32 = [any(in_module(spelled, each) for spelled in spellings) for each in recipe.fp32.keep]
        bits = () if recipe.saved.bits == "off" else recipe.saved.bits.said_of(self.place.from_core(path))
        return recipe, bits, self._matching(path, recipe.skip), self._matching(path, recipe.linears.skip), fp32

    def _matching(self, path: str, patterns: Sequence[str]) -> str | None:
        """The first pattern that matches. Where libraries keep a head is said from the top of the model, if that is known."""
        by_default = patterns == OUTPUT_HEAD_PATTERNS and self.place.prefix is not None
        spellings = (self.place.from_core(path),) if by_default else self.place.spellings(path)
        return next((each for each in patterns if any(in_module(spelled, each) for spelled in spellings)), None)
