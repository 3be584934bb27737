"""One choice for each of several items, with the least sum of costs whose sizes stay within a budget: the exact knapsack.

    minimise  sum_i costs[i][c_i]    with    sum_i sizes[i][c_i] <= budget

Item by item, all pairs (sum of sizes, sum of costs) are kept that no other pair is better than in both. There are at most as
many of them as different sums of sizes, so layers that are alike make few. It is GACT's problem (2206.11357): an item is a
saved tensor, a choice its number of bits, a size its bytes, and a cost its part of the gradient's variance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cheapest(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int) -> tuple[int, ...] | None:
    """The number of the choice for each item; None where even the smallest choices exceed ``budget``.

    Args:
        sizes: for each item, the size of each of its choices.
        costs: the costs in the same order, finite.
        budget: what the sizes may sum up to.
    """
    least = [min(each) for each in sizes]
    left = budget - sum(least)  # for what is more than the smallest choices
    if left < 0:
        return None
    front, total = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    kept: list[
        tuple[Tensor, int]
    ] = []  # for each item, of each pair: the pair before it and the choice, as one number
    for own, least_size, price in zip(sizes, least, costs, strict=True):
        more = front[:, None] + torch.tensor([size - least_size for size in own])
        tried = total[:, None] + torch.tensor(price, dtype=torch.float64)
        at = _best(more.flatten(), tried.flatten(), left)
        front, total = more.flatten()[at], tried.flatten()[at]
        kept.append((at, len(own)))
    return _choices(kept, len(front) - 1)


def _best(sizes: Tensor, costs: Tensor, limit: int) -> Tensor:
    """Where the pairs are that cost less than all that are no larger, from the smallest to the largest."""
    within = (sizes <= limit).nonzero().flatten()
    by_cost = within[costs[within].argsort(stable=True)]
    order = by_cost[sizes[by_cost].argsort(stable=True)]
    found = costs[order]
    before = torch.cat([found.new_full((1,), torch.inf), found.cummin(0).values[:-1]])
    return order[found < before]


def _choices(kept: Sequence[tuple[Tensor, int]], pair: int) -> tuple[int, ...]:
    """The choices that led to the last item's ``pair``."""
    found = []
    for at, several in reversed(kept):
        pair, choice = divmod(int(at[pair]), several)
        found.append(choice)
    return tuple(reversed(found))
