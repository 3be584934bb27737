"""The canary for ``private.STORED``, a key in a node's meta: the one private API that is no name and has to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8compile import _torch as private


def test_inductor_stores_a_node_that_is_marked() -> None:
    """A sum that feeds an output and two more sums: in one kernel unless it is marked, then its readers load it."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        shared = x.sin() + 1
        return shared.cos() + shared.exp()

    def marked(graph: torch.fx.Graph) -> None:
        (add,) = (n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor and n.args[1] == 1)
        add.meta[private.STORED] = True

    assert _buffers(wide, None) < _buffers(wide, marked)


def _buffers(fn: Callable[..., Any], mark: Callable[[torch.fx.Graph], None] | None) -> int:
    """How many buffers Inductor's code for ``fn`` computes before it fuses, with ``mark`` as a post-grad pass."""
    counts: list[int] = []

    def count(nodes: list[Any]) -> list[Any]:
        counts.append(len(nodes))
        return nodes

    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": mark, "_pre_fusion_custom_pass": count, "force_disable_caches": True}
    with private.inductor_config.patch(options):
        torch.compile(fn)(torch.ones(8))
    return counts[-1]
