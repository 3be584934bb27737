"""Products of INT8 codes: exact sums up to the last product that fits, the bound of what decoded products are off by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import INT8, Rowwise
from fp8compile.numerics.integer_products import MOST_PRODUCTS, PART, int8_product

CODES = torch.arange(-127, 128, dtype=torch.int8)
ROWS = Rowwise(INT8)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def product(x: Tensor, w: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``x [M, K]`` by ``w [N, K]`` transposed, both encoded by rows."""
    (a, inv_a), (b, inv_b) = ROWS.encode(x), ROWS.encode(w)
    return int8_product(a, b.t(), inv_a, inv_b.t(), dtype)


def test_every_product_of_two_codes() -> None:
    got = int8_product(CODES[:, None], CODES[None], ones(255, 1), ones(1, 255), torch.float32)
    assert torch.equal(got, CODES.float()[:, None] * CODES.float()[None])


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
def test_a_sum_of_every_pair_of_codes_is_exact_in_every_layout(layouts: str) -> None:
    """K = 255 * 255 products: all pairs of codes. The middle row is multiplied by itself too."""
    left, right = (pair.reshape(-1) for pair in torch.meshgrid(CODES, CODES, indexing="ij"))
    a, b = torch.stack([left, right, left // 2]), torch.stack([right, right, right // 3]).t()
    a, b = a.t().contiguous().t() if layouts[0] == "t" else a, b.contiguous() if layouts[1] == "n" else b
    assert torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sum_that_int32_holds(sign: int) -> None:
    """One more product and INT32 wraps, which is what the limit is for."""
    for length, fits in ((MOST_PRODUCTS, True), (MOST_PRODUCTS + 1, False)):
        a, b = (torch.full(s, 127, dtype=torch.int8) for s in ((1, length), (length, 1)))
        assert (torch._int_mm(a, sign * b).item() == sign * 127 * 127 * length) is fits
    assert MOST_PRODUCTS == 133_144 and PART <= MOST_PRODUCTS and PART % 16 == 0


@pytest.mark.parametrize("length", [MOST_PRODUCTS, MOST_PRODUCTS + 1, 2 * PART, 2 * PART + 5])
def test_longer_sums_are_cut(length: int) -> None:
    a, b = torch.full((2, length), 127, dtype=torch.int8), torch.full((length, 3), 127, dtype=torch.int8)
    got = int8_product(a, b, ones(2, 1), ones(1, 3), torch.float64)
    exact = 127.0 * 127.0 * length
    assert (
        got.shape == (2, 3) and (got - exact).abs().max() <= 2 * 2.0**-24 * exact
    )  # a rounding each, and of their sum


DATA = {
    "gaussian": lambda shape: torch.randn(shape),
    "silu": lambda shape: torch.nn.functional.silu(2 * torch.randn(shape)),
    "heavy-tailed": lambda shape: torch.distributions.StudentT(2.0).sample(torch.Size(shape)),
    "outlier channels": lambda shape: torch.randn(shape) * torch.where(torch.arange(shape[1]) % 40 == 3, 100.0, 1.0),
    "decades of rows": lambda shape: torch.randn(shape) * torch.logspace(-18, 15, shape[0])[:, None],
    "zeros": lambda shape: torch.zeros(shape),
}


@pytest.mark.parametrize("kind", DATA)
def test_every_element_is_within_the_bound(kind: str) -> None:
    torch.manual_seed(0)
    K = 144
    x, w = DATA[kind]((64, K)), torch.randn(80, K)
    exact = x.double() @ w.double().t()
    inv_a, inv_b = (ROWS.encode(t)[1].double() for t in (x, w))
    size_x, size_w = (t.double().abs().sum(1, keepdim=True) for t in (x, w))
    rounding = inv_a / 2 * size_w.t() + inv_b.t() / 2 * size_x + K * inv_a * inv_b.t() / 4
    got = product(x, w)
    # The reciprocal and the product that a code is rounded from are off by 2**-22 of the code, so a code may be off by
    # 127 * 2**-22 of a step beyond its half; the sum and its two products by 2**-24 each.
    bound = rounding * (1 + 2 * 127 * 2.0**-22) + 3 * 2.0**-24 * (exact.abs() + rounding)
    assert ((got.double() - exact).abs() <= bound).all()


def test_every_bfloat16_value_by_one() -> None:
    """All finite values of BF16, each a row of its own beside its half: their products with a weight of ones."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = values[values.isfinite()].float()
    x = torch.stack([finite, finite / 2], 1)
    inv = ROWS.encode(x)[1].double()
    got, exact = product(x, torch.ones(1, 2)), x.double().sum(1, keepdim=True)
    overflows = 127 * (exact.abs() + inv) > torch.finfo(torch.float32).max  # before the second scale
    # |w|_1 is 2, and codes of ones are exact but for the rounding of their scale.
    off = (got.double() - exact).abs() <= inv * (1 + 2 * 127 * 2.0**-22) + 4 * 2.0**-24 * exact.abs()
    assert (off | overflows).all() and overflows.sum() <= 2 * 8 * 2**7, "in the 8 largest binades of 254"


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_does_not_vanish(bad: float) -> None:
    x, w = torch.randn(4, 32), torch.randn(8, 32)
    x[1, 3] = bad
    w[5, 7] = bad
    got = product(x, w)
    expected = torch.zeros(4, 8, dtype=torch.bool)
    expected[1], expected[:, 5] = True, True
    assert torch.equal(got.isnan(), expected) and got[~expected].isfinite().all()


def test_no_rows_and_no_columns() -> None:
    assert product(torch.randn(0, 32), torch.randn(8, 32)).shape == (0, 8)
    assert torch.equal(
        int8_product(
            *(torch.zeros(s, dtype=torch.int8) for s in ((3, 0), (0, 4))), ones(3, 1), ones(1, 4), torch.float32
        ),
        torch.zeros(3, 4),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_is_added_before_the_result_is_rounded(dtype: torch.dtype) -> None:
    a, b = torch.full((2, 17), 127, dtype=torch.int8), torch.full((17, 3), 1, dtype=torch.int8)
    bias = torch.tensor([0.25, -2159.0, 1.0])  # 127 * 17 is 2159, which 16 bits round to 2160
    got = int8_product(a, b, ones(2, 1), ones(1, 3), dtype, bias)
    assert got.dtype == dtype and torch.equal(got, (127.0 * 17 + bias).expand(2, 3).to(dtype))
