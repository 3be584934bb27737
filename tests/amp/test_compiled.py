"""Loss scalers on models that fp8compile compiled: the graphs' statistics, and clipping in their backward."""

from __future__ import annotations

import torch
from torch import nn

from fp8compile import optim
from fp8compile.amp import LossScaler
from fp8compile.observe.records import StatsSlot
from tests.support.amp_models import batch, grown, net
from tests.support.loss_scale import expected_scale


def test_a_compiled_model_is_bound_and_clipped() -> None:
    model = net()
    compiled = torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager"})
    optimizer = optim.AdamW(model, lr=0.0, compiled=False)
    scaler, scale = LossScaler(), 1.0

    def step(i: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        for part in batch(i, rows=12).chunk(2):  # micro-batches
            scaler.scale(compiled(part).float().pow(2).mean() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    for i in range(5):
        step(i)
        (slot,) = scaler.observations
        assert isinstance(slot, StatsSlot) and slot.limit == 65504 and len(slot.history) == i + 1
        assert scaler.get_scale() == expected_scale(slot, scale)
        scale = scaler.get_scale()
    assert scale == 32
    weights = [n for row, n in zip(slot.rows, slot.history[-1][1], strict=True) if row.module == "0.weight"]
    assert weights[0][:4].sum() == 2 * model[0].weight.numel()  # two micro-batches
    grown(scaler, 2.0**15)
    step(5, factor=2.0**6)  # overflows in the backward, and is clipped there
    assert scaler.skipped == 0 and scaler.get_scale() == 2.0**14
    assert slot.history[-1][1][:, 2].sum() > 0 and slot.history[-1][1][:, 3].sum() == 0
