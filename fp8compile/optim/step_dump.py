"""The dump of a compiled step: what one parameter's update does, as a page and a drawing.

<FP8COMPILE_DUMP>/optimizer-0/report.txt       the formats of its states, the dtypes, how low bits are kept
                              step.txt         a line each operation, and each call of a codec
                              step-full.txt    every node of the codecs too
                              step.dot         a drawing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Graph, GraphModule

from fp8compile.fx.dump_files import claim, root_of, write
from fp8compile.fx.graph import copy_graph
from fp8compile.fx.snapshot import snapshot
from fp8compile.optim.plan import UpdatePlan


def dump_step(plan: UpdatePlan, names: Sequence[str], graph: Callable[[], GraphModule]) -> None:
    """Write it where the environment asks for dumps; ``names`` are those of the graph's tensors, its last inputs."""
    root = root_of(None)
    folder = claim(root, "optimizer") if root else None
    if folder is None:
        return
    seen = snapshot(_named(graph(), names))
    states = ", ".join(f"{state} {codec.name}" for state, codec in plan.codecs) or "none"
    head = f"states: {states}\nparameter: {plan.dtype}, low bits kept: {plan.master}\n"
    texts = {"report.txt": head, "step.txt": seen.text, "step-full.txt": seen.full_text, "step.dot": seen.to_dot()}
    write(folder, texts)


def _named(graph: GraphModule, names: Sequence[str]) -> Graph:
    """A copy whose inputs have their names."""
    named: Graph = copy_graph(graph).graph
    for node, name in zip(reversed(named.find_nodes(op="placeholder")), reversed(names), strict=False):
        node.name = name.replace(".", "_").replace("/", "_")
    return named
