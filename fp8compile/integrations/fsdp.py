"""FSDP2 that gathers weights as codes: ``compress_all_gather(model)`` after ``fully_shard``, one byte an element on the wire.

FSDP2 asks a parameter's local tensor how it is gathered: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which PyTorch
documents for tensor subclasses. Here the two are attributes of a plain tensor, so optimizers, checkpoints and ``state_dict``
see what they saw before. Before each forward of the model one small all-reduce finds the largest magnitude of each weight.
Every rank encodes with the scale of the whole weight.

Numbers change: a weight computes as its E4M3 codes have it, within 1/16 of each element. An FP8 linear with tensorwise scales
in a 16-bit model makes the same codes of the gathered weight as of the exact one, so its numbers stay as they are; in FP32
its scale may be off by one ulp.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8compile import _torch as private
from fp8compile.fx.provenance import without_wrappers
from fp8compile.numerics import E4M3
from fp8compile.numerics.scaling import amax_tensorwise, dequantize, inv_scale_of, quantize
from fp8compile.recipe.patterns import OUTPUT_HEAD_PATTERNS, in_module


def compress_all_gather(model: nn.Module, *, skip: Collection[str] = OUTPUT_HEAD_PATTERNS) -> list[str]:
    """Gather the weights of linears that FSDP2 shards as E4M3 codes with one scale each.

    Args:
        model: the root that ``fully_shard`` was called on, before its first forward.
        skip: patterns on module paths, as in ``Recipe.linears.skip``: linears gathered as they are. By default those where
            libraries keep the output head. A weight that is shared with a module that is no linear stays too.

    Returns:
        The names of the weights that travel as codes from now on.

    Raises:
        ValueError: the model is not sharded by FSDP2, has run already, or no linear is left to compress.
    """
    sharded = private.fsdp_parameters(model)
    if not sharded:
        raise ValueError(
            "compress_all_gather takes a model after torch.distributed.fsdp.fully_shard(model); this one is not."
        )
    names = _names_of_weights(model, skip)
    weights = [_ShardedWeight(p) for p in sharded if id(p.sharded_param) in names]
    if not weights:
        raise ValueError(f"no linear of {type(model).__name__} is left to compress: skip={list(skip)!r}")
    if any(hasattr(weight.sharded, "_unsharded_param") for weight in weights):
        raise ValueError(
            "compress_all_gather must be called before the first forward, which fixes how weights are gathered."
        )

    def prepare(*_: object) -> None:
        _measure(weights)

    model.register_forward_pre_hook(torch.compiler.disable(prepare), prepend=True)  # type: ignore[no-untyped-call]
    return [names[id(weight.sharded.sharded_param)] for weight in weights]


def _names_of_weights(model: nn.Module, skip: Collection[str]) -> dict[int, str]:
    """By identity of a parameter, the name of each weight that only linears outside ``skip`` have."""
    found, others = dict[int, str](), set[int]()
    for name, module in model.named_modules(remove_duplicate=False):
        path = without_wrappers(name)
        left = not isinstance(module, nn.Linear) or any(in_module(path, each) for each in skip)
        for own, parameter in module.named_parameters(recurse=False):
            if left or own != "weight":
                others.add(id(parameter))
            else:
                found.setdefault(id(parameter), f"{path}.{own}")
    return {key: name for key, name in found.items() if key not in others}


class _ShardedWeight:
    """A weight that FSDP2 shards, ``[N, K]`` in all, and the inverse scale of its codes, 0-d FP32."""

    def __init__(self, sharded: Any) -> None:
        self.sharded = sharded
        self.inv_scale: Tensor | None = None

    @property
    def local(self) -> Tensor:
        """This rank's rows, without padding."""
        found: Tensor = self.sharded.sharded_param._local_tensor
        return found

    def attach(self) -> None:
        """Have FSDP2 ask here; a tensor that a conversion or ``load_state_dict(assign=True)`` brought does not yet."""
        if not hasattr(self.local, "fsdp_pre_all_gather"):
            self.sharded.reset_sharded_param()
            self.local.fsdp_pre_all_gather = self._encode  # type: ignore[attr-defined]
            self.local.fsdp_post_all_gather = self._decode  # type: ignore[attr-defined]

    @property
    def dtype(self) -> torch.dtype:
        """What the weight computes in."""
        found: torch.dtype = self.sharded.mp_policy.param_dtype or self.local.dtype
        return found

    def amax(self) -> Tensor:
        """Of this rank's rows, in the dtype that computes; rounding is monotone, so the largest stays the largest."""
        return (
            (amax_tensorwise(self.local) if self.local.numel() else self.local.new_zeros(())).to(self.dtype).float()
        )

    def _encode(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """This rank's codes, filled up to the rows of every rank, and what decodes them."""
        assert self.inv_scale is not None, "the model's forward takes the scales first"
        codes = quantize(self.local.to(self.dtype), self.inv_scale, E4M3).view(torch.uint8)
        missing = self.sharded.padded_sharded_param_size[0] - codes.shape[0]
        return (torch.nn.functional.pad(codes, (0, 0, 0, missing)),), self.inv_scale

    def _decode(
        self, gathered: Sequence[Tensor], inv_scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight of all ranks, with padding behind it; its codes are freed at once."""
        (codes,) = gathered
        weight = dequantize(codes.view(E4M3.dtype), inv_scale, dtype)
        codes.untyped_storage().resize_(0)
        if out is None:
            return weight, (weight,)
        whole = out._local_tensor if isinstance(out, DTensor) else out
        with torch.no_grad(), private.version_preserved(out):
            whole.copy_(weight[: whole.shape[0]])
        return None


def _measure(weights: Sequence[_ShardedWeight]) -> None:
    """Take the scales of all weights anew, those of a process group with one all-reduce."""
    by_group: dict[Any, list[_ShardedWeight]] = {}
    for weight in weights:
        weight.attach()
        by_group.setdefault(weight.sharded.mesh_info.shard_process_group, []).append(weight)
    with torch.no_grad():
        for group, found in by_group.items():
            amax = torch.stack([weight.amax() for weight in found])
            dist.all_reduce(amax, dist.ReduceOp.MAX, group)
            for weight, inv_scale in zip(found, inv_scale_of(amax, E4M3), strict=True):
                weight.inv_scale = inv_scale
