"""Running means of micro-batches' gradients, on one rank; ranks are in test_ranks.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.amp import LossScaler, accumulate
from tests.support.amp_models import batch, loss_of, net

STEPS = 1000
ULP = 32  # FP16's last place from 32768 to 65504


def huge_gradients(dtype: torch.dtype, numel: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """The accumulated gradient of 1,000 micro-batches, each near 65504; their float64 mean; and autograd's own sum."""
    values = (
        (60000 + 5504 * torch.rand(STEPS, numel, generator=torch.Generator().manual_seed(0))).clamp_max(65504).half()
    )
    p, summed = (nn.Parameter(torch.ones(numel, dtype=torch.float16)) for _ in range(2))
    acc = accumulate([p], dtype=dtype)
    for g in values:
        (p * g).sum().backward()
        assert p.grad is None
        (summed * g).sum().backward()
    assert acc.micro_batches == STEPS
    acc.finish()
    assert p.grad is not None and summed.grad is not None
    return p.grad, values.double().mean(0), summed.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_1000_micro_batches_near_the_top(dtype: torch.dtype) -> None:
    got, mean, summed = huge_gradients(dtype)
    assert got.dtype == torch.float16 and got.isfinite().all() and summed.isinf().all()
    error = (got.double() - mean) / ULP
    print(f"{dtype}: worst {error.abs().max().item():.3f} ulp, bias {error.mean().item():.4f} ulp")
    if dtype == torch.float32:
        assert error.abs().max() <= 0.5 + 1.5 * (STEPS + 1) * 2.0**-24 * 65504 / ULP < 1
    else:  # see tests/numerics/test_running_mean.py for the deviation
        assert error.mean().abs() <= 5 * 0.5 * (STEPS / 3 + 1) ** 0.5 / len(mean) ** 0.5


def test_is_the_mean_and_composes_with_a_scaler() -> None:
    """The gradient and the scale do not depend on the number of micro-batches."""
    found = {}
    for parts in (1, 2, 4):
        model = net()
        optimizer = optim.AdamW(model, lr=1e-2, compiled=False)
        scaler, acc = LossScaler(init_scale=2.0**8), accumulate(model)
        x = batch(0, rows=8)
        for part in x.chunk(parts):
            scaler.scale(loss_of(model, part)).backward()
        acc.finish()
        scaler.unscale_(optimizer)
        found[parts] = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
    for parts in (2, 4):
        for a, b in zip(found[1], found[parts], strict=True):
            torch.testing.assert_close(a, b, rtol=4e-3, atol=1e-4)


def test_what_a_micro_batch_does_not_use_has_no_gradient_from_it() -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    acc = accumulate([p, q])
    for i in range(4):
        (p * 4 + (q * 8 if i == 2 else 0)).sum().backward()
    acc.finish()
    assert p.grad is not None and q.grad is not None
    assert p.grad.tolist() == [4, 4] and q.grad.tolist() == [2, 2]  # 8 once, 0 three times
    p.grad = q.grad = None
    p.sum().backward()
    q.sum().backward()  # two backwards, one micro-batch
    acc.finish(micro_batches=1)
    assert p.grad.tolist() == q.grad.tolist() == [1, 1]


def test_starts_anew_and_ends() -> None:
    p = nn.Parameter(torch.ones(2))
    with accumulate([p]) as acc:
        for value in (3.0, 5.0):
            (p * value).sum().backward()
            acc.finish()
            assert p.grad is not None and p.grad.tolist() == [value] * 2
            p.grad = None
        with pytest.raises(RuntimeError, match=r"finish\(\) without a backward"):
            acc.finish()
    for _ in range(2):
        p.sum().backward()
    assert p.grad is not None and p.grad.tolist() == [2, 2]


def test_16_bit_means_take_16_bits() -> None:
    p = nn.Parameter(torch.ones(10))
    acc = accumulate([p], dtype=torch.bfloat16)
    p.sum().backward()
    assert [each.dtype for each in acc._means if each is not None] == [torch.bfloat16]
    acc.finish()
    assert p.grad is not None and p.grad.dtype == torch.float32


def test_an_inf_is_kept_for_the_scaler_to_see() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    acc = accumulate([p])
    for value in (1.0, 1e6):
        (p.float() * value).sum().backward()
    acc.finish()
    assert p.grad is not None and p.grad.isinf().all()


def test_bad_input() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"dtype=torch\.float64"):
        accumulate([p], dtype=torch.float64)
    with pytest.raises(ValueError, match="nothing to accumulate"):
        accumulate([torch.ones(2)])
    with pytest.raises(ValueError, match="complex64"):
        accumulate([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    table = nn.Embedding(4, 2, sparse=True)
    accumulate(table)
    with pytest.raises(ValueError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()
    acc = accumulate([p])
    p.sum().backward()
    with pytest.raises(ValueError, match="micro_batches=0"):
        acc.finish(micro_batches=0)
    with pytest.raises(RuntimeError, match=r"no parameter of this optimizer has a gradient: .*finish"):
        scaler = LossScaler("static")
        scaler.scale(p.sum())
        scaler.step(torch.optim.SGD([p], lr=0.1))
