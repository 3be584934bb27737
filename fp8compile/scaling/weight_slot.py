"""The extra inputs that bring codes of weights into a compiled graph, and the calls that add them (``Recipe.cache_weights``).

Each weight that may be a linear's gets three: codes ``[N, K]``, codes transposed ``[K, N]``, inv_scale ``[1, 1]``. Which of
them a graph takes is known once its linears are rewritten (fp8compile/encoding/cached_weights.py). For the others a call
passes tensors without memory: nothing reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from fp8compile import _torch as private
from fp8compile.fx.extra_inputs import with_inputs
from fp8compile.numerics import E4M3, ENCODABLE
from fp8compile.numerics.formats import FP8_MULTIPLE
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import CachedWeight
from fp8compile.reporting.report import GraphReport
from fp8compile.scaling.weight_codes import Layouts, store

NAMES = ("codes", "codes_transposed", "inv_scale")


def with_weight_codes(
    gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe
) -> tuple[GraphModule, Sequence[Any], tuple[tuple[int, int], ...]]:
    """A copy of the graph with inputs for the codes of its weights, if the recipe caches them and a backward may follow;
    and for each weight its position, and that of its first input. Else the graph as it was."""
    trains = any(isinstance(value, Tensor) and value.requires_grad for value in example_inputs)
    if not (recipe.caches_weights and trains and torch.is_grad_enabled()):
        return gm, example_inputs, ()
    weights = [i for i, value in enumerate(example_inputs) if may_be_a_linear_s(value)]
    extra = {
        f"fp8compile_weight_{i}_{name}": value
        for i in weights
        for name, value in zip(
            NAMES, _examples(example_inputs[i], private.detect_fake_mode(example_inputs)), strict=True
        )
    }
    if not extra:
        return gm, example_inputs, ()
    told = tuple((at, len(example_inputs) + len(NAMES) * i) for i, at in enumerate(weights))
    return (*with_inputs(gm, example_inputs, extra), told)


def may_be_a_linear_s(value: Any) -> bool:
    """Whether an input may be a weight that an FP8 linear takes tensorwise."""
    if not isinstance(value, Parameter) or not (private.is_plain_fake(value) or type(value) is Parameter):
        return False  # a DTensor's parts are another matter
    sizes = value.shape
    fits = len(sizes) == 2 and all(isinstance(size, int) and size % FP8_MULTIPLE == 0 and size for size in sizes)
    return fits and value.dtype in ENCODABLE and value.is_contiguous()


def _examples(weight: Tensor, mode: Any) -> Iterator[Tensor]:
    (N, K), device = weight.shape, weight.device
    for rows, columns, dtype in ((N, K, E4M3.dtype), (K, N, E4M3.dtype), (1, 1, torch.float32)):
        if mode is None:
            yield torch.zeros(rows, columns, dtype=dtype, device=device)
        else:
            yield private.fake_empty(mode, (rows, columns), (columns, 1), dtype, device)


@functools.cache
def hollow(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape without memory, for an input that nothing reads."""
    value = torch.empty(rows, columns, dtype=dtype, device=device)
    value.untyped_storage().resize_(0)
    return value


class WeightCodes:
    """What the calls of a graph are given for the weights they are called with: codes that are up to date."""

    def __init__(self, reports: Iterable[GraphReport], inputs: Sequence[tuple[int, int]], recipe: Recipe) -> None:
        self._inputs, self._generated = tuple(inputs), recipe.codegen == "inductor"
        told: dict[int, CachedWeight] = {w.position: w for report in reports for w in report.notes.weights}
        self._layouts = {at: Layouts.of(told[at]) for at, _ in inputs if at in told}

    def given_to(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` called with the codes of its weights behind its other arguments."""
        return functools.partial(self._call, compiled) if self._inputs else compiled

    def _call(self, compiled: Callable[..., Any], *args: Any) -> Any:
        return compiled(*args, *self.behind(args))

    def behind(self, args: Sequence[Any]) -> list[Tensor]:
        """The extra inputs of a call with these arguments."""
        taken = store.up_to_date([(args[at], layouts) for at, layouts in self._layouts.items()], self._generated)
        found = dict(zip(self._layouts, taken, strict=True))
        extra = list[Tensor]()
        for at, _ in self._inputs:
            (N, K), device = args[at].shape, args[at].device
            codes, transposed, inv_scale = found.get(at, (None, None, None))
            extra += [
                hollow(N, K, E4M3.dtype, device) if codes is None else codes,
                hollow(K, N, E4M3.dtype, device) if transposed is None else transposed,
                hollow(1, 1, torch.float32, device) if inv_scale is None else inv_scale,
            ]
        return extra
