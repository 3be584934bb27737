"""PyTorch's operator database: no operation's gradient is wrong, not finite, or a crash, with everything eligible encoded."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

import pytest
import torch

from fp8compile._version import release_of
from tests.sweeps.op_database import DTYPES, Record, Step, records, sqnr, worst_of
from tests.sweeps.op_database_run import by_operation, jobs_of, swept, text_of, told, worst_first
from tests.sweeps.op_exemptions import EXEMPT, unexcused, unused
from tests.sweeps.op_programs import operations
from tests.sweeps.op_selection import SELECTION


@pytest.mark.parametrize(("name", "dtype", "wrappers"), SELECTION, ids=[f"{n}-{d}" for n, d, _ in SELECTION])
def test_selected(name: str, dtype: str, wrappers: tuple[str, ...], tally: Callable[..., None]) -> None:
    if name == "fft.rfft" and release_of(torch.__version__) <= (2, 11):
        pytest.skip("Inductor of torch 2.11 expects other strides of rfft's result than it has, with any backend")
    found = records(name, dtype, samples=1, wrappers=wrappers)
    for record in found:
        tally(f"op_db {dtype}, CI", record.outcome)
    assert not unexcused(found), told(unexcused(found))


def test_a_mean_that_is_kept_beside_the_first_codes_is_taken_as_it_is_saved() -> None:
    """Its count is a tensor that is stored in a byte: nothing that the backward has makes the mean again."""
    found = records("masked.var", "float16", samples=1, wrappers=("sum",))
    assert [record.outcome for record in found] == ["encoded"], told(found)


def test_what_must_not_be_is_told() -> None:
    bad = Record("sin", "float32", 0, "sum", "wrong", saved=("x1 int8 1x128",))
    assert "x1 int8 1x128" in told([bad]) and "x1 int8 1x128" in text_of([bad])


@pytest.mark.sweep
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole(dtype: str, tally: Callable[..., None]) -> None:
    found = swept(jobs_of(operations(), [dtype]), os.cpu_count() or 1)
    print(text_of(found))
    for rows in by_operation(found).values():
        tally(f"op_db {dtype}", worst_first(r.outcome for r in rows)[0])
    assert not unexcused(found), told(unexcused(found))
    # Where several dtypes are named, one of them may do without: what rounding noise is depends on the machine.
    idle = [cases for cases in unused(found) if f" {dtype} " in cases]
    assert not idle, f"nothing needs these exemptions any more: {idle}"


def test_the_selection_names_operations_that_exist() -> None:
    known = operations()
    assert not [name for name, *_ in SELECTION if name not in known]


def test_sqnr_sees_what_must_not_be() -> None:
    one = torch.ones(4)
    assert sqnr(one, one) == math.inf
    assert math.isclose(sqnr(one, one * 1.1), 20, abs_tol=1e-4)
    assert math.isnan(sqnr(one, one / 0)) and sqnr(torch.zeros(4), one) == -math.inf
    assert sqnr(torch.tensor([1]), torch.tensor([2])) == -math.inf
    missing = worst_of(Step({}, {"w0": one}), Step({}, {}))
    assert missing == (-math.inf, "w0"), "a gradient that is not there is wrong"


def test_an_exemption_is_idle_where_its_cases_run_and_do_without() -> None:
    each = EXEMPT[0]
    needing = Record("corrcoef", "float32", 0, "product", each.outcome)
    fine = dataclasses.replace(needing, outcome="encoded")
    assert unused([fine]) == [each.cases] and unused([fine, needing]) == [], "it ran; one of its cases needs it"
    assert unused([dataclasses.replace(fine, op="add")]) == [], (
        "exemptions of other operations say nothing of this one"
    )
