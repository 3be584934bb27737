"""When codes go to the host and come back: hidden copies, one at a time each way."""

from __future__ import annotations

import itertools

import pytest

from fp8compile.memory.link import AT_ONCE, BUSY, Times, Trip, hidden, times_of


def test_a_copy_begins_where_its_value_is_made_and_ends_where_it_is_read() -> None:
    (times,) = times_of([Trip(made=10, read=80, us=20)], forward_us=100)
    assert times == Times(gone=30, back=60, waits=0)


def test_copies_to_the_host_wait_for_each_other() -> None:
    trips = [Trip(made=10, read=80, us=20), Trip(made=20, read=70, us=20)]
    assert [t.gone for t in times_of(trips, 100)] == [30, 50]


def test_of_copies_back_the_one_that_is_read_later_leaves_room_for_the_other() -> None:
    """The second is read at 85, and must not start before the first, read at 80, is back."""
    trips = [Trip(made=0, read=80, us=20), Trip(made=0, read=85, us=20)]
    assert [t.back for t in times_of(trips, 100)] == [45, 65]


@pytest.mark.parametrize("trip", [Trip(made=90, read=500, us=20), Trip(made=0, read=10, us=20)])
def test_what_has_no_time_for_a_copy_one_way_or_the_other_stays(trip: Trip) -> None:
    assert hidden([trip], forward_us=100) == ([], {0: AT_ONCE})


@pytest.mark.parametrize("trip", [Trip(made=70, read=35, us=20), Trip(made=75, read=300, us=20)])
def test_what_would_make_the_device_wait_beside_the_others_stays(trip: Trip) -> None:
    """The first of the others comes back until 30; the second is on its way to the host until 85."""
    others = [Trip(made=0, read=30, us=20), Trip(made=65, read=500, us=20)]
    assert hidden([trip], forward_us=100)[0] == [0]
    assert hidden([*others, trip], forward_us=100) == ([0, 1], {2: BUSY})


def test_what_is_made_first_goes_first() -> None:
    """The link has time for one: the one that is away longest."""
    trips = [Trip(made=40, read=30, us=50), Trip(made=0, read=60, us=50)]
    assert hidden(trips, forward_us=90) == ([1], {0: AT_ONCE})
    trips = [Trip(made=40, read=55, us=50), Trip(made=0, read=60, us=50)]
    assert hidden(trips, forward_us=90) == ([1], {0: BUSY})


def test_what_is_taken_has_no_wait_whatever_the_trips() -> None:
    trips = [
        Trip(float(made), float(read), us)
        for made in range(0, 100, 9)
        for read in range(0, 100, 7)
        for us in (3.0, 11.0)
    ]
    taken, left = hidden(trips, 100)
    assert taken and left and sorted([*taken, *left]) == list(range(len(trips)))
    times = times_of([trips[i] for i in taken], 100)
    assert not any(t.waits for t in times)
    ends = sorted((t.back, t.back + trips[i].us) for i, t in zip(taken, times, strict=True))
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends)), "one copy at a time"
    assert all(t.back + trips[i].us <= trips[i].read for i, t in zip(taken, times, strict=True))


def test_what_goes_anyway_says_how_long_the_device_waits() -> None:
    """Forward: 2 x 60 us of copies behind 0 arrive at 120, 20 after its end. Backward: 120 us of copies before 70: 50."""
    trips = [Trip(made=0, read=70, us=60, anyway=True), Trip(made=0, read=70, us=60, anyway=True)]
    taken, left = hidden(trips, forward_us=100)
    assert taken == [0, 1] and not left
    times = times_of(trips, 100)
    assert sum(t.waits for t in times) == pytest.approx(20 + 50)
    assert max(t.gone for t in times) == 100 and min(t.back for t in times) == 0
