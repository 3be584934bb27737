"""The rules of the modes, over sequences of updates, against the text of the issue in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8compile.amp import LossScaler
from fp8compile.amp.policies import Histogram, Policy, PolicyState, Static, UpdateStats

LOW, HIGH, THRESHOLD = 2.0**-3, 2.0**6, 0.25

updates = st.tuples(st.integers(0, 100), st.integers(0, 100), st.booleans(), st.booleans())


def followed(policy: Policy, scale: float, several: list[tuple[int, int, bool, bool]]) -> list[tuple[float, float]]:
    """(scale, verdict) after each update: h1, h2, whether a step was skipped, whether the loss was to blame."""
    now, found = PolicyState.start(scale, torch.device("cpu")), []
    for numbers in several:
        small, large, skipped, blamed = map(float, numbers)
        seen = UpdateStats(torch.tensor([small, large, 0.0, skipped, blamed], dtype=torch.float64))
        now, verdict = policy(now, seen)
        assert now.scale.dtype == torch.float32
        found.append((now.scale.item(), verdict.item()))
    return found


def by_hand(
    scale: float, period: int, interval: int, several: list[tuple[int, int, bool, bool]]
) -> list[tuple[float, float]]:
    h1 = h2 = good = 0
    wait = 1  # decisions: it rises at each one until it is first halved
    found = []
    for i, (small, large, skipped, blamed) in enumerate(several, 1):
        verdict = 0.0
        if skipped and not blamed:
            h2 += max(1, small + large)  # a NaN may have been any of them
        elif not blamed:
            h1, h2 = h1 + small, h2 + large
        if i % period == 0:
            if h1 + h2 > 0:
                verdict = -1.0 if h2 / (h1 + h2) > THRESHOLD else 1.0
                good = good + 1 if verdict > 0 else 0
                if verdict < 0:
                    scale, wait = max(scale / 2, LOW), interval
                elif good == wait:
                    scale, good = min(scale * 2, HIGH), 0
            h1 = h2 = 0
        found.append((scale, -1.0 if skipped or blamed else verdict))
    return found


@settings(deadline=None, max_examples=200)
@given(st.lists(updates, max_size=20), st.integers(1, 4), st.integers(1, 4), st.integers(-3, 6))
def test_histogram(several: list[tuple[int, int, bool, bool]], period: int, interval: int, power: int) -> None:
    policy = Histogram(period, LOW, HIGH, THRESHOLD, interval)
    assert followed(policy, 2.0**power, several) == by_hand(2.0**power, period, interval, several)


def test_by_default_it_waits_before_it_doubles_again() -> None:
    """Rise, halve at once, then 64 good decisions; a bad one starts the count anew."""
    good, bad = (100, 0, False, False), (0, 100, False, False)
    policy = LossScaler().options.policy()
    several = [good] * 5 + [bad] + [good] * 63 + [bad] + [good] * 64 + [good] * 63
    scales = [scale for scale, _ in followed(policy, 1.0, several)]
    assert scales[:6] == [2, 4, 8, 16, 32, 16]
    assert scales[6:69] == [16] * 63 and scales[69:133] == [8] * 64 and scales[133:] == [16] * 64


@settings(deadline=None)
@given(st.lists(updates, max_size=5))
def test_static(several: list[tuple[int, int, bool, bool]]) -> None:
    expected = [(4.0, -1.0 if skipped else 1.0) for _, _, skipped, _ in several]
    assert followed(Static(LOW, HIGH), 4.0, several) == expected


def test_numbers_are_exact_and_come_back() -> None:
    now = PolicyState.start(1 / 3, torch.device("cpu"))
    now = PolicyState(now.scale, now.since + 7, now.small + 2.0**52 + 1, now.large + 3, now.quiet + 5)
    again = PolicyState.start(1.0, torch.device("cpu")).filled(**now.numbers())
    assert (
        again.numbers() == now.numbers() and again.since.dtype == torch.float64 and again.small.dtype == torch.float64
    )


def test_the_threshold_is_a_fraction_of_all() -> None:
    for small, scale in ((1e7 - 2, 0.5), (1e7 + 1, 2.0)):  # one large gradient beside them; 1e-7 of all
        seen = UpdateStats(torch.tensor([small, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
        new, _ = Histogram(1, 0.0, HIGH)(PolicyState.start(1.0, torch.device("cpu")), seen)
        assert new.scale == scale
