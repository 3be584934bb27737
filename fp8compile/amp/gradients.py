"""An optimizer's gradients: found, clipped, divided by the loss scale; dense, sparse and sharded.

    grad <- clip(grad) / scale

Where a gradient is FP16 the quotient may have no FP16 value: below 2**-25 it would be 0. Optimizers of fp8compile.optim
compute in FP32 and get it in FP32 (``p.grad_dtype = None``: torch lets a gradient have another dtype than its parameter);
torch's own would refuse it, so they get it in FP16. The gradients that become 0 there are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile._distributed import complete_grad, local_part
from fp8compile._torch import unscale_and_check_
from fp8compile.numerics.formats import FP16_MAX
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


def count_nonfinite(gradients: Sequence[Gradient], device: torch.device) -> Tensor:
    """How many elements are inf or NaN: 0-d float64 on ``device``."""
    return _total([(~torch.isfinite(each.values)).sum() for each in gradients], device)


def clip(gradients: Sequence[Gradient]) -> None:
    """Clip in place: FP16 to [-65504, 65504]. In other dtypes, whose range does not matter here, only an inf is clipped to
    +-65504: it was an FP16 number once. NaN stays."""
    for each in gradients:
        if each.values.dtype == torch.float16:
            each.values.clamp_(-FP16_MAX, FP16_MAX)
        else:
            torch.nan_to_num_(each.values, nan=torch.nan, posinf=FP16_MAX, neginf=-FP16_MAX)


def widened(gradients: Sequence[Gradient], optimizer: torch.optim.Optimizer) -> list[Gradient]:
    """FP16 gradients in FP32 if the optimizer takes them so; the others as they are."""
    return [
        _wide(each) if each.values.dtype == torch.float16 and takes_fp32(optimizer) else each for each in gradients
    ]


def takes_fp32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes an FP32 gradient of an FP16 parameter."""
    return isinstance(optimizer, EncodedOptimizer)


def _wide(each: Gradient) -> Gradient:
    p = each.p
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        return each  # such an optimizer refuses it anyway, and says why
    wide = p.grad.float()
    p.grad_dtype = None
    p.grad = wide
    return Gradient(p, each.name, local_part(wide))


def unscale(gradients: Sequence[Gradient], scale: Tensor) -> Tensor:
    """Divide in place; by torch's own kernel, as torch.amp.GradScaler does. 0-d float32: 1 if an inf or NaN was found."""
    inv_scale = scale.double().reciprocal().float()
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for each in gradients:
        alike[each.values.device, each.values.dtype].append(each.values)
    founds = []
    for (device, _), values in alike.items():
        founds.append(torch.zeros((), dtype=torch.float32, device=device))
        unscale_and_check_(values, founds[-1], inv_scale.to(device, non_blocking=True))
    return _total(founds, scale.device).clamp_max(1.0).float()


def count_nonzero_fp16(gradients: Sequence[Gradient], device: torch.device) -> Tensor:
    """How many elements of FP16 gradients are not 0: 0-d float64 on ``device``."""
    return _total([torch.count_nonzero(g.values) for g in gradients if g.values.dtype == torch.float16], device)


def _total(several: Sequence[Tensor], device: torch.device) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([zero, *(each.double().to(device, non_blocking=True) for each in several)]).sum()
