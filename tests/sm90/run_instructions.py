"""Script: what a ViT block's kernels cost in instructions, and what stands in them. Prints JSON."""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Sequence
from typing import Any

from . import fake_h100
from .kernel import Kernel
from .kernel_cost import cost_of
from .layers import BOTH, CASES, PLAIN, STORAGE
from .lowering import LoweredGraph
from .measures import print_json
from .run_layers import backend_of, lowered_layer

CASE = "vit 2k"
PIPELINES = (PLAIN, STORAGE, BOTH)


def described(graph: LoweredGraph) -> list[dict[str, Any]]:
    """Each kernel: its launches, cost, and what stands in its source."""
    return [
        {"name": name, "times": times, **_source(graph.kernels[name]), **_cost(graph.kernels[name])}
        for name, times in collections.Counter(graph.launches).items()
    ]


def _cost(kernel: Kernel) -> dict[str, Any]:
    cost = cost_of(kernel)
    return cost.figures if cost else {}


def _source(kernel: Kernel) -> dict[str, Any]:
    (length,) = re.findall(r"r0_numel = (\d+)", kernel.source)[:1] or ("0",)
    found = {name: len(re.findall(rf"\b{name}\(", kernel.source)) for name in ("erf", "nearbyint", "maximum")}
    along = f"r0_1 + {length}*x0" in kernel.source  # what is summed lies side by side
    loads = re.findall(r"tl\.load\(.*", kernel.source)
    found |= {
        name: sum(text in load for load in loads) for name, text in (("divided", " // "), ("of_blocks", "itile"))
    }
    found |= {"tiles": "yoffset" in kernel.source and "fixed_config" in kernel.source}
    return {**found, "length": int(length), "along": along, "walks": "for r0_offset in" in kernel.source}


def report(pipelines: Sequence[str]) -> dict[str, Any]:
    fake_h100.install()
    graphs = {name: lowered_layer(CASES[CASE], backend_of(name)) for name in pipelines}
    return {
        name: {
            "kernels": [described(graph) for graph in halves],
            "launches": sum(len(graph.launches) for graph in halves),
            "calls": [graph.externs for graph in halves],
            "partial_sums": sum(graph.partial_sums for graph in halves),
        }
        for name, halves in graphs.items()
    }


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or PIPELINES))
