"""The plain loop of ``examples/``: FP8 where the report says so, a loss like its twin's."""

from __future__ import annotations

import pytest

from examples import plain_loop
from examples.shared import Outcome, arguments
from tests.integrations.parity import PER_CENT, assert_parity

pytest.importorskip("transformers")
SMALL = ["--codegen", "eager", "--layers", "1", "--steps", "16"]
LINEARS = 7  # of a Llama layer


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return plain_loop.main([*SMALL, "--twin"])


def test_trains_like_its_twin(outcome: Outcome) -> None:
    assert_parity(outcome)


def test_the_report_counts_each_linear_but_the_head(outcome: Outcome) -> None:
    report = outcome.ours.report
    assert report is not None
    assert len(report.linears) == 3 * LINEARS
    assert {skip.origin.module for skip in report.notes.skipped("linear")} == {"lm_head"}
    assert report.saved_bytes < report.saved_bytes_plain / 2


def test_a_run_that_learns_more_slowly_has_no_parity(outcome: Outcome) -> None:
    """The bar is not so wide that any run would pass."""
    slower = plain_loop.train(arguments([*SMALL, "--lr", "8e-4"], "", steps=0, lr=0.0), False)
    assert outcome.twin is not None
    assert abs(Outcome(slower, outcome.twin).gap) > PER_CENT
