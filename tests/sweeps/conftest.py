"""Sweeps: a fixed subset of each runs with the other tests; ``pytest tests/sweeps --sweep`` runs all of it.

fixture ``sweep``     whether --sweep was given: a test may look at more then
fixture ``tally``     a counter by name and outcome; what all tests counted is printed as a table at the end
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest

COUNTED = "sweep tally"


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--sweep"))


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``tally("op_db float32", "encoded")`` counts one; it travels with the test's report, out of xdist's workers too."""

    def count(name: str, outcome: str, number: int = 1) -> None:
        request.node.user_properties.append((COUNTED, (name, outcome, number)))

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, counted in (
                getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ()
            ):
                if key == COUNTED:
                    name, outcome, number = counted
                    counts[name][outcome] += number
    if counts:
        terminalreporter.section("sweeps")
        for name, outcomes in sorted(counts.items()):
            terminalreporter.write_line(
                f"{name:28}" + ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
            )
