"""with_unit_sums: bounds as derived in its module, and the rows that it leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, INT8, Groupwise
from fp8compile.numerics.unit_sums import LEAST, MOST, with_unit_sums

ROUNDING = 2.0**-22  # of FP32 in the bounds' own terms: a scale's reciprocal, two products, a few sums


def probabilities(n: int, spread: float) -> Tensor:
    return torch.softmax(torch.randn(64, n, generator=torch.Generator().manual_seed(n)) * spread, -1)


def decoded(p: Tensor, codec: Groupwise) -> Tensor:
    return codec.decode(*codec.encode(p), torch.float32)


@pytest.mark.parametrize("codec", [Groupwise(INT8), Groupwise(E4M3)], ids=str)
@pytest.mark.parametrize("n", [64, 128, 197, 1024])
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
def test_sums_are_one_and_no_element_is_farther_off_than_derived(codec: Groupwise, n: int, spread: float) -> None:
    p = probabilities(n, spread)
    q = decoded(p, codec)
    found = with_unit_sums(q, -1)
    s = q.double().sum(-1, keepdim=True)
    inside = ((s >= LEAST) & (s <= MOST))[:, 0]
    assert inside.float().mean() > 0.9
    assert bool(((found.double().sum(-1) - 1).abs()[inside] <= (n + 3) * 2.0**-24).all())
    exact = p.double() / p.double().sum(-1, keepdim=True)
    e, d = q.double() - exact, s - 1
    assert bool(((found - exact).abs() <= (e.abs() + exact * d.abs()) / (1 + d) + ROUNDING)[inside].all())
    assert bool(((found - exact).abs() <= 2 * (e.abs() + exact * d.abs()) + ROUNDING)[inside].all())
    assert torch.equal(found[~inside], q[~inside])


@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0, 40.0])
def test_of_groups_within_a_row_every_sum_is_within_the_window(spread: float) -> None:
    s = decoded(probabilities(1024, spread), Groupwise(INT8)).sum(-1)
    scale = 1 + 2.0**-8  # a BF16 scale's rounding
    assert bool((s >= 0.66 / scale).all()) and bool((s <= 4 / 3 * scale).all())


def test_the_dimension_is_the_softmaxs() -> None:
    q = decoded(probabilities(64, 1.0).t().contiguous(), Groupwise(INT8))
    assert bool(((with_unit_sums(q, 0).sum(0) - 1).abs() < 1e-5).all())


def test_what_is_no_row_of_probabilities_stays_bit_for_bit() -> None:
    rows = torch.tensor(
        [
            [0.0, 0.0, 0.0],  # fully masked
            [float("nan"), 0.25, 0.5],
            [float("inf"), 0.25, 0.5],
            [0.2, 0.2, 0.05],  # lost most of what it was
            [1.0, 1.0, 0.25],
        ]
    )
    found = with_unit_sums(rows, -1)
    assert torch.equal(found.view(torch.int32), rows.view(torch.int32))


def test_a_sum_on_the_edge_is_restored() -> None:
    edges = torch.tensor([[LEAST, 0.0], [MOST, 0.0]])
    assert torch.equal(with_unit_sums(edges, -1), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
