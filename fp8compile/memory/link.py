"""When codes go to the host and come back, by predicted times: one copy at a time, in each direction.

    forward     in the order of making: a copy starts where its value is made and the copies before it are done
    backward    in the order of reading: a copy ends where its value is read, or where the copy after it has to start

A copy to the host is hidden if it arrives before the forward ends, and a copy back if it starts behind the backward's
beginning: then the device waits for neither. What is made first is read last, has most time both ways and is away longest, so
values are taken in the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AT_ONCE = "needed at once: between its making and its reading, forward or backward is shorter than a copy"
BUSY = "the link does not hide its copies beside those of the others"


@dataclass(frozen=True)
class Trip:
    """A value that could go to the host. Microseconds.

    Attributes:
        made: from the forward's beginning until it is made.
        read: from the backward's beginning until it is first read.
        us: what a copy takes, each way.
        anyway: whether it goes also where the device has to wait for it.
    """

    made: float
    read: float
    us: float
    anyway: bool = False


@dataclass(frozen=True)
class Times:
    """When a value leaves the device and is back. Microseconds.

    Attributes:
        gone: from the forward's beginning until the device's memory is free; at most the forward's length.
        back: from the backward's beginning until the copy back begins.
        waits: what the device waits for it: 0 where both copies are hidden.
    """

    gone: float
    back: float
    waits: float


def hidden(trips: Sequence[Trip], forward_us: float) -> tuple[list[int], dict[int, str]]:
    """By number: the trips that can all be made without a wait, or are made anyway; why the others stay."""
    taken, left, free = list[int](), dict[int, str](), 0.0
    for number in sorted(range(len(trips)), key=lambda i: trips[i].made):
        trip = trips[number]
        arrives = max(trip.made, free) + trip.us
        if trip.anyway:
            taken.append(number)
            free = arrives
        elif trip.made + trip.us > forward_us or trip.read < trip.us:
            left[number] = AT_ONCE
        elif arrives > forward_us or min(_starts([trips[i] for i in (*taken, number)])) < 0:
            left[number] = BUSY
        else:
            taken.append(number)
            free = arrives
    return taken, left


def times_of(trips: Sequence[Trip], forward_us: float) -> list[Times]:
    """The times of each of these trips, if all are made; the waits add up to what forward and backward wait in all."""
    gone, late = [0.0] * len(trips), [0.0] * len(trips)
    free = 0.0
    for number in sorted(range(len(trips)), key=lambda i: trips[i].made):
        before, free = free, max(trips[number].made, free) + trips[number].us
        gone[number] = min(free, forward_us)
        late[number] = max(0.0, free - forward_us) - max(0.0, before - forward_us)
    starts = _starts(trips)
    following = 0.0
    for number in sorted(range(len(trips)), key=lambda i: -starts[i]):
        late[number] += max(0.0, -starts[number]) - following
        following = max(0.0, -starts[number])
    return [Times(gone[i], max(0.0, starts[i]), late[i]) for i in range(len(trips))]


def _starts(trips: Sequence[Trip]) -> list[float]:
    """The latest that each copy back may start; negative where the backward would have to wait."""
    starts, following = [0.0] * len(trips), float("inf")
    for number in sorted(range(len(trips)), key=lambda i: -trips[i].read):
        following = starts[number] = min(trips[number].read, following) - trips[number].us
    return starts
