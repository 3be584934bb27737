"""The plain loop of ``examples/``: FP8 where the report says so, a loss like its twin's."""

from __future__ import annotations

import pytest

from tests.integrations.parity import PER_CENT, assert_parity
from tests.integrations.twins import Outcome, beside_its_twin, twin_of

pytest.importorskip("transformers")
from examples import plain_loop

SMALL = {"layers": 1, "steps": 16}
LINEARS = 7  # of a Llama layer


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return beside_its_twin(plain_loop, **SMALL)


def test_trains_like_its_twin(outcome: Outcome) -> None:
    assert_parity(outcome)


def test_the_report_counts_each_linear_but_the_head(outcome: Outcome) -> None:
    report = outcome.report
    assert len(report.linears) == 3 * LINEARS
    assert {skip.origin.module for skip in report.notes.skipped("linear")} == {"lm_head"}
    assert report.saved_bytes < report.saved_bytes_plain / 2


def test_a_run_that_learns_more_slowly_has_no_parity(outcome: Outcome) -> None:
    """The bar is not so wide that any run would pass."""
    slower = twin_of(plain_loop, **SMALL, lr=8e-4)
    assert abs(Outcome(slower, outcome.twin).gap) > PER_CENT
