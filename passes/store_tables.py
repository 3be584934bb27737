"""Numbers stay as they are. A table that larger values read is computed once, and not for each of their elements.

    cos = cos(angles)       [1, S, D]       the tables of rotary embeddings
    q * cos, k * cos        [B, H, S, D]    in several kernels of each layer, and of its backward

Inductor computes a pointwise value in every kernel that reads it, and so for each element there: B * H * S * D cosines where
S * D would do. On an H200 the kernels of a Llama's rotary embeddings took 2 to 4 times as long as their bytes need, in plain
Inductor as in ours (benchmarks/results/first-contact-h200-4.jsonl). So a table is stored, where that spares more time than
its kernel takes (``fp8compile/cost/device_rates.py``).

Left as they are: values that are not FP32, since storing one would round it; what is stored anyway; operations that take
fewer than ``LEAST`` instructions an element; numbers of rows, as the power that a norm's backward takes of 1 / deviation:
kernels that take rows compute them once a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import float32
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.cost.device_rates import GAP, LANES, MICRO, TERA
from fp8compile.cost.generated import INSTRUCTIONS
from fp8compile.fx.graph import is_tensor, numel
from fp8compile.fx.ops import is_pointwise, is_read_from_memory, is_view_or_part, opname
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

LEAST = 20  # instructions an element
LARGER = 8  # times as many elements


def store_tables(graph: Graph, ctx: Context) -> Notes:
    """Let Inductor store FP32 values of dear operations that much larger values read."""
    if ctx.recipe.rewrites_graph:
        for node in graph.nodes:
            if _is_dear(node) and not is_read_from_memory(node) and _spared_us(node) > GAP:
                node.meta[private.STORED] = True
    return Notes()


def _is_dear(node: Node) -> bool:
    """Whether an FP32 value takes many instructions an element, and is no number for each row."""
    dear = is_pointwise(node) and INSTRUCTIONS.get(opname(node), 0) >= LEAST
    return dear and is_tensor(node) and node.meta["val"].dtype == float32 and node.meta["val"].shape[-1:] != (1,)


def _spared_us(table: Node) -> float:
    """Microseconds in which its operation is done for each element of the larger values that read it."""
    return INSTRUCTIONS[opname(table)] * sum(_larger(table)) / (LANES * TERA) / MICRO


def _larger(table: Node) -> Iterator[int]:
    """The elements of what reads a table, through views and values of few elements too, where they are far more."""
    least, seen, open_ = LARGER * numel(table.meta["val"]), {table}, [table]
    while open_:
        for user in open_.pop().users.keys() - seen:
            seen.add(user)
            if is_pointwise(user) and is_tensor(user) and numel(user.meta["val"]) >= least:
                yield numel(user.meta["val"])
            elif is_pointwise(user) or is_view_or_part(user):
                open_.append(user)
