"""Script: lower a layer of experts, forward and backward, in FP8. Prints JSON: the kernels that are called, not generated."""

from __future__ import annotations

from fp8compile.recipe.recipe import Recipe
from tests.support.experts import experts_case

from . import fake_h100
from .lowering import lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend


def report() -> dict[str, list[list[str]]]:
    """``{"externs": [of the forward, of the backward]}``."""
    fake_h100.install()
    layer, x = experts_case(1024, hidden=256, inner=384, experts=8)
    backend = fp8compile_backend(Recipe(linears="rowwise"))
    graphs = lower(layer, x, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs
    return {"externs": [graph.externs for graph in graphs]}


if __name__ == "__main__":
    print_json(report)
