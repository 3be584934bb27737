"""Small tools on FX graphs: splice a traced function in, copy a graph, follow views to their storage, count bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.fx.ops import VIEWS, is_view
from fp8compile.fx.tracing import copy_into, result_of, traced

aten = torch.ops.aten

SPLICED = "fp8compile"  # the key in a node's meta that says which function, on which values, put it there
SAVED_AS_CODES = (
    "fp8compile_saved_as_codes"  # in the meta of a value of the forward that plain Inductor would save itself
)
COPY_OF = "fp8compile_copy_of"  # in the meta of a node that computes a value once more, only to be saved: the value
TAKEN_AS_CODES = "fp8compile_taken_as_codes"  # in the meta of a value that plain Inductor would store for a matmul
AMAX = "fp8compile_amax"  # in the meta of a matmul's operand whose amax is known: the node that holds it, 0-d
INV_SCALES = (
    "fp8compile_inv_scales"  # in the meta of a weight whose scales are known: by format the node of each, 0-d
)
ENCODING = "fp8compile_encoding"  # in the meta of a matmul operand's codes and scale: an Encoding

UNKNOWN = 8192  # the number assumed for a size without a bound in counts and prices; Inductor assumes the same

# In the meta of operations that encode experts' rows: the backward may repeat them, though one is a reduction.
AGAIN = "fp8compile_again"

ROW = "fp8compile_row"  # in the meta of a value that is observed: its row in the graph's statistics

EXACT = (
    "fp8compile_exact"  # in the meta of a value that is saved as it is: the backward must have what the forward had
)

SAVED_KEY = "fp8compile_saved_key"  # in the meta of a value that is saved: what a choice of bits recognises it by
TRIED = "fp8compile_tried"  # in the meta of an input of the backward: the ways to store it, which are to be measured

IN_CHUNKS = "fp8compile_in_chunks"  # in the meta of operations on a chunk of logits

# In the meta of codes that a pass moves between device and host, and of what waits for them: where their bytes are.
MOVED, HOST, DEVICE, AWAITED = "fp8compile_moved", "host", "device", "awaited"

# Why a pass that has to know bytes leaves a graph as it is.
NOT_STATIC = "it has sizes that only a run knows; torch.compile(dynamic=False) compiles for each size"

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, int)  # what stands for a size or another number of the caller's

CLIPPED = "fp8compile_clipped"  # in the meta of the operations that clip a gradient to the graph's limit


@dataclass(frozen=True)
class Encoding:
    """What codes and scale stand for: the codec, and the value's dtype and bytes."""

    codec: str
    dtype: str
    nbytes: int


def encoding_of(node: Node) -> Encoding | None:
    """The encoding that ``node`` is the codes or the scale of, through views and copies; None for any other value."""
    while SPLICED in node.meta and ENCODING not in node.meta and node.target in (*VIEWS, aten.clone.default):
        parent = node.args[0]
        assert isinstance(parent, Node)
        node = parent
    return node.meta.get(ENCODING)


def splice(graph: Graph, fn: Callable[..., Any], *nodes: Node, before: Node, mark: str | None = None) -> Any:
    """Trace ``fn`` on the values of ``nodes`` and insert its operations before ``before``; returns fn's result as nodes.

    ``fn`` is traced under the nodes' own fake mode and with Inductor's decompositions. So the inserted operations lower like
    any that were there before, and each has a ``meta["val"]`` of its own. ``fn`` is traced once for values that are alike.
    ``mark`` is a key that all of its operations get in their meta.
    """
    values = [node.meta["val"] for node in nodes]
    fake_mode = private.detect_fake_mode(values)
    assert fake_mode is not None, "values of a graph that is compiling are fake"
    provenance: dict[str, Any] = {k: v for k, v in nodes[0].meta.items() if k in ("stack_trace", "nn_module_stack")}
    provenance[SPLICED] = f"{fn.__name__}({', '.join(n.name for n in nodes)})"
    provenance |= {mark: True} if mark else {}
    copied: dict[Node, Node] = {}
    arguments = iter(nodes)
    with graph.inserting_before(before), fake_mode:
        for node in traced(fn, values, fake_mode).nodes:
            if node.op == "placeholder":
                copied[node] = next(arguments)
            elif node.op == "output":
                return torch.fx.node.map_arg(node.args[0], lambda n: copied[n])
            else:
                new = copied[node] = copy_into(graph, node, copied)
                new.meta |= provenance | {"val": result_of(new, fake_mode)}
    raise AssertionError("a traced graph has an output")


def insertion_point_after(node: Node) -> Node:
    """The node to splice before so that the result stands directly after ``node``, but never among the inputs."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def copy_graph(gm: GraphModule) -> GraphModule:
    """A graph module that can be rewritten without touching ``gm``; values in ``meta`` are shared."""
    graph = Graph()
    out, old = graph.graph_copy(gm.graph, {}, return_output_node=True)  # type: ignore[misc]
    assert isinstance(old, Node)
    graph.output(out).meta = dict(old.meta)
    return private.LazyGraphModule(gm, graph)


def copy_with_attributes(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph with what Dynamo noted on module and nodes: it says which inputs are parameters."""
    spare = copy_graph(gm)
    spare.meta = dict(gm.meta)
    for ours, theirs in ((spare, gm), *zip(spare.graph.nodes, gm.graph.nodes, strict=True)):
        vars(ours).update({name: value for name, value in vars(theirs).items() if name not in vars(ours)})
    return spare


def is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_size(node: object) -> bool:
    """Whether a node is a number, symbolic or not; AOTAutograd moves those from the forward to the backward by themselves."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), SIZES)


def is_on_host(node: Node) -> bool:
    """Whether a value waits in the host's memory for the backward."""
    return node.meta.get(MOVED) == HOST


def is_static(node: Node) -> bool:
    """Whether a node's value is no symbolic number, and no tensor with a symbolic size."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return not any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


def is_call_of_region(node: Node) -> bool:
    """Whether the node calls a nested compile region: ``invoke_subgraph(body, identifier, *operands)``."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.invoke_subgraph


def called(node: Node) -> GraphModule | None:
    """The region that a node calls; None for any other node."""
    owner, body = node.graph.owning_module, node.args[0] if is_call_of_region(node) else None
    found = getattr(owner, str(body.target), None) if isinstance(body, Node) else None
    return found if isinstance(found, GraphModule) else None


def storage_root(node: Node) -> Node:
    """The node whose storage ``node`` uses: itself, or the start of its chain of views.

    Views are followed through regions: what a region returns may be an operand of the call, a weight that it keeps.
    """
    while (parent := _looks_at(node)) is not None:
        node = parent
    return node


def _looks_at(node: Node) -> Node | None:
    """The node that ``node`` is a view of, or the operand that a region passes on as this result of it."""
    parent = node.args[0] if node.args else None
    if is_view(node):
        assert isinstance(parent, Node)
        return parent
    if node.target is not private.getitem or not isinstance(parent, Node) or (body := called(parent)) is None:
        return None
    result: Any = body.graph.output_node().args[0][node.args[1]]  # type: ignore[index]
    root = storage_root(result) if isinstance(result, Node) else None
    if root is None or root.op != "placeholder":
        return None
    operand = parent.args[2 + body.graph.find_nodes(op="placeholder").index(root)]
    assert isinstance(operand, Node)
    return operand


def size_hint(size: int | torch.SymInt) -> int:
    """The size hint as a number: for a symbolic size the one seen at compilation, for one that only a run knows an estimate.

    No guard is added, so code stays right for every size. ``unknown_sizes`` lists the sizes that are estimates.
    """
    if isinstance(size, int):
        return size
    seen = size.node.hint
    return int(seen) if seen is not None else private.size_as_estimated(size, UNKNOWN)[0]


def unknown_sizes(values: Iterable[torch.Tensor]) -> dict[str, int]:
    """The symbols in the shapes of ``values`` that only a run knows, and the numbers that ``size_hint`` assumes for them."""
    found: dict[str, int] = {}
    for value in values:
        for size in value.shape:
            if not isinstance(size, int) and size.node.hint is None:
                found |= private.size_as_estimated(size, UNKNOWN)[1]
    return found


def numel(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape:
        count *= size_hint(size)
    return count


def nbytes(value: torch.Tensor) -> int:
    return numel(value) * value.element_size()


def shape_text(shape: Iterable[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def dtype_text(value: torch.Tensor) -> str:
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}.get(
        name := str(value.dtype).removeprefix("torch."), name
    )


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation that makes a permuted tensor contiguous, or None where it is contiguous already."""
    strides = [size_hint(s) if size_hint(n) != 1 else 0 for s, n in zip(value.stride(), value.shape, strict=True)]
    moving = [d for d in range(value.dim()) if strides[d]]
    ordered = iter(sorted(moving, key=lambda d: -strides[d]))
    order = tuple(next(ordered) if strides[d] else d for d in range(value.dim()))
    return None if order == tuple(range(value.dim())) else order


def sizes_in_memory(value: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a permuted tensor, in the order of its memory; those that only a run knows as they are estimated."""
    order = memory_order(value) or range(value.dim())
    return tuple(size_hint(value.shape[d]) for d in order)


def computed_from_any(nodes: Iterable[Node], but: Node | None = None) -> set[Node]:
    """All that is computed from any of some nodes, and they themselves; through all nodes but one."""
    found, waiting = set[Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node is not but:
            found.add(node)
            waiting += node.users
    return found


def behind(nodes: Iterable[Node]) -> set[Node]:
    """These nodes and all that they are made of."""
    waiting, found = [*nodes], set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def users_of(nodes: Iterable[Node]) -> list[Node]:
    return [user for node in nodes for user in node.users]


WIDENED = "fp8compile_widened"  # in the meta of a node that now computes in FP32: the name it had
