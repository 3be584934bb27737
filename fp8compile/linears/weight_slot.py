"""The extra inputs that bring codes of weights into a compiled graph, and calls that add them (``linears.cache_weights``).

Each weight that may be a linear's gets three: codes ``[N, K]``, codes transposed ``[K, N]``, inv_scale ``[1, 1]``. Which of
them a graph takes is known once its linears are rewritten (fp8compile/linears/cached_weights.py). For the others a call
passes tensors without memory: nothing reads them.

With ``linears.merge_dgrads`` there are two more for weights that linears of one value take: their transposed codes side by
side, and the largest of their scales (fp8compile/linears/packed_weights.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from fp8compile import _torch as private
from fp8compile.fx.extra_inputs import with_inputs
from fp8compile.linears.packed_weights import Codes, of_one_input
from fp8compile.linears.weight_codes import Layouts, store
from fp8compile.numerics import E4M3, ENCODABLE
from fp8compile.numerics.formats import FP8_MULTIPLE
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import CachedWeight

NAMES = ("codes", "codes_transposed", "inv_scale")


WeightInputs = tuple[tuple[int, int], ...]  # Context.weight_inputs
PackedInputs = tuple[tuple[tuple[int, ...], int], ...]  # Context.packed_inputs


def with_weight_codes(
    gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe
) -> tuple[GraphModule, Sequence[Any], WeightInputs, PackedInputs]:
    """A copy of the graph with inputs for the codes of its weights, if the recipe caches them and a backward may follow;
    where these inputs stand, and where those of several weights. Else the graph as it was."""
    trains = any(isinstance(value, Tensor) and value.requires_grad for value in example_inputs)
    weights = [i for i, value in enumerate(example_inputs) if may_be_linear_weight(value)]
    if not (recipe.caches_weights and trains and torch.is_grad_enabled() and weights):
        return gm, example_inputs, (), ()
    mode, first = private.detect_fake_mode(example_inputs), len(example_inputs)
    extra = {
        f"fp8compile_weight_{i}_{name}": value
        for i in weights
        for name, value in zip(NAMES, _examples(example_inputs[i], mode), strict=True)
    }
    packs = of_one_input(gm, weights) if recipe.merges_dgrads else []
    behind = first + len(extra)
    for i, positions in enumerate(packs):
        rows, columns, device = packed_shape(example_inputs, positions)
        extra[f"fp8compile_weights_{i}_codes"] = _example(rows, columns, device, E4M3.dtype, mode)
        extra[f"fp8compile_weights_{i}_inv_scale"] = _example(1, 1, device, torch.float32, mode)
    places = tuple((at, first + len(NAMES) * i) for i, at in enumerate(weights))
    places_of_packs = tuple((positions, behind + 2 * i) for i, positions in enumerate(packs))
    return (*with_inputs(gm, example_inputs, extra), places, places_of_packs)


def packed_shape(values: Sequence[Any], positions: Sequence[int]) -> tuple[int, int, torch.device]:
    """Rows, columns and device of the packed codes of the weights at these positions."""
    first = values[positions[0]]
    return first.shape[1], sum(values[at].shape[0] for at in positions), first.device


def may_be_linear_weight(value: Any) -> bool:
    """Whether an input may be a weight that an FP8 linear takes tensorwise."""
    if not isinstance(value, Parameter) or not (private.is_plain_fake(value) or type(value) is Parameter):
        return False  # a DTensor's parts are another matter
    sizes = value.shape
    fits = len(sizes) == 2 and all(isinstance(size, int) and size % FP8_MULTIPLE == 0 and size for size in sizes)
    return fits and value.dtype in ENCODABLE and value.is_contiguous()


def _examples(weight: Tensor, mode: Any) -> Iterator[Tensor]:
    (N, K), device = weight.shape, weight.device
    for rows, columns, dtype in ((N, K, E4M3.dtype), (K, N, E4M3.dtype), (1, 1, torch.float32)):
        yield _example(rows, columns, device, dtype, mode)


def _example(rows: int, columns: int, device: torch.device, dtype: torch.dtype, mode: Any) -> Tensor:
    if mode is None:
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    return private.fake_empty(mode, (rows, columns), (columns, 1), dtype, device)


@functools.cache
def without_memory(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape without memory, for an input that nothing reads."""
    value = torch.empty(rows, columns, dtype=dtype, device=device)
    value.untyped_storage().resize_(0)
    return value


class WeightCodes:
    """What the calls of a graph are given for the weights they are called with: codes that are up to date.

    Attributes:
        layouts: what the graph takes of a weight, by the weight's position.
        packs: the weights whose codes it may take as one matrix, by their positions, and where that stands.
    """

    def __init__(
        self, reports: Iterable[GraphReport], inputs: WeightInputs, packs: PackedInputs, recipe: Recipe
    ) -> None:
        self._inputs, self.packs, self._generated = inputs, packs, recipe.debug.codegen == "inductor"
        weights: dict[int, CachedWeight] = {w.position: w for report in reports for w in report.notes.weights}
        self.layouts = {at: Layouts.of(weights[at]) for at, _ in inputs if at in weights}
        self._taken = {place for weight in weights.values() for place in weight.packs}

    def given_to(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` called with the codes of its weights behind its other arguments."""
        return WithWeightCodes(compiled, self) if self._inputs else compiled

    def found(self, args: Sequence[Any]) -> dict[int, Codes]:
        """The codes of the weights of a call with these arguments, by the weight's position."""
        taken = store.up_to_date([(args[at], layouts) for at, layouts in self.layouts.items()], self._generated)
        return dict(zip(self.layouts, taken, strict=True))

    def inputs(self, args: Sequence[Any], found: Mapping[int, Codes]) -> list[Tensor]:
        """The extra inputs of a call with these arguments, whose weights have these codes."""
        extra = list[Tensor]()
        for at, _ in self._inputs:
            (N, K), device = args[at].shape, args[at].device
            codes, transposed, inv_scale = found.get(at, (None, None, None))
            extra += [
                without_memory(N, K, E4M3.dtype, device) if codes is None else codes,
                without_memory(K, N, E4M3.dtype, device) if transposed is None else transposed,
                without_memory(1, 1, torch.float32, device) if inv_scale is None else inv_scale,
            ]
        for place, (positions, _) in enumerate(self.packs):
            rows, columns, device = packed_shape(args, positions)
            if place in self._taken:
                extra += store.packs.up_to_date([args[at] for at in positions], [found[at] for at in positions])
            else:
                extra += [
                    without_memory(rows, columns, E4M3.dtype, device),
                    without_memory(1, 1, torch.float32, device),
                ]
        return extra


class WithWeightCodes:
    """Compiled code that is called with the codes of its weights behind its other arguments."""

    def __init__(self, compiled: Callable[..., Any], codes: WeightCodes) -> None:
        self.compiled, self.codes = compiled, codes

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args, *self.codes.inputs(args, self.codes.found(args)))
