"""Why a model, an optimizer or a recipe cannot be a whole step; found before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fp8compile._distributed import is_sharded
from fp8compile.compiler.inductor_options import inductor_options, makes_cuda_graphs, mode_options
from fp8compile.recipe.recipe import Recipe
from fp8compile.whole_step.updates import Updates, is_hooked

REPLICATED = "{} sums gradients between ranks in hooks that a graph does not call"
SHARDED = "parameters are sharded (DTensor, FSDP): gradients are summed in hooks that a graph does not call"
SPARSE = "{} is an embedding with sparse gradients"
HOOKED = "{} has hooks on its gradient, which a graph does not call"
CUDA_GRAPHS = (
    "CUDA graphs take a copy of what a graph overwrites: another mode than 'reduce-overhead' and 'max-autotune'"
)


def why_not(model: nn.Module, updates: Updates, recipe: Recipe, mode: str | None) -> str | None:
    """The first reason that is found; None where there is none."""
    found = (*_of_model(model), updates.why_not(), *_of_recipe(recipe, mode))
    return next((reason for reason in found if reason), None)


def _of_model(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            yield REPLICATED.format(type(module).__name__)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield SPARSE.format(name or type(module).__name__)
    yield from (reason for name, p in model.named_parameters() if (reason := _of_parameter(name, p)))


def _of_parameter(name: str, p: Tensor) -> str | None:
    if is_sharded(p):
        return SHARDED
    return HOOKED.format(name) if is_hooked(p) else None


def _of_recipe(recipe: Recipe, mode: str | None) -> Iterator[str]:
    if recipe.offloads:
        yield "Recipe.memory.offload: copies to the host are timed between two graphs"
    if torch.cuda.is_available() and makes_cuda_graphs({**mode_options(mode), **inductor_options(recipe)}):
        yield CUDA_GRAPHS
