"""The most that is alive in a step of several graphs, against a step played event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8compile.reporting.running import GeneratedPeaks, Peaks, most_running


def test_one_graph_needs_what_its_halves_do() -> None:
    assert most_running([(Peaks(7, 5, 3), 2)], 3) == 7
    assert most_running([(Peaks(5, 7, 3), 2)], 3) == 7
    assert most_running([], 0) == 0


def test_a_backward_meets_what_earlier_graphs_keep_and_the_gradients_of_later_ones() -> None:
    first, second = (Peaks(10, 20, 8), 4), (Peaks(10, 12, 6), 5)
    assert most_running([first, second], 14) == 20 + 6, "the first graph's backward, with the second's gradients"
    assert most_running([(Peaks(10, 11, 8), 9), second], 14) == 9 + 12, (
        "the second's backward, with what the first keeps"
    )
    assert most_running([first, first], 8) == 4 + 20, "shared weights have one gradient: it is in the peak already"


def played(graphs: list[tuple[Peaks, int]]) -> int:
    """A step of graphs that share no parameters: what is alive at each half's own most."""
    alive, seen = 0, []
    for peaks, kept in graphs:
        seen.append(alive + peaks.forward)
        alive += kept
    for peaks, kept in reversed(graphs):
        seen.append(alive - kept + peaks.backward)
        alive += peaks.gradients - kept
    return max(seen)


halves = st.builds(Peaks, *[st.integers(0, 100)] * 3)


@given(st.lists(st.tuples(halves, st.integers(0, 50)), min_size=1, max_size=6))
def test_any_graphs(graphs: list[tuple[Peaks, int]]) -> None:
    assert most_running(graphs, sum(peaks.gradients for peaks, _ in graphs)) == played(graphs)


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"forward": 3},
        {"backward": 9, "kept": 4},
        {"forward": 3, "backward": 9, "kept": 5},
        {"forward": 3, "backward": 9},
    ],
)
def test_the_estimate_stands_until_both_halves_are_generated_and_count_what_is_kept(known: dict[str, int]) -> None:
    estimate = Peaks(1, 2, 3)
    assert GeneratedPeaks(known).instead_of(estimate, 4) is estimate
    assert GeneratedPeaks({"forward": 5, "backward": 6, "kept": 4}).instead_of(estimate, 4) == Peaks(5, 6, 3)
