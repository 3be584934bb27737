"""One graph of forward, loss and backward as two halves, and back: for a host whose graph no partitioner cuts.

    forward half     all that comes before the last run of nodes that autograd has made
    backward half    that run; it takes what it reads of the forward as saved tensors, and repeats the views of them

The gradients of a loss that is taken in chunks are made before that run. The backward half takes them as tangents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.fx.aot import describe_backward, is_tangent, output_descriptors
from fp8compile.fx.graph import is_size, is_tensor
from fp8compile.fx.ops import is_view
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.integrations.overwriting import BACKWARD, Writes, is_backward, overwrites

STAYS = "nothing that it keeps is stored as codes"
ENDS_BEFORE = f"the graph does not end in its backward: {STAYS}"
NEITHER = f"the backward reads {{}}, neither tensors nor sizes: {STAYS}"
OVERWRITES = f"the backward overwrites values in {{}}: {STAYS}"
OVERWRITTEN = f"the backward reads {{}}, made from memory that the graph overwrites: {STAYS}"


class CannotCut(Exception):
    """A graph that is not cut in two, with the reason."""


class GraphHalves:
    """The two halves of a graph whose inputs and results have AOTAutograd's descriptors (``describe_joint``).

    Attributes:
        split: for passes on two halves. What they leave in it is what ``joined`` puts together.
    """

    def __init__(self, gm: GraphModule, parameters: Iterable[int]) -> None:
        """``parameters``: their positions among the inputs.

        Raises:
            CannotCut: the backward half is empty, overwrites something, or reads what is overwritten and is no gradient.
        """
        *nodes, out = gm.graph.nodes
        first = 1 + max(i for i, node in enumerate(nodes) if not is_backward(node))
        self._fw, self._bw = Graph(), Graph()
        self._made: dict[Node, Node] = {}  # by nodes of the whole graph, those of the forward half
        self._used: dict[Node, Node] = {}  # and those of the backward half
        sizes, saved, tangents = _read_by(late := dict.fromkeys(nodes[first:]), Writes(gm.graph))
        for node in nodes[:first]:
            self._made[node] = self._fw.node_copy(node, self._made.__getitem__)
        for node in (*sizes, *saved, *tangents):
            self._used[node] = self._bw.placeholder(node.name)
            self._used[node].meta["val"] = node.meta["val"]
        for node in late:
            self._in_backward(node)
        self._passed = {self._used[n]: self._made[n] for n in (*sizes, *tangents)}
        results: Sequence[Any] = out.args[0]
        self._is_late = [n in late for n in results]
        own = [self._made.get(n, n) for n in results if n not in late]
        self._fw.output((*own, *(self._made[n] for n in (*saved, *sizes))))
        self._bw.output(tuple(self._used[n] for n in results if n in late))
        of_late = (d for n, d in zip(results, output_descriptors(gm.graph), strict=True) if n in late)
        describe_backward(self._bw, [self._used[n] for n in tangents], list(of_late))
        fw, bw = (private.LazyGraphModule(gm, graph) for graph in (self._fw, self._bw))
        self.split = PartitionedGraph(fw, bw, len(own), list(parameters))

    def joined(self) -> Graph:
        """The whole graph, made of the two halves as they are now."""
        graph, copied = Graph(), dict[Node, Node]()
        for node in self._fw.nodes:
            if node.op != "output":
                copied[node] = graph.node_copy(node, copied.__getitem__)
        saved = {edge.backward: edge.forward for edge in self.split.edges}
        copied |= {used: copied[made] for used, made in (saved | self._passed).items()}
        for node in self._bw.nodes:
            if node.op not in ("placeholder", "output"):
                copied[node] = graph.node_copy(node, copied.__getitem__)
                copied[node].meta[BACKWARD] = True
        late: Any = self._bw.output_node().args[0]
        of_halves = {False: iter(self.split.user_outputs), True: iter(late)}
        results = [next(of_halves[is_late]) for is_late in self._is_late]
        graph.output(tuple(copied[n] if isinstance(n, Node) else n for n in results))
        return graph

    def _in_backward(self, node: Node) -> Node:
        """The node of the backward half for one of the whole graph: an operation, an attribute, a view of what comes in."""
        if node not in self._used:
            self._used[node] = self._bw.node_copy(node, self._in_backward)
        return self._used[node]


def _read_by(late: Mapping[Node, None], writes: Writes) -> tuple[list[Node], list[Node], list[Node]]:
    """Sizes, tensors to save and tangents that the backward half reads."""
    operands = (n for node in late for n in node.all_input_nodes if n not in late and n.op != "get_attr")
    read = dict.fromkeys(map(_under_views, operands))
    sizes = [n for n in read if is_size(n)]
    tangents = [n for n in read if is_tensor(n) and (is_tangent(n) or n in writes.gradients)]
    saved = [n for n in read if is_tensor(n) and n not in set(tangents)]
    for reason, found in (
        (ENDS_BEFORE, () if late else ("",)),
        (NEITHER, set(read).difference(sizes, saved, tangents)),
        (OVERWRITES, filter(overwrites, late)),
        (OVERWRITTEN, writes.touched.intersection(saved)),
    ):
        if names := sorted(map(str, found)):
            raise CannotCut(reason.format(", ".join(names)))
    return sizes, saved, tangents


def _under_views(node: Node) -> Node:
    """The value that a chain of views begins at, as far as they read nothing else."""
    while is_view(node) and node.all_input_nodes == [node.args[0]]:
        node = node.args[0]  # type: ignore[assignment]
    return node
