"""How an update's values are written where they belong: ``placing._write``."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from fp8compile.whole_step import placing

aten = torch.ops.aten
WIDTH, GROUP = 256, 128


def written(target: torch.Tensor, view: bool) -> tuple[Node, Node]:
    """The graph's write of 512 rows of 128 into ``target``: through a view of its shape, or of another operation."""
    graph = Graph()
    to, rows = graph.placeholder("to"), graph.placeholder("rows")
    to.meta["val"], rows.meta["val"] = target, torch.ones(WIDTH * WIDTH // GROUP, GROUP)
    value = graph.call_function(aten.view.default, (rows, [WIDTH, WIDTH]))
    value.meta["val"] = torch.ones(WIDTH, WIDTH)
    if not view:
        value = graph.call_function(aten.neg.default, (value,))
        value.meta["val"] = torch.ones(WIDTH, WIDTH)
    end = graph.output(())
    placing._write(graph, to, value, end)
    graph.lint()
    (write,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return write, rows


def test_rows_are_written_as_rows() -> None:
    """Inductor 2.11 makes no kernel of rows end in a copy of another shape: the update would be two."""
    write, rows = written(torch.zeros(WIDTH, WIDTH), view=True)
    assert write.args[1] is rows
    assert write.args[0].target is aten.view.default and write.args[0].args[1] == [WIDTH * WIDTH // GROUP, GROUP]
    assert write.meta["val"].shape == (WIDTH * WIDTH // GROUP, GROUP)


@pytest.mark.parametrize(
    ("target", "view"),
    [(torch.zeros(WIDTH, WIDTH).t(), True), (torch.zeros(WIDTH, WIDTH), False)],
    ids=["transposed", "no view"],
)
def test_what_has_no_rows_is_written_in_its_shape(target: torch.Tensor, view: bool) -> None:
    write, _ = written(target, view)
    assert write.args[0].op == "placeholder" and write.args[1].meta["val"].shape == (WIDTH, WIDTH)
