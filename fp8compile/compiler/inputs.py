"""What a graph's inputs are: which train, their devices and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree


def trains(value: object) -> bool:
    """Whether it is a tensor with a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def cuda_devices(values: Iterable[object]) -> list[int]:
    """The indices of the CUDA devices of these tensors: those whose random numbers a step draws."""
    return sorted({t.device.index for t in values if isinstance(t, Tensor) and t.device.type == "cuda"})


def dtypes_of(gm: GraphModule, inputs: Sequence[Any]) -> set[torch.dtype]:
    """The dtypes of all tensors in a Dynamo graph, as it was captured: under autocast, what autocast makes of them."""
    values = (*inputs, *(node.meta.get("example_value") for node in gm.graph.nodes))
    return {v.dtype for v in pytree.tree_leaves(values) if isinstance(v, Tensor)}
