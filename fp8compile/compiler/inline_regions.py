"""Numbers stay as they are. A Dynamo graph without nested compile regions: each call is replaced by the region's operations.

It costs the compile time that regions save, so it is done only where a region does not work:

    statistics are taken     they leave the graph through an input of its own (observe/slot.py), which no region has
    weights are cached       their codes come in through inputs of the graph (linears/weight_slot.py)
    codes are offloaded      which of them, and when, depends on all calls together
    calls differ in recipe   ``modules``, ``skip`` and ``linears.skip`` go by module path, and one body serves all calls
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fp8compile.fx.graph import called, copy_with_attributes, is_call_of_region
from fp8compile.fx.provenance import module_path
from fp8compile.recipe.context import Context

OBSERVED = "nested compile regions are compiled call by call: statistics are taken in them, or weights are cached"
DIFFERS = (
    "nested compile regions are compiled call by call: the recipe differs between modules that call the same region"
)

WHOLE = "nested compile regions are compiled call by call: what goes to the host is decided for the graph as a whole"


def graphs_of(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and all that are nested in it."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def has_regions(gm: GraphModule) -> bool:
    return any(is_call_of_region(node) for each in graphs_of(gm) for node in each.graph.nodes)


def recipes_differ(gm: GraphModule, ctx: Context) -> bool:
    """Whether two calls of one region stand in modules to which the recipe says different things."""
    calls = defaultdict(list)
    for each in graphs_of(gm):
        for node in each.graph.nodes:
            if is_call_of_region(node):
                calls[node.args[1]].append(node)
    return any(
        _said(found[0], call, ctx) != _said(found[0], found[0], ctx) for found in calls.values() for call in found
    )


def _said(first: Node, call: Node, ctx: Context) -> list[Any]:
    """What the recipe says of each operation of a region, as if it were traced at ``call`` and not at the ``first`` call."""
    body = called(first)
    assert body is not None
    at, to = module_path(first), module_path(call)
    paths = sorted({module_path(node) for node in body.graph.nodes})
    moved = [to + path[len(at) :] if path.startswith(at) else path for path in paths]
    return [ctx.said_of(path) for path in moved]


def inlined(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph, and of the graphs nested in it, that calls no region."""
    copy, first = copy_with_attributes(gm), dict[Any, Node]()
    for name, child in list(copy.named_children()):
        if isinstance(child, GraphModule):
            setattr(copy, name, inlined(child))
    for call in [node for node in copy.graph.nodes if is_call_of_region(node)]:
        _inline(copy, call, first.setdefault(call.args[1], call))
    for node in list(copy.graph.find_nodes(op="get_attr")):
        if not node.users:
            copy.graph.erase_node(node)
    copy.recompile()
    return copy


def _inline(gm: GraphModule, call: Node, first: Node) -> None:
    """Replace a call of a region by the region's operations."""
    body = called(call)
    assert body is not None
    new: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                new[node] = _attribute(gm, body, node, call.graph)
            elif node.op not in ("placeholder", "output"):
                new[node] = gm.graph.node_copy(node, new.__getitem__)
                new[node].meta["nn_module_stack"] = _stack(node, first, call)
    results: Any = map_arg(body.graph.output_node().args[0], new.__getitem__)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _attribute(gm: GraphModule, body: GraphModule, node: Node, graph: Graph) -> Node:
    """An attribute that the body reads, a constant or a graph, as an attribute of the graph that the body goes into."""
    name = f"{node.target}"
    value = getattr(body, name)
    while hasattr(gm, name) and getattr(gm, name) is not value:
        name += "_"
    setattr(gm, name, value)
    made = graph.get_attr(name)
    made.meta = dict(node.meta)
    return made


def _stack(node: Node, first: Node, call: Node) -> dict[Any, Any]:
    """The modules an operation stands in, as seen from ``call``: a region is traced at its first call."""
    at, to = ([*(c.meta.get("nn_module_stack") or {"": ("", None)}).values()][-1][0] for c in (first, call))
    stack = node.meta.get("nn_module_stack") or {}
    return {
        key: (to + path[len(at) :] if at and path.startswith(at) else path, kind)
        for key, (path, kind) in stack.items()
    }
