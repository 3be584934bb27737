"""A running mean against the float64 mean: FP32 within its bound, 16 bits unbiased, and what goes wrong without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8compile.numerics.running_mean import fold_mean, rounded_mean

STEPS = 1000


def near_the_top(numel: int, seed: int = 0) -> torch.Tensor:
    """float16 [STEPS, numel], each from 60000 to 65504."""
    random = torch.Generator().manual_seed(seed)
    return (60000 + 5504 * torch.rand(STEPS, numel, generator=random)).clamp_max(65504).half()


@settings(deadline=None)
@given(st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=30))
def test_is_the_mean(values: list[float]) -> None:
    mean = torch.zeros(())
    for k, value in enumerate(values, 1):
        mean = fold_mean(mean, torch.tensor(value, dtype=torch.float16), k)
    error = abs(mean.double() - torch.tensor(values, dtype=torch.float64).mean())
    assert error <= 1.5 * (len(values) + 1) * 2.0**-24 * max(map(abs, values)) + 2.0**-140


def test_float32_is_within_its_bound() -> None:
    """1.5 (n + 1) u max|g|, u = 2**-24: see the module. A fifth of FP16's last place there, which is 32."""
    g, mean = near_the_top(4096), torch.zeros(4096)
    for k in range(1, STEPS + 1):
        mean = fold_mean(mean, g[k - 1], k)
    error = (mean.double() - g.double().mean(0)).abs().max().item()
    assert error <= 1.5 * (STEPS + 1) * 2.0**-24 * 65504 < 32 / 5
    print(f"float32: worst error {error:.4f} = {error / 32:.6f} FP16 ulp")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_unbiased(dtype: torch.dtype) -> None:
    """The k-th rounding errs by at most one ulp, with variance <= ulp**2 / 4, and ends up times k / n; errors are
    independent, so the mean over N elements has a standard deviation of at most ulp / 2 * sqrt(sum (k/n)**2 / N)."""
    numel = 4096
    ulp = torch.finfo(dtype).eps * 2.0**15
    g, mean, nearest = near_the_top(numel), torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    for k in range(1, STEPS + 1):
        new = g[k - 1].to(dtype)
        mean = rounded_mean(fold_mean(mean, new, k), dtype, seed=3, stream=5, step=k)
        nearest = fold_mean(nearest, new, k).to(dtype)
    truth = g.to(dtype).double().mean(0)
    sigma = ulp / 2 * sum((k / STEPS) ** 2 for k in range(1, STEPS + 1)) ** 0.5
    bias = (mean.double() - truth).mean().item()
    assert abs(bias) <= 5 * sigma / numel**0.5
    assert (mean.double() - truth).abs().max() <= 7 * sigma  # of 4096, each a sum of 1,000: beyond 7 sigma in 1e-8
    drift = (nearest.double() - truth).abs().max().item()
    print(f"{dtype}: bias {bias / ulp:.4f} ulp (bound {5 * sigma / numel**0.5 / ulp:.3f}), worst "
          f"{(mean.double() - truth).abs().max().item() / ulp:.1f} ulp, to nearest {drift / ulp:.1f} ulp")  # fmt: skip


def test_a_sum_overflows_and_a_plain_fp16_mean_sticks() -> None:
    g = near_the_top(64)
    total, plain = torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)
    drifting = torch.cat([g[:200] - 30000, g[:800]])  # the mean has to move by 24,000 after its first 200
    for k in range(1, STEPS + 1):
        total += g[k - 1]
        plain = (plain.float() * ((k - 1) / k) + drifting[k - 1].float() / k).half()
    assert total.isinf().all()
    ulp = 32
    drift = ((plain.double() - drifting.double().mean(0)).abs() / ulp).max().item()
    print(f"plain FP16 mean: off by {drift:.0f} ulp")
    assert drift > 10


def test_inf_and_nan_are_kept() -> None:
    mean = fold_mean(torch.zeros(2), torch.tensor([torch.inf, torch.nan]), 1)
    mean = fold_mean(mean, torch.zeros(2), 2)
    assert mean[0] == torch.inf and mean[1].isnan()


def test_no_intermediate_overflows_in_float32() -> None:
    top = torch.finfo(torch.float32).max
    mean = torch.full((1,), -top)
    assert fold_mean(mean, torch.full((1,), top), 2).isfinite().all()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="count=0"):
        fold_mean(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="float64"):
        rounded_mean(torch.zeros(1), torch.float64, seed=0, stream=0, step=0)
