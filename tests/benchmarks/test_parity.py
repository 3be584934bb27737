"""Parity runs, which are cut off and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import results
from benchmarks.studies import parity


def test_parity_goes_on_from_its_checkpoint(
    tmp_path: Path, nothing_generated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps and then four more are, to the bit, the eight steps of a run that was not cut off."""

    def losses(name: str, *more: str) -> Any:
        line = f"--device cpu --tiny --steps 8 --minutes 5 --out {tmp_path / name} --checkpoint {tmp_path / name}.pt"
        parity.main([*line.split(), *more])
        return results.Results.opened(tmp_path / name, "cpu", tiny=True).rows["parity: tiny"]

    whole = losses("whole")
    assert whole["step"] == 8 and len(whole["losses"]["ours"]) == 8 and "validation_gap" in whole
    assert whole["losses"]["ours"] != whole["losses"]["bf16"]
    draw = parity.batches
    with monkeypatch.context() as cut:
        cut.setattr(parity, "batches", lambda *args: (b for i, b in enumerate(draw(*args)) if i < 4))
        assert losses("parts")["step"] == 4
    assert losses("parts")["losses"] == whole["losses"]
    with pytest.raises(ValueError, match=r"is of a run of 8 steps, not 9\. Fix: --steps 8"):
        losses("parts", "--steps", "9")
