"""Functions on several ranks: a rank that fails takes others with it, and what is raised tells of all."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.support.ranks import results_of


def test_a_rank_that_failed_since_another_did_does_not_hide_it() -> None:
    ends = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    for rank, (_, sending) in enumerate(ends):
        sending.send((True, ("connection reset", "no samples")[rank]))
    with pytest.raises(AssertionError, match=r"(?s)rank 0: connection reset.*rank 1: no samples"):
        results_of([receiving for receiving, _ in ends])


def test_results_are_in_the_order_of_ranks() -> None:
    ends = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    for rank, (_, sending) in reversed(list(enumerate(ends))):
        sending.send((False, rank))
    assert results_of([receiving for receiving, _ in ends]) == [0, 1]
