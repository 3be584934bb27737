"""What lies behind a loss."""

from __future__ import annotations

import torch
from torch import nn

from fp8compile.amp.autograd_graph import has_fp16, leaves_behind
from tests.support.amp_models import batch, loss_of, net


def test_fp16_is_found_wherever_it_is() -> None:
    assert has_fp16([loss_of(net(), batch(0))])
    assert not has_fp16([loss_of(net(torch.float32), batch(0, torch.float32))])
    assert not has_fp16([loss_of(net(torch.bfloat16), batch(0, torch.bfloat16))])
    with torch.autocast("cpu", torch.float16):
        assert has_fp16([loss_of(net(torch.float32), batch(0, torch.float32))])


def test_fp16_inside_a_compiled_graph() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def step(x: torch.Tensor, model: nn.Module = model, dtype: torch.dtype = dtype) -> torch.Tensor:
            with torch.autocast("cpu", dtype):
                return model(x).float()  # type: ignore[no-any-return]

        loss = torch.compile(step, backend="aot_eager")(batch(0, torch.float32)).sum()
        assert has_fp16([loss]) == (dtype == torch.float16)


def test_leaves() -> None:
    model, other = net(), nn.Linear(2, 2)
    assert leaves_behind([loss_of(model, batch(0))]) == set(map(id, model.parameters()))
    assert id(other.weight) not in leaves_behind([loss_of(model, batch(0))])
