"""Script: which graphs of an FP16 Llama layer Inductor would capture as CUDA graphs, observed and not. Prints JSON.

Inductor decides when it has lowered a graph: one that can be captured goes to ``cudagraphify``, of any other it says why
not. ``graph_partition`` is off, so that a graph is captured whole or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile.recipe.recipe import Recipe
from tests.support.measure import llama_case

from . import fake_h100
from .lowering import lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

SETTINGS: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": False}
RECIPES = {
    name: Recipe(linears="tensorwise", fp32={"observe": each})
    for name, each in (("off", False), ("on", "auto"), ("all", True))
}


class Decisions(logging.Handler):
    """What Inductor decides: ``captured``, a dict for each graph; ``reasons``, why others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[dict[str, Any]] = []
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reasons.append(record.getMessage())

    def cudagraphify(self, model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **options: Any) -> Any:
        """In the place of Inductor's, which would wait for a device."""
        mutated = [*options["mutated_input_idxs"]]
        self.captured.append({"backward": options["is_backward"], "mutated_inputs": mutated})
        return model


@contextmanager
def deciding() -> Iterator[Decisions]:
    """Inductor's decisions about what is compiled inside."""
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor.cudagraph_utils import cudagraphs_log

    fake_h100.require(compile_fx, "cudagraphify")
    decisions = Decisions()
    cudagraphs_log.addHandler(decisions)
    with mock.patch.object(compile_fx, "cudagraphify", decisions.cudagraphify):
        yield decisions
    cudagraphs_log.removeHandler(decisions)


def of_layer(recipe: Recipe) -> dict[str, Any]:
    layer, args = llama_case(2, 128, 256, 512, 4, dtype=torch.float16)
    with deciding() as decisions:
        patches = SETTINGS | {JOINT_PASS: to_cuda}
        lowered = lower(layer, *args, backward=True, backend=fp8compile_backend(recipe), config_patches=patches)
    inputs = [len(graph.graph.find_nodes(op="placeholder")) for graph in lowered.graphs if graph.graph is not None]
    return {"captured": decisions.captured, "reasons": decisions.reasons, "inputs": inputs}


def of_what_cannot_be() -> dict[str, Any]:
    """An assignment through a mask, whose size the host must know."""

    def masked(x: Tensor) -> Tensor:
        return torch.index_put(x, (x > 0,), x.new_zeros(()))

    with deciding() as decisions:
        lower(masked, torch.empty(128), config_patches=SETTINGS)
    return {"captured": decisions.captured, "reasons": decisions.reasons}


def report() -> dict[str, Any]:
    """``{"layer": {recipe: decisions}, "cannot": decisions}``."""
    fake_h100.install()
    return {
        "layer": {name: of_layer(recipe) for name, recipe in RECIPES.items()},
        "cannot": of_what_cannot_be(),
    }


if __name__ == "__main__":
    print_json(report)
