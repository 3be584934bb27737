"""An optimizer's gradients, as they are found: dense, sparse and sharded.

    grad <- clip(grad) / scale      (``buckets``)

Where a gradient is FP16 the quotient may have no FP16 value: below 2**-25 it would be 0. Optimizers of fp8compile.optim
compute in FP32 and get it in FP32 (``p.grad_dtype = None``: torch lets a gradient have another dtype than its parameter);
torch's own would refuse it, so they get it in FP16. The gradients that become 0 there are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile._distributed import complete_grad, local_part
from fp8compile.optim.base import EncodedOptimizer


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient.

    Attributes:
        p: the parameter.
        name: its name if the optimizer was built with names, else None.
        values: the elements that are on this rank; of a sparse gradient its coalesced values. In-place changes count.
    """

    p: Tensor
    name: str | None
    values: Tensor


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Gradient]:
    """The gradients of an optimizer's parameters, sparse ones coalesced, sharded ones complete.

    Raises:
        ValueError: a gradient that is complex, or of a sparse layout other than COO.
    """
    found = []
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for i, (p, name) in enumerate(zip(group["params"], names, strict=True)):
            if p.grad is not None:
                found.append(Gradient(p, name, _values(p, name or f"parameter {i} of group {index}")))
    return found


def _values(p: Tensor, name: str) -> Tensor:
    assert p.grad is not None
    if not p.grad.is_floating_point():
        raise ValueError(f"{name} has a gradient of {p.grad.dtype}: loss scaling is for real floating-point gradients; "
                         "give this parameter to an optimizer that the scaler does not step")  # fmt: skip
    if p.grad.layout == torch.sparse_coo:
        p.grad = p.grad.coalesce()  # duplicates are added now, so that an overflow of the sum is seen
        return p.grad._values()
    if p.grad.layout != torch.strided:
        raise ValueError(f"{name} has a gradient of layout {p.grad.layout}: dense and sparse_coo are supported")
    complete_grad(p)
    return local_part(p.grad)


def takes_fp32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes an FP32 gradient of an FP16 parameter."""
    return isinstance(optimizer, EncodedOptimizer)
