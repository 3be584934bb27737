"""How many neighbours in memory one block of threads stores at once, by the index of its store."""

import pytest

from .scattered import _run


@pytest.mark.parametrize(
    ("index", "run"),
    [
        ("x0", 64),
        ("r0_1 + 768*x0", 16),
        ("r0_1 + 16*x0", 16 * 64),  # rows as long as the block of their elements lie side by side
        ("x0 + 4096*r0_1", 64),
        ("(y0 + (4096*x1))", 1),
        ("64*(y0) + x2", 64),
    ],
)
def test_a_run_goes_on_where_rows_lie_side_by_side(index: str, run: int) -> None:
    assert _run(index, {"XBLOCK": 64, "YBLOCK": 1, "R0_BLOCK": 16}) == run
