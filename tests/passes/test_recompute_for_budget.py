"""recompute_for_budget: golden, contract, numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Node

import fp8compile
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.recompute_for_budget import NOT_STATIC, recompute_for_budget
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from tests.support.budgets import CASES, EXACT, PLAIN, Steps, budget_of, case_of, step
from tests.support.graphs import backward_of
from tests.support.reference import sqnr_db

aten = torch.ops.aten
TWICE = 3.02  # dB: an error of twice the power


def test_golden_backward_that_repeats_a_matmul() -> None:
    _, split = budget_of(Steps(2), torch.randn(128, 64), 0.0, **PLAIN)
    assert_expected_inline(
        backward_of(split),
        """\
primals_2: float32[128, 64]
primals_3: float32[64, 64]
primals_1: float32[64, 64]
tanh_1: float32[128, 64]
tangents_1: float32[128, 64]
mul: float32[128, 64] = mul(tanh_1, tanh_1)
sub: float32[128, 64] = sub(mul)
mul_1: float32[128, 64] = mul(tangents_1, sub)
permute_2: float32[64, 128] = permute(mul_1)
permute: float32[64, 64] = permute(primals_1)
mm: float32[128, 64] = mm(primals_2, permute)
tanh_2: float32[128, 64] = tanh(mm)
mm_2: float32[64, 64] = mm(permute_2, tanh_2)
permute_1: float32[64, 64] = permute(primals_3)
permute_4: float32[64, 64] = permute(permute_1)
mm_3: float32[128, 64] = mm(mul_1, permute_4)
mul_2: float32[128, 64] = mul(tanh_2, tanh_2)
sub_1: float32[128, 64] = sub(mul_2)
mul_3: float32[128, 64] = mul(mm_3, sub_1)
permute_6: float32[64, 128] = permute(mul_3)
mm_4: float32[64, 64] = mm(permute_6, primals_2)
return mm_4, None, mm_2
""",
    )


def test_a_copy_stands_directly_before_what_reads_it_first() -> None:
    """No copy of an earlier step exists before the gradients of later ones are done."""
    told, split = budget_of(Steps(12), torch.randn(128, 64), 0.0, **PLAIN)
    nodes = list(split.bw.graph.nodes)
    copies = [n for n in nodes if n.target is aten.mm.default and is_copy(n, split)]
    assert told.chosen and copies
    for copied in copies:
        first = min(copied.users, key=nodes.index)
        between = nodes[nodes.index(copied) + 1 : nodes.index(first)]
        assert all(is_copy(n, split) for n in between), f"{copied} waits for {between}"


def is_copy(node: Node, split: PartitionedGraph) -> bool:
    """Whether a node of the backward depends on no incoming gradient."""
    tangents = [n for n in split.bw.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    waiting, seen = [node], set[Node]()
    while waiting:
        n = waiting.pop()
        if n in tangents:
            return False
        waiting += [parent for parent in n.all_input_nodes if parent not in seen]
        seen.update(n.all_input_nodes)
    return True


@pytest.mark.parametrize("name", list(CASES))
def test_without_codes_every_budget_gives_the_same_gradients(name: str) -> None:
    model, x = case_of(name)
    exact = step(model, x, **PLAIN)
    for budget in (0.6, 0.0):
        found = step(model, x, memory=budget, **PLAIN)
        assert min(sqnr_db(exact[n], found[n]) for n in exact) > EXACT


def test_with_codes_gradients_stay_as_good_as_the_defaults() -> None:
    """What is made again comes from exact values or from codes once: no gradient loses more than the codes' own error."""
    model, x = case_of("llama")
    exact = step(model, x, **PLAIN)
    stored = {"debug.codegen": "eager", "linears": "off", "saved.min_numel": 0}
    found = {budget: step(model, x, memory=budget, **stored) for budget in (1.0, 0.7, 0.4, 0.0)}
    worst = {budget: min(sqnr_db(exact[n], each[n]) for n in exact) for budget, each in found.items()}
    assert min(worst.values()) > worst[1.0] - TWICE, worst


def test_with_fp8_linears_the_products_are_repeated_from_codes_alike() -> None:
    model, x = case_of("llama")
    linears = {"debug.codegen": "eager", "linears": "tensorwise", "saved": "off", "linears.emulate": True}
    default, tight = step(model, x, **linears), step(model, x, memory=0.0, **linears)
    assert min(sqnr_db(default[n], tight[n]) for n in default) > EXACT


def test_it_is_idempotent_in_bytes() -> None:
    model, x = case_of("steps")
    target = 250_000
    told, split = budget_of(model, x, target, **PLAIN)
    assert told.is_met and told.chosen > 0
    (again,) = recompute_for_budget(
        split, Context(Recipe.preset("off", memory=target, debug={"codegen": "eager"}))
    ).budgets
    assert again.chosen == 0


def test_symbolic_sizes_have_the_reason() -> None:
    model = Steps(4)
    compiled = torch.compile(model, backend="fp8compile", options={**PLAIN, "memory": 0.5}, dynamic=True)
    compiled(torch.randn(128, 64)).sum().backward()
    (told,) = fp8compile.report(compiled).budgets
    assert told.reason == NOT_STATIC and not told.frontier
    assert NOT_STATIC in " ".join(str(fp8compile.report(compiled)).split())


@pytest.mark.parametrize("wrong", [-0.1, 1.5, True, "half", -3])
def test_a_budget_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"memory\.budget"):
        Recipe(memory=wrong)


def test_a_module_cannot_have_a_budget_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"modules\['steps.0'\].memory\.budget is 0.5"):
        Recipe(modules={"steps.0": {"memory": 0.5}})


def test_the_report_tells_the_frontier() -> None:
    model, x = case_of("steps")
    report = fp8compile.explain(model, (x,), recipe=Recipe.preset("off", memory=0.5))
    (told,) = report.budgets
    assert told.target == int(0.5 * told.frontier[0].peak)
    assert str(told) in " ".join(str(report).split())
    assert told.table.count("<-") == 1
    assert "recomputed for the memory budget" in str(report)
    assert all(entry.sources for entry in report.recomputed if entry.for_budget)
    assert GraphReport.from_dict(json.loads(json.dumps(report.graphs[0].to_dict()))).notes.budgets == (told,)
