"""Bugs in the generated kernels of delayed scales, cached weights and merged dgrads: each is seen where what is interpreted
is compared with the graph. Changes that are argued to be none are not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .delayed_bugs import BUGS, EQUIVALENT
from .subprocesses import result_of

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13"), reason="the bugs are put into the text that torch 2.13 generates"
    ),
]
BOUND = 512 * 2.0**-24  # as in test_delayed_sm90.py


def test_without_a_bug_nothing_is_seen_in_any_situation() -> None:
    assert max(result_of("run_delayed_bugs", interpret=True)["differences"].values()) < BOUND


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(bug: str) -> None:
    assert result_of("run_delayed_bugs", interpret=True)["bugs"][bug] > 10 * BOUND


@pytest.mark.parametrize("change", EQUIVALENT)
def test_a_change_that_is_argued_to_be_none_is_not_seen(change: str) -> None:
    assert result_of("run_delayed_bugs", interpret=True)["equivalent"][change] < BOUND
