"""Where cache_weights can have no effect, the report remarks on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.compiler.inductor import NO_CUDA_GRAPHS, NOTHING_TO_CACHE
from tests.support.measure import compiled


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        ({"linears": "rowwise", "linears.emulate": True}, NOTHING_TO_CACHE),
        ({"linears": "off"}, NOTHING_TO_CACHE),
        ({"linears.emulate": True, "debug.inductor": {"triton.cudagraphs": True}}, NO_CUDA_GRAPHS),
    ],
)
def test_what_cannot_be_cached_is_remarked_on(options: dict[str, Any], remark: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    run = compiled(model, **options, **{"linears.cache_weights": True})
    run(torch.randn(16, 32)).sum().backward()
    report = fp8compile.report(model)
    assert remark in report.remarks and not any("cached" in each.formats for each in report.linears)


def test_the_report_tells_of_the_codes_that_are_kept_and_counts_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    found = []
    for cache in (False, True):
        torch._dynamo.reset()
        compiled(model, **{"linears.cache_weights": cache, "linears.emulate": True})(
            torch.randn(16, 32)
        ).sum().backward()
        found.append(fp8compile.report(model))
    assert "weights encoded once: 2, 4.0 KiB of codes are kept" in str(found[1]) and "encoded once" not in str(
        found[0]
    )
    assert found[1].fits().weights - found[0].fits().weights == 2 * 32 * 64
    assert fp8compile.tools.scaling_state(model).weight_bytes == 2 * 32 * 64 + 2 * 4


def test_the_exact_twin_of_the_first_step_remarks_on_nothing() -> None:
    model = nn.Linear(32, 64)
    compiled(model, **{"linears.cache_weights": True, "linears.emulate": True, "debug.check": "first_step"})(
        torch.randn(16, 32)
    ).sum().backward()
    assert NOTHING_TO_CACHE not in fp8compile.report(model).remarks
