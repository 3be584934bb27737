"""A graph run in float64, whatever its own dtypes: what its kernels round is no part of an argument about codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

prims = torch.ops.prims


class Wide(Interpreter):
    """Runs a graph in float64."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return widened(result)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is prims.convert_element_type.default and args[1].is_floating_point and args[0].is_floating_point():
            return args[0]
        return super().call_function(target, args, kwargs)


def widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return type(value)(map(widened, value)) if isinstance(value, (tuple, list)) else value
