"""What waits for ``make test-all``: a case, a function, or all cases of it but the one that is named."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import nightly
from tests.nightly import NIGHTLY, read, waits
from tests.support.sources import ROOT


def test_one_case_stays_or_none_or_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "NIGHTLY", read("a.py::case[x]\na.py::one | x[0]-y\na.py::none\nb.py\n"))
    assert waits("b.py::any[x]") and waits("a.py::case[x]") and not waits("a.py::case[y]")
    assert [waits(f"a.py::{test}") for test in ("one[x[0]-y]", "one[z]", "none", "none[x]", "other")] == [
        *(False, True, True, True, False)
    ]


def test_each_function_stands_once_in_a_file_that_exists() -> None:
    lines = (ROOT / "tests" / "nightly.txt").read_text().splitlines()
    counted = Counter(line.partition(" | ")[0] for line in lines)
    assert set(counted.values()) == {1} and len(lines) == len(NIGHTLY) and lines == sorted(lines)
    for function in NIGHTLY:
        file, _, name = function.partition("[")[0].partition("::")
        assert (f"def {name}(" if name else "def test_") in (ROOT / file).read_text(), function
