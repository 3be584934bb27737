"""A model that is on the meta device, for explain: copied onto fake tensors, which have shapes and devices but no memory.

Meta tensors themselves do not do: there attention is taken apart into matmuls and a softmax, and Inductor's folding of
constants ends in an error.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8compile import _torch as private


def is_on_meta(model: nn.Module) -> bool:
    """Whether all parameters of ``model`` are on the meta device.

    Raises:
        ValueError: some are and some are not.
    """
    where = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if any(where.values()) and not all(where.values()):
        meta, real = (next(name for name in where if where[name] is kind) for kind in (True, False))
        raise ValueError(
            f"parameter {meta} is on the meta device and {real} is not: put all of them there, or none "
            f"(model.to_empty(device=...) gives {meta} memory)"
        )
    return any(where.values())


def without_memory(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: private.FakeTensorMode
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Copies of a model and its arguments on fake tensors of the GPU, where there is one, else of the CPU.

    They are to be used inside ``mode``.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    held = {id(tensor): fake(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copied: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, fake, (args, kwargs))
    return copy.deepcopy(model, held), *copied  # deepcopy takes what it is given for these tensors, also where tied
