"""Range analysis: a relation along one dimension says nothing along another."""

from __future__ import annotations

import pytest

from fp8compile.analysis.ranges.bounds import at_least
from tests.support.range_graphs import DATA, analysed


@pytest.mark.parametrize(("over", "least"), [(-1, 0.99), ((0, 1), 0.99), (0, 0.0)], ids=str)
def test_a_sum_holds_a_one_only_over_the_dimensions_of_the_maximum(over: int, least: float) -> None:
    """exp(x - amax(x, -1)) is 1 once in every row; a column may hold none."""
    _, proven = analysed(lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(over), DATA, decompositions=True)
    assert at_least(proven.lower) == pytest.approx(least, abs=0.02)


@pytest.mark.parametrize(("lower", "vanishes"), [(-9.0, False), (-20.0, True)])
def test_an_exponential_vanishes_where_its_exponent_may_be_low(lower: float, vanishes: bool) -> None:
    """exp(-9.7) is FP16's smallest normal number."""
    _, proven = analysed(lambda x: x.exp(), (lower, 3.0))
    assert proven.vanishing == vanishes
