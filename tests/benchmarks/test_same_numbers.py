"""Two checkouts held against each other: equal ones are equal, and a bit, a byte or an entry that differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.studies import same_numbers
from tests.support.sources import ROOT

FOUND = {"bits": ["a"], "saved": [8], "entries": [{"saved": 1}]}


def test_bits_are_looked_at() -> None:
    zero, minus = torch.zeros(3), -torch.zeros(3)
    assert same_numbers.digest([zero]) == same_numbers.digest([zero.clone()]) != same_numbers.digest([minus])
    assert same_numbers.digest([None, zero]) != same_numbers.digest([zero])


@pytest.mark.parametrize(("part", "value"), [("bits", ["b"]), ("saved", [9]), ("entries", [{"saved": 2}])])
def test_what_differs_is_named(
    part: str, value: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes(checkout: Path, names: list[str]) -> dict[str, Any]:
        mine = checkout == same_numbers.HERE
        return {"llama": FOUND, "bert": FOUND if mine else {**FOUND, part: value}}

    monkeypatch.setattr(same_numbers, "outcomes", outcomes)
    assert same_numbers.main(["elsewhere"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("equal") and second.endswith(f"differs in {part}")


@pytest.mark.sweep
def test_a_checkout_is_equal_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_numbers.main([str(ROOT), "islands", "two optimizers"]) == 0
    assert capsys.readouterr().out.count("equal") == 2
