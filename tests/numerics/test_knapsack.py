"""The exact knapsack beside an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp8compile.numerics.knapsack import cheapest


@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_exhaustive_search_finds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 5, (6,), generator=generator).tolist()
    sizes = [torch.randint(0, 30, (n,), generator=generator).tolist() for n in counts]
    costs = [torch.rand(n, generator=generator, dtype=torch.float64).tolist() for n in counts]

    def summed(of: list[list[float]], choice: tuple[int, ...]) -> float:
        return sum(each[at] for each, at in zip(of, choice, strict=True))

    every = list(itertools.product(*map(range, counts)))
    least = min(summed(sizes, choice) for choice in every)  # type: ignore[arg-type]
    for budget in (least, least + 7, least + 40, 10_000):
        found = cheapest(sizes, costs, int(budget))
        within = [choice for choice in every if summed(sizes, choice) <= budget]  # type: ignore[arg-type]
        assert found in within
        assert summed(costs, found) == pytest.approx(min(summed(costs, c) for c in within), rel=1e-12)
    assert cheapest(sizes, costs, int(least) - 1) is None


def test_the_budget_itself_may_be_used_up() -> None:
    assert cheapest([[1, 2], [1, 2]], [[5.0, 1.0], [5.0, 2.0]], 3) == (1, 0)
    assert cheapest([[1, 2], [1, 2]], [[5.0, 1.0], [5.0, 2.0]], 4) == (1, 1)


def test_no_items_fit_in_nothing() -> None:
    assert cheapest([], [], 0) == () and cheapest([], [], -1) is None


def test_of_equal_costs_the_smaller_size_is_taken() -> None:
    assert cheapest([[9, 3, 5]], [[1.0, 1.0, 1.0]], 9) == (1,)


def test_three_hundred_values_of_a_few_sizes_are_solved_at_once() -> None:
    """As many states as a step with 32 layers saves: the front has no more pairs than there are different sums of bytes."""
    sizes = [[n * b for b in (2, 3, 4, 5, 6, 8, 16)] for n in (3, 8, 3) for _ in range(100)]
    costs = [[(1 + i % 7) * 4.0**-b for b in (2, 3, 4, 5, 6, 8, 16)] for i in range(300)]
    budget = sum(each[2] for each in sizes)
    found = cheapest(sizes, costs, budget)
    assert found is not None and sum(each[at] for each, at in zip(sizes, found, strict=True)) <= budget
    total = sum(each[at] for each, at in zip(costs, found, strict=True))
    assert total < sum(each[2] for each in costs)
