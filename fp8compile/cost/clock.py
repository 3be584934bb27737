"""A graph's predicted clock: how many microseconds after its beginning each operation starts.

Operations run one after another, each as long as the roofline says (fp8compile/cost/op_cost.py); what has no prediction
takes no time.
"""

from __future__ import annotations

from itertools import dropwhile, takewhile

from torch.fx import Graph, Node

from fp8compile.cost.device_rates import DeviceRates
from fp8compile.cost.op_cost import is_priced, microseconds


class Clock:
    """The start of each node of a graph, as the graph is now: nodes that are added later have none.

    Attributes:
        starts: microseconds by node, in the graph's order.
    """

    def __init__(self, graph: Graph, rates: DeviceRates) -> None:
        self.starts: dict[Node, float] = {}
        now = 0.0
        for node in graph.nodes:
            self.starts[node] = now
            if node.op == "call_function" and is_priced(node):
                now += microseconds(node, rates)
        self.length = now

    def first_from(self, us: float, made: Node) -> Node:
        """The first node behind ``made`` that starts at ``us`` or later; the output if there is none."""
        behind = list(dropwhile(lambda node: node is not made, self.starts))[1:]
        return next((node for node in behind if self.starts[node] >= us and node.op != "placeholder"), behind[-1])

    def last_until(self, us: float, read: Node) -> Node:
        """The last operation up to ``read`` that starts at ``us`` or earlier; the first operation if there is none."""
        until = [node for node in takewhile(lambda node: node is not read, self.starts) if node.op != "placeholder"]
        return next((node for node in reversed([*until, read]) if self.starts[node] <= us), [*until, read][0])
