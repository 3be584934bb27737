"""Every linear of whole models is in the report, by module path: its forward, dgrad and wgrad, in FP8 or with the reason.

timm's models are accounted for in the same way by ``benchmarks/studies/bench_models.py``, arm "linears".
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from benchmarks.studies import models
from benchmarks.studies.linears import Account, account, is_linear, products_due
from benchmarks.studies.models import Case
from fp8compile import Recipe
from fp8compile.reporting.entries import LINEAR, Skip
from fp8compile.reporting.report import Report
from tests.support.measure import matmul_entries

pytest.importorskip("transformers")
torch.set_num_threads(1)

CASES: Mapping[str, Callable[[], Case]] = {
    "llama": lambda: models.llama(0, tiny=True, ffn=176),
    "qwen3": lambda: models.qwen3(0, tiny=True),
    "bert": lambda: models.bert(0, tiny=True),
    "t5": lambda: models.t5(0, tiny=True),
    "gpt2": lambda: models.gpt2(0, tiny=True),
    "vit": lambda: models.vit(0, tiny=True),
}
LINEARS = {"llama": 8, "qwen3": 8, "bert": 8, "t5": 17, "gpt2": 5, "vit": 7}  # of one layer, and the head
HEADS = {"bert": "cls.predictions.decoder", "vit": "classifier"}  # the others' is lm_head
HEAD = "Recipe.linears.skip: module '{0}' matches '{0}'"
TIED = "output head: its weight is tied to an embedding"
EMULATED = {
    "forward": {"e4m3 x e4m3 tensorwise, emulated"},
    "dgrad": {"e5m2 x e4m3 tensorwise, emulated"},
    "wgrad": {"e5m2 x e4m3 tensorwise, emulated", "e4m3 x e5m2 tensorwise, emulated"},  # Conv1D's is x' dy
}


def explained(case: Case, precision: torch.dtype | None = None, **fields: Any) -> tuple[Report, Account]:
    """The report of a model's forward and backward, and the account of its linears."""
    batch = case.batch(0)

    def within() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", precision) if precision else contextlib.nullcontext()

    def run(model: Callable[..., Any]) -> Any:
        with within():
            return model(*batch.args, **(batch.kwargs or {}))

    compiled = torch.compile(
        case.model, backend="fp8compile", options={"debug.codegen": "eager", "linears.emulate": True, **fields}
    )
    case.loss(run(compiled), batch).backward()
    report = fp8compile.report(case.model)
    return report, account(case.model, run, matmul_entries(report))


@functools.cache
def as_it_is(name: str) -> tuple[Case, Report, Account]:
    """A case and what is told of it, for tests that only read."""
    case = CASES[name]()
    return case, *explained(case)


def left(report: Report) -> dict[str, str]:
    """The reason by path of what is left as it is; each linear has but one."""
    found = {(x.origin.module, x.reason) for x in report.notes.skipped(LINEAR)}
    assert len(found) == len(dict(found))
    return dict(found)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if is_linear(module)}


@pytest.mark.parametrize("name", CASES)
def test_every_linear_is_told_of_by_path(name: str) -> None:
    case, report, found = as_it_is(name)
    assert not found.differences
    assert set(found.due) == set(linear_modules(case.model))
    assert len(found.due) == LINEARS[name]
    assert all(due == Counter(forward=1, dgrad=1, wgrad=1) for due in found.due.values())
    head = HEADS.get(name, "lm_head")
    assert left(report) == {head: HEAD.format(head)}
    for entry in report.linears:
        assert entry.formats in EMULATED[entry.direction]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sizes_are_those_of_the_weights(name: str) -> None:
    case, report, _ = as_it_is(name)
    weights = linear_modules(case.model)
    for entry in report.linears:
        module = weights[entry.origin.module]
        assert isinstance(module.weight, Tensor)
        K_N = module.weight.shape[::-1] if isinstance(module, nn.Linear) else module.weight.shape
        assert (128, *K_N) == (entry.M, entry.K, entry.N)


def test_sides_that_are_no_multiple_of_16() -> None:
    report, found = explained(models.llama(0, tiny=True))  # its ffn is 170
    assert not found.differences
    mlp = "model.layers.0.mlp."
    assert left(report) == {
        mlp + "gate_proj": "N=170 is not a multiple of 16",
        mlp + "up_proj": "N=170 is not a multiple of 16",
        mlp + "down_proj": "K=170 is not a multiple of 16",
        "lm_head": HEAD.format("lm_head"),
    }


@pytest.mark.parametrize(("name", "reason"), [("gpt2", TIED), ("llama", "N=264 is not a multiple of 16")])
def test_output_heads_that_no_pattern_names(name: str, reason: str) -> None:
    report, found = explained(CASES[name](), **{"linears.skip": ()})
    assert not found.differences
    assert left(report) == {"lm_head": reason}


def test_autocast() -> None:
    report, found = explained(CASES["vit"](), torch.bfloat16)
    assert not found.differences
    assert left(report) == {"classifier": HEAD.format("classifier")}


def test_frozen_weights_have_no_wgrad_and_data_no_dgrad() -> None:
    case = CASES["llama"]()
    attention = "model.layers.0.self_attn."
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(
            "embed_tokens" not in name and "input_layernorm" not in name and "o_proj" not in name
        )
    _, found = explained(case)
    assert not found.differences
    assert found.due[attention + "q_proj"] == Counter(forward=1, wgrad=1)
    assert found.due[attention + "o_proj"] == Counter(forward=1, dgrad=1)


class Breaking(nn.Module):
    """An MLP that breaks the graph in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._broken(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    def _broken(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.nn.functional.silu(x)


class Around(nn.Module):
    """A linear before the break. (In nn.Sequential it would run uncompiled: Dynamo gives up on a loop with a break.)"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp = nn.Linear(32, 32), Breaking()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.first(x))  # type: ignore[no-any-return]


def test_graph_breaks_lose_no_linear() -> None:
    """Dynamo compiles what is around a break by itself. Of a graph that begins in two modules the paths begin there."""
    model = Around()
    x = torch.randn(8, 32)
    report = fp8compile.explain(model, (x,), recipe=Recipe(linears={"emulate": True}))
    due = products_due(model, lambda m: m(x))
    assert set(due) == {"first", "mlp.up", "mlp.gate", "mlp.down"} and len(report.graphs) > 1
    told = Counter(entry.direction for entry in report.linears)
    assert told == sum(due.values(), Counter())
    assert {entry.origin.module for entry in report.linears} == {"first", "mlp.gate", "up", ""}


def test_gradient_checkpointing() -> None:
    case = CASES["gpt2"]()
    case.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    _, found = explained(case)
    assert not found.differences


def test_the_account_finds_what_is_missing_and_doubled() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(8, 32)
    report = fp8compile.explain(model, (x,), recipe=Recipe(linears={"emulate": True}))
    assert products_due(model, lambda m: m(x))["0"] == Counter(forward=1, wgrad=1)
    told = list(report.linears)
    assert not account(model, lambda m: m(x), told).differences
    assert account(model, lambda m: m(x), told[1:]).differences
    assert account(model, lambda m: m(x), [*told, told[0]]).differences
    assert account(model, lambda m: m(x), [x for x in told if x.origin.module == "0"]).differences.keys() == {"1"}
    left = Skip(told[0].info, "none", LINEAR, told[0].direction)
    assert not account(model, lambda m: m(x), [left, *told[1:]]).differences
