"""Where updates stand: behind their gradient and the last read of what they write, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from fp8compile.whole_step.early import GRADIENT, alive_at_once, place_early
from fp8compile.whole_step.joined import FIRST_UPDATE, PART

aten = torch.ops.aten


class Built:
    """y = relu(w_0), g_1 = x w_1, z = y w_0^T, g_0 = z x; then both updates, at the end."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x, self.w0, self.w1 = (self._valued(self.graph.placeholder(name)) for name in ("x", "w0", "w1"))
        y = self.call(aten.relu.default, self.w0)
        self.g1 = self.call(aten.mm.default, self.x, self.w1)
        turned = self.call(aten.t.default, self.w0)
        self.z = self.call(aten.mm.default, y, turned)
        self.g0 = self.call(aten.mm.default, self.z, self.x)
        for gradient in (self.g0, self.g1):
            gradient.meta[GRADIENT] = True

    def call(self, target: object, *args: object, part: int = 0) -> Node:
        node = self._valued(self.graph.call_function(target, args))  # type: ignore[arg-type]
        node.meta[PART] = part
        return node

    def update(self, number: int, weight: Node, gradient: Node) -> Node:
        new = self.call(aten.sub.Tensor, weight, gradient, part=FIRST_UPDATE + number)
        return self.call(aten.copy_.default, weight, new, part=FIRST_UPDATE + number)

    @property
    def order(self) -> list[Node]:
        return list(self.graph.nodes)

    @staticmethod
    def _valued(node: Node) -> Node:
        node.meta["val"] = torch.empty(4, 4)
        return node


def test_each_update_stands_behind_its_gradient_and_the_last_read() -> None:
    built = Built()
    first, second = built.update(0, built.w0, built.g0), built.update(1, built.w1, built.g1)
    built.graph.output((built.z,))
    assert alive_at_once(built.graph) == (128, 128)
    place_early(built.graph)
    order = built.order
    assert order.index(second) == order.index(built.g1) + 2, "directly behind its gradient"
    assert order.index(first) == order.index(built.g0) + 2
    assert alive_at_once(built.graph) == (128, 64)


def test_a_read_through_a_view_is_waited_for() -> None:
    built = Built()
    write = built.update(0, built.w0, built.g1)
    built.graph.output((built.z,))
    place_early(built.graph)
    assert built.order.index(built.z) < built.order.index(write)


def test_an_update_that_reads_anothers_stays_at_the_end() -> None:
    built = Built()
    new = built.call(aten.sub.Tensor, built.w1, built.g1, part=FIRST_UPDATE)
    built.call(aten.copy_.default, built.w1, new, part=FIRST_UPDATE)
    write = built.call(aten.copy_.default, built.w0, new, part=FIRST_UPDATE + 1)
    built.graph.output((built.z,))
    place_early(built.graph)
    assert built.order[-2] is write


def test_a_read_behind_a_write_is_found() -> None:
    built = Built()
    new = built.call(aten.sub.Tensor, built.w1, built.g1, part=FIRST_UPDATE + 1)
    built.call(aten.copy_.default, built.w1, new, part=FIRST_UPDATE)  # reads another update: it is not moved
    late = built.call(aten.relu.default, built.w1)
    built.graph.output((late,))
    with pytest.raises(AssertionError, match=r"relu_default_1 reads \[w1\] behind"):
        place_early(built.graph)
