"""PyTorch's module database: no gradient of a module is wrong, not finite, or a crash, with everything eligible encoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sweeps.module_database import SAMPLES, modules, records
from tests.sweeps.op_exemptions import unexcused
from tests.sweeps.test_op_database import told

SELECTION = ("nn.BatchNorm1d", "nn.GroupNorm", "nn.Conv2d", "nn.GRUCell", "nn.CrossEntropyLoss")


@pytest.mark.parametrize("name", SELECTION)
def test_selected(name: str, tally: Callable[..., None]) -> None:
    judge(name, 2, tally)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(modules()))
def test_whole(name: str, tally: Callable[..., None]) -> None:
    judge(name, SAMPLES, tally)


def judge(name: str, samples: int, tally: Callable[..., None]) -> None:
    found = records(name, samples)
    for record in found:
        tally("module_db", record.outcome)
    print(*(f"{r.key}: {r.outcome} {r.db} {r.worst}" for r in found), sep="\n")
    assert found and not unexcused(found), told(unexcused(found))
