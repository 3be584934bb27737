"""check: the code that is generated is compared with the graph that it was generated from, outputs as well as gradients."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.tools.checking.rows import IN_CODE, OK
from tests.support.sensitive import Net, batch, squares


class Scaled(nn.Module):
    """A product that is added a tenth of: torch 2.13's pattern on a CPU loses the tenth (passes/spell_out_alpha.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        return torch.add(a, x @ self.weight, alpha=0.1)


def test_code_that_is_not_its_graph_is_told_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = Scaled(), (torch.randn(128, 64), batch(128))
    with torch._inductor.config.patch(disabled_passes="spell_out_alpha"):
        found = fp8compile.check(model, args, recipe={"linears": "off"})
    (output,) = found.outputs
    if output.generated == output.db:
        pytest.skip("mended upstream")  # tests/test_canary_patterns.py says so too
    assert not found.ok and found.recipe is None and found.ran == "generated code" and not found.below
    assert output.name == "output" and output.verdict == IN_CODE and output.db > 100 and output.generated < 0
    assert f"output {output.generated:.1f} dB (node by node" in str(found) and '"codegen": "eager"' in str(found)
    assert json.loads(found.to_json())["outputs"][0]["verdict"] == IN_CODE


def test_generated_code_draws_the_numbers_of_the_graph() -> None:
    found = fp8compile.check(Net(dropout=0.3), batch(), loss=squares, recipe={"linears": "off"})
    assert (
        found.ok
        and found.steps == 6
        and found.ran == "generated code"
        and "generated code as its graph" in str(found)
    )
    for row in (*found.rows, *found.outputs):
        if row.verdict == OK and row.db < math.inf:
            assert row.generated == pytest.approx(row.db, abs=1), "another mask is another gradient"


def test_where_no_code_is_generated_it_says_so() -> None:
    found = fp8compile.check(Net(), batch(), loss=squares, recipe={"debug.codegen": "eager"})
    assert found.ok and found.ran == "graph" and found.steps == 5 and found.outputs == ()
    assert "no generated code was run" in str(found)
