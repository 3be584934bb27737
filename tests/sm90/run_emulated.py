"""Script: what passes decide where linears are emulated on the CPU, and what they decide of the same joint graph put onto an
H100. Prints JSON. Nothing is generated: halves are taken as they go to Inductor."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, GraphModule

from fp8compile.compiler import hooks
from fp8compile.compiler.hooks import Halves, taking_halves
from fp8compile.fx.graph import is_tensor, memory_order, nbytes, storage_root
from fp8compile.fx.ops import opname
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport

from . import fake_h100
from .compared import CASES, Case
from .lowering import lowering_config, uncomputed
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")
RECOMPUTED_BY_NAME = ("convolution", *PRODUCTS)


def decided(case: Case, on_device: bool, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = case.make(), case.inputs()
    backend = fp8compile_backend(
        Recipe(**{"linears": "tensorwise", "linears.emulate": not on_device, "saved.min_numel": 0, **options})
    )
    with (
        lowering_config({JOINT_PASS: to_cuda} if on_device else {}),
        taking_halves() as taken,
        _taking_reports() as reports,
    ):
        compiled = torch.compile(model, backend=lambda gm, xs: backend(gm, xs, not_generated), fullgraph=True)
        case.loss(compiled, *inputs).backward()
    (halves,), (report,) = taken, reports
    return {
        "kept": kept(halves),
        "products": [products(half.graph) for half in halves[:2]],
        "in FP8": sorted(
            f"{each.origin.module} {each.direction} {each.M}x{each.K}x{each.N}" for each in report.notes.linears
        ),
    }


@contextmanager
def _taking_reports() -> Iterator[list[GraphReport]]:
    found: list[GraphReport] = []

    def taking(*args: Any, **kwargs: Any) -> GraphReport:
        found.append(report_of(*args, **kwargs))
        return found[-1]

    report_of = hooks.report_of
    with mock.patch.object(hooks, "report_of", taking):
        yield found


def not_generated(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    return uncomputed(gm)


def kept(halves: Halves) -> list[list[Any]]:
    """Each storage that is kept beside the inputs: bytes, shape, dtype, order in memory; all from the largest down."""
    results: Any = halves.fw.graph.output_node().args[0]
    roots = dict.fromkeys(storage_root(n) for n in results[halves.own_results :] if is_tensor(n))
    values = [root.meta["val"] for root in roots if root.op != "placeholder"]
    told = [[int(nbytes(v)), str(list(v.shape)), str(v.dtype), str(memory_order(v))] for v in values]
    return sorted(told, key=lambda each: (-each[0], str(each)))


def products(graph: Graph) -> dict[str, int]:
    return dict(Counter(name for node in graph.nodes if (name := opname(node)) in RECOMPUTED_BY_NAME))


def report(names: Sequence[str]) -> dict[str, Any]:
    fake_h100.install()
    return {name: {"emulated": decided(CASES[name], False), "device": decided(CASES[name], True)} for name in names}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or list(CASES)))
