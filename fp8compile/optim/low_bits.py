"""The first state of a parameter, and the bits kept beside a 16-bit one as they are loaded, from any kind of ``master``.

split          correction                        int8, in 1/256 of an ulp of the weight: state dicts say of which dtype
fp32           master                            FP32
fp16_scaled    master_fp16, master_inv_scale     FP16, and a 0-d FP32 that all ranks have alike
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8compile._distributed import largest_of, local_part, shard_like
from fp8compile.numerics.rounding import GRIDS, grid_of
from fp8compile.numerics.states.channels_last import laid_by_channels
from fp8compile.numerics.states.scaled_weights import inv_scale_for, scaled, unscaled
from fp8compile.numerics.states.split_weights import joined, split
from fp8compile.optim.plan import INV_SCALE16, MASTER16, Tensors, UpdatePlan

DTYPES = {"correction": torch.int8, "master": torch.float32, MASTER16: torch.float16}
MANTISSA = (
    "correction_mantissa"  # in state dicts: the bits of the mantissa of the weights that a correction belongs to
)
BESIDE_STATES = (*DTYPES, INV_SCALE16, MANTISSA)
FIRST = {"split": "correction", "fp32": "master", "fp16_scaled": MASTER16}


class LowBitsState(Protocol):
    """What is read of a state that is loaded; ``checkpoint.CheckpointState``."""

    @property
    def values(self) -> Any: ...

    def error(self, what: object) -> ValueError: ...

    def mine(self, key: str, dtype: torch.dtype, signed: bool = True) -> Tensor: ...


def kept_beside(master: str) -> list[str]:
    """The keys of what a kind of ``master`` keeps in a state."""
    return [FIRST[master], INV_SCALE16][: 1 + (master == "fp16_scaled")] if master in FIRST else []


def initial_state(plan: UpdatePlan, p: Tensor) -> Tensors:
    """The state of a parameter before its first step, sharded as it is; ``step`` not included.

    Raises:
        ValueError: a weight that is not finite, where one scale is to hold all of them.
    """
    largest = largest_of(p) if plan.master == "fp16_scaled" else None
    if largest is not None and not bool(largest.isfinite()):
        raise ValueError(
            f"master='fp16_scaled': a parameter of shape {[*p.shape]} holds NaN or inf, which no scale holds: load or "
            "initialise it before the first step (get_optimizer_state_dict takes one too)"
        )
    return sharded(p, plan, plan.initial(local_part(p), largest))


def sharded(p: Tensor, plan: UpdatePlan, parts: Tensors) -> Tensors:
    """Parts of a state as they are kept: cut as ``p`` is, and in its order of memory, but for single numbers."""
    return {name: _kept(p, plan, name, part) for name, part in parts.items()}


def _kept(p: Tensor, plan: UpdatePlan, name: str, part: Tensor) -> Tensor:
    if name in (INV_SCALE16, *plan.update.singles):
        return part
    return laid_by_channels(part) if plan.channels_last and name in DTYPES else shard_like(p, part)


def decoded_state(p: Tensor, plan: UpdatePlan, state: Mapping[str, Tensor]) -> Tensors:
    """A state as the optimizer itself would keep it, in memory of its own: elements in FP32, sharded as ``p`` is; single
    numbers on the host. The bits kept beside ``p`` are left out."""
    decoded = plan.decoded({name: local_part(part) for name, part in state.items()}, local_part(p).shape)
    numbers = {name: state[name].cpu().clone() for name in ("step", *plan.update.singles)}
    return numbers | {
        name: x.clone() if plan.channels_last else shard_like(p, x.clone()) for name, x in decoded.items()
    }


def loaded(p: Tensor, plan: UpdatePlan, saved: LowBitsState) -> Tensors:
    """The bits kept beside ``p``: as saved, converted from another kind of ``master``, or made from ``p``."""
    if plan.master not in FIRST:
        return {}
    known = {name: saved.mine(name, dtype) for name, dtype in DTYPES.items() if name in saved.values}
    if "correction" in known:
        _check_mantissa(p, saved)
    first = FIRST[plan.master]
    if first in known:
        return {first: known[first]} | ({INV_SCALE16: _scale(p, saved)} if first == MASTER16 else {})
    exact = _exact(p, known, saved)
    if plan.master == "fp32":
        return {first: local_part(p).float().clone() if exact is None else exact}
    if plan.master == "split":
        zeros = torch.zeros(local_part(p).shape, dtype=torch.int8, device=local_part(p).device)
        return {first: zeros if exact is None else _correction(exact, local_part(p))}
    inv_scale = inv_scale_for(largest_of(p))
    return {first: scaled(local_part(p).float() if exact is None else exact, inv_scale), INV_SCALE16: inv_scale}


def extra_entries(p: Tensor, state: Mapping[str, Tensor]) -> Tensors:
    """What a state dict says in addition of the state of ``p``: 0-d, FP32, as ``step``."""
    return {MANTISSA: torch.tensor(float(grid_of(p.dtype).mantissa))} if "correction" in state else {}


def _check_mantissa(p: Tensor, saved: LowBitsState) -> None:
    """State dicts that do not say it are taken for those of the parameter's dtype."""
    value = saved.values.get(MANTISSA)
    if isinstance(value, Tensor):
        value = local_part(value).item() if value.numel() == 1 else [*value.shape]
    if value is not None and value != grid_of(p.dtype).mantissa:
        known = (dtype for dtype, grid in GRIDS.items() if grid.mantissa == value)
        made = next(known, f"{value} bits of mantissa")
        raise saved.error(
            f"its correction is to a weight of {made}, and the parameter is {p.dtype}: leave its 'correction' out, so that "
            "the low bits start anew, or save it with master='fp32'"
        )


def _exact(p: Tensor, known: Tensors, saved: LowBitsState) -> Tensor | None:
    """The FP32 master that another kind of ``master`` kept; None: there was none."""
    if "correction" in known:
        return joined(local_part(p), known["correction"])
    if MASTER16 in known:
        return unscaled(known[MASTER16], _scale(p, saved))
    return known.get("master")


def _scale(p: Tensor, saved: LowBitsState) -> Tensor:
    value = saved.values.get(INV_SCALE16)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise saved.error(f"its {INV_SCALE16} is {value!r}, and one number fits")
    found = local_part(value).detach().float().reshape(()).clone()
    mantissa, _ = torch.frexp(found)
    if float(mantissa) != 0.5:
        raise saved.error(f"its {INV_SCALE16} is {float(found)}, not a power of two")
    return found.to(local_part(p).device)


def _correction(master: Tensor, p: Tensor) -> Tensor:
    """The correction to the weight ``p`` that stands for ``master``; near a tie, ``split`` might choose another weight."""
    weight, correction = split(master, p.dtype)
    towards = torch.where(master.abs() > p.float().abs(), 127, -128).to(torch.int8)
    return torch.where(weight == p, correction, towards)
