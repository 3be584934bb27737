"""Activation checkpointing: reentrant and not, nested, selective, with random numbers, with state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.sweeps.registry import leaf, linear, modules, program, steps

aten = torch.ops.aten


def block(m: Any, x: Tensor) -> Tensor:
    return x + F.silu(m(x)) * x.sigmoid()


@program(leaf(64, 256), model=linear(256, 256, 256))
def a_checkpointed_block(m: Any, x: Tensor) -> Tensor:
    return checkpoint(block, m, x, use_reentrant=False).sin()


@program(leaf(64, 256), model=linear(256, 256, 256))
def a_reentrant_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(block, m, x, use_reentrant=True).sin()


@program(leaf(64, 256), model=linear(256, 256))
def checkpoints_within_checkpoints(m: Any, x: Tensor) -> Tensor:
    def outer(h: Tensor) -> Tensor:
        return checkpoint(block, m, checkpoint(block, m, h, use_reentrant=False).tanh(), use_reentrant=False)

    return checkpoint(outer, x, use_reentrant=False).sigmoid()


@program(leaf(64, 256), model=linear(256, 256))
def two_checkpoints_in_a_row_share_a_weight(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(block, m, x, use_reentrant=False)
    return checkpoint(block, m, y, use_reentrant=False)


@program(leaf(64, 256), model=modules(a=lambda: nn.Linear(256, 256), b=lambda: nn.Linear(256, 256)))
def two_checkpoints_of_equal_bodies_and_other_weights(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(block, m["a"], x, use_reentrant=False)
    return checkpoint(block, m["b"], y, use_reentrant=False)


@program(leaf(64, 256), model=linear(256, 256))
def dropout_within_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda h: F.dropout(F.gelu(m(h)), 0.3, True) * h, x, use_reentrant=False).sin()


@program(leaf(64, 256), model=linear(256, 256))
def noise_within_and_after_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda h: m(h).tanh() * torch.rand_like(h), x, use_reentrant=False)
    return y * torch.rand_like(y)


@program(
    leaf(8, 16, 12, 12), model=lambda: nn.Sequential(nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU())
)
def batch_norm_within_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m, x, use_reentrant=False).sin()


@program(leaf(64, 256), model=linear(256, 256, 256, 256))
def checkpoint_sequential_in_two_parts(m: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(m, 2, x, use_reentrant=False).tanh()


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@program(leaf(64, 256), model=linear(256, 256, 256))
def a_selective_checkpoint_keeps_the_products(m: Any, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(block, m, x, use_reentrant=False, context_fn=contexts).sin()


@program(leaf(64, 256), model=linear(256, 256))
def amax_and_a_pole_within_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    def scaled(h: Tensor) -> Tensor:
        y = m(h)
        return y / y.abs().amax(-1, keepdim=True) / (1.5 - y.tanh())

    return checkpoint(scaled, x, use_reentrant=False).sin()


@program(leaf(64, 256), model=linear(256, 256), drive=steps(2))
def several_outputs_of_a_checkpoint(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = checkpoint(lambda h: (m(h).sigmoid(), h.tanh()), x, use_reentrant=False)
    return a * b, a, b
