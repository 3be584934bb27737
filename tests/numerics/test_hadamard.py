"""A Hadamard transform along the contracted dimension: orthogonal to the bit, and what it does to lines with an outlier."""

from __future__ import annotations

import pytest
import torch

from fp8compile.numerics.hadamard import ORDER, hadamard, rotated


def test_it_is_a_hadamard_matrix() -> None:
    h = hadamard()
    assert h.dtype == torch.float32 and torch.equal(h.abs(), torch.full((ORDER, ORDER), 0.25))
    assert torch.equal(h @ h.t(), torch.eye(ORDER)) and torch.equal(h, h.t())


@pytest.mark.parametrize("rows", [16, 48, 1, 15, 17, 300])
def test_a_product_of_rotated_operands_is_the_product(rows: int) -> None:
    """Integers up to 8: sums of 16 of them by 1/4, and products of those, are exact in FP32."""
    torch.manual_seed(0)
    x, w = (torch.randint(-8, 9, (rows, n)).float() for n in (7, 5))
    left, right = rotated(x, 0), rotated(w, 0)
    assert left.shape == (-(-rows // ORDER) * ORDER, 7)
    assert torch.equal(left.t() @ right, x.t() @ w)
    assert torch.equal(rotated(x.t(), 1), left.t())


def test_blocks_do_not_mix() -> None:
    x = torch.zeros(48, 2)
    x[20, 1] = 4.0
    got = rotated(x, 0)
    assert got[16:32, 1].abs().eq(1.0).all() and got.abs().sum() == 16.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    assert rotated(torch.ones(16, 3, dtype=dtype), 0).dtype == dtype


def test_an_isolated_value_is_a_quarter_as_large_and_the_norm_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8, dtype=torch.float64)
    x[5] = 1000.0
    got = rotated(x, 0)
    assert torch.allclose(got.square().sum(0), x.square().sum(0), rtol=1e-12)
    assert (got.abs().amax(0) < 1000.0 / 4 + 4 * x[:5].abs().max() + 16).all()
