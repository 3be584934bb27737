"""Tables of ablations: what is printed, what goes into JSON, and the few statistics."""

from __future__ import annotations

import pytest

from benchmarks.papers.outcome import (
    NOT_FOUND,
    Outcome,
    Table,
    cell_text,
    mean,
    rank_correlation,
    with_spread,
)

TABLE = Table("a title", ("format", "ours", "published"), (("e4m3", 1.23456, 20.1), ("int8", None, NOT_FOUND)))


def test_a_table_is_never_cut() -> None:
    long = Table("t", ("a column with a long name", "b"), (("a cell that is longer than the terminal is wide", "x"),))
    for width in (20, 60, 150):
        lines = long.text(width).splitlines()
        assert lines[2].split("  ") == ["a cell that is longer than the terminal is wide", "x"]
        assert lines[1].split() == [*["a", "column", "with", "a", "long", "name"], "b"]


def test_none_and_numbers_are_short() -> None:
    assert [line.split() for line in TABLE.text().splitlines()[2:]] == [
        ["e4m3", "1.235", "20.1"],
        ["int8", "-", "not", "found"],
    ]
    assert [cell_text(cell) for cell in (None, 3, 2.0, 1e-7, "x")] == ["-", "3", "2", "1e-07", "x"]


def test_json_has_every_row_by_name() -> None:
    assert TABLE.to_dict() == {
        "title": "a title",
        "rows": [
            {"format": "e4m3", "ours": 1.23456, "published": 20.1},
            {"format": "int8", "ours": None, "published": NOT_FOUND},
        ],
    }


def test_a_row_of_another_length_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="a title"):
        Table("a title", ("one", "two"), (("a",),))


def test_an_outcome_says_where_published_figures_are_from() -> None:
    found = Outcome("smaller", "", (TABLE,), lambda path: None, ("a finding",), {"x": 1})
    text = found.text()
    assert text.index("a title") < text.index("a finding") < text.index("set-up: smaller")
    assert text.endswith(f"published figures: {NOT_FOUND}")
    assert found.to_dict()["published_figures_from"] is None and found.to_dict()["figures"] == {"x": 1}


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # ranks 0 1.5 1.5 3 against 0 1 2 3: covariance 4.5, squares 4.5 and 5
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_means_leave_out_what_is_not_there() -> None:
    assert mean([1.0, None, 3.0]) == 2 and mean([None]) is None
    assert with_spread([]) == "-" and with_spread([1.5]) == "1.5000"
    assert with_spread([0.01, 0.03], "+.1%") == "+2.0% ± 1.0%"  # stdev 0.01414, over the root of 2
