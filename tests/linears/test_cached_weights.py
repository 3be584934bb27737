"""Codes of weights that are kept between calls: the numbers are those of codes made in each call, they are made as seldom as
can be, and they live no longer than their weight."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.linears import weight_codes
from fp8compile.reporting.entries import CachedWeight
from tests.support.measure import compiled, matmul_entries

CACHED = {"linears.emulate": True, "linears.cache_weights": True}
MICRO = 3


class Block(nn.Module):
    """a, b, c; c in a checkpoint, or behind a graph break."""

    def __init__(self, inside: str = "") -> None:
        super().__init__()
        self.inside = inside
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.b(F.gelu(self.a(x)))
        if self.inside == "graph break":
            torch._dynamo.graph_break()
        if self.inside == "checkpoint":
            z: Tensor = checkpoint(lambda y: F.silu(self.c(y)), y, use_reentrant=False)
            return z
        return F.silu(self.c(y))


class Tied(nn.Module):
    """Its output head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(64, 32), Block(), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.embed((1000 * x[:, 0]).long() % 64)))
        return y


def data(step: int = 0, micro: int = 0, rows: int = 24) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(100 * step + micro))


def trained(model: nn.Module, run: Callable[..., Tensor], steps: int = 4, amp: bool = False) -> list[Tensor]:
    """Each loss and each gradient of so many steps of MICRO micro-batches."""
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.01), list[Tensor]()
    for step in range(steps):
        for micro in range(MICRO):
            x = data(step, micro).to(next(model.parameters()).dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = run(x).float().square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def bit_equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each weight that is encoded, in order."""
    shapes, encode = list[tuple[int, ...]](), weight_codes.encode

    def noting(weight: Tensor, layouts: weight_codes.Layouts) -> tuple[Tensor, ...]:
        shapes.append(tuple(weight.shape))
        return encode(weight, layouts)

    monkeypatch.setattr(weight_codes, "encode", noting)
    return shapes


KINDS = ["plain", "bf16", "autocast", "tied", "checkpoint", "graph break", "checkpoint around", "generated"]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_without_a_cache(kind: str, encoded: list[tuple[int, ...]]) -> None:
    first = Tied() if kind == "tied" else Block(kind)
    if kind == "bf16":
        first = first.bfloat16()
    found = []
    for cache in (False, True):
        torch._dynamo.reset()
        model = copy.deepcopy(first)
        codegen = "inductor" if kind == "generated" else "eager"
        run: Any = compiled(
            model, **{"linears.emulate": True, "linears.cache_weights": cache, "debug.codegen": codegen}
        )
        if kind == "checkpoint around":
            run = around(run)
        assert not encoded
        found.append(trained(model, run, amp=kind == "autocast"))
    assert bit_equal(*found)
    assert len(encoded) == 3 * ((2 if kind == "checkpoint around" else 1) * MICRO + 3), "a step, then once a step"


def around(run: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda x: checkpoint(run, x, use_reentrant=False)


def test_an_embedding_that_is_the_head_too_is_not_kept() -> None:
    model = Tied()
    trained(model, compiled(model, **CACHED), 1)
    weights = fp8compile.report(model).notes.weights
    assert {w.origin.module for w in weights} == {"block.a", "block.b", "block.c"}
    assert sum(w.bytes for w in weights) == 64 * 32 * 2 + 32 * 32
    assert fp8compile.tools.scaling_state(model).weight_bytes == 64 * 32 * 2 + 32 * 32 + 3 * 4
    assert weight_codes.store.bytes_of([model.embed.weight]) == 0


def multiply_fp8_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fp8compile.linears.reasons"]
    monkeypatch.setattr(module, "fp8_unsupported_reason", lambda device: None)


def test_both_layouts_of_codes_are_those_that_scaled_mm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not emulated, node by node, with the CPU's own _scaled_mm; weights stored across as well (``x @ w``)."""
    multiply_fp8_on_the_cpu(monkeypatch)
    found = []
    for cache in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = Across()
        run = compiled(model, **{"linears.cache_weights": cache})
        found.append([])
        for _ in range(3):
            x = data().requires_grad_()
            loss = run(x).square().mean()
            found[-1] += [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]
    assert bit_equal(*found)
    told = {w.origin.module: (w.by_rows, w.transposed) for w in fp8compile.report(model).notes.weights}
    assert told == {"a": (True, True), "": (True, True)}
    assert fp8compile.tools.scaling_state(model).weight_bytes == 2 * (64 * 32 + 64 * 48) + 2 * 4


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(32, 64), nn.Parameter(torch.randn(64, 48))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(x)) @ self.w


def test_a_weight_is_encoded_once_a_step_when_its_version_was_seen_to_change(encoded: list[tuple[int, ...]]) -> None:
    model = Block()
    run, optimizer, counts = compiled(model, **CACHED), torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(4):
        for micro in range(MICRO):
            before = len(encoded)
            run(data(0, micro)).sum().backward()
            counts.append(len(encoded) - before)
        optimizer.step()
    assert counts == [3, 3, 3] + 3 * [3, 0, 0]


def test_frozen_weights_are_encoded_once(encoded: list[tuple[int, ...]]) -> None:
    model = Block()
    model.a.requires_grad_(False), model.b.requires_grad_(False)
    trained(model, compiled(model, **CACHED), 3)
    assert encoded.count((64, 32)) == encoded.count((32, 64)) == 1 and encoded.count((32, 32)) == 3 + 2


def test_with_delayed_scaling_weights_have_no_history() -> None:
    """Input and gradient have; on the first step, which measures, the numbers are those of dynamic scaling."""
    first, found = Block(), {}
    for scaling in ("dynamic", "delayed"):
        torch._dynamo.reset()
        model = copy.deepcopy(first)
        found[scaling] = trained(model, compiled(model, **CACHED, **{"linears.scaling": scaling}))
    assert bit_equal(found["dynamic"][:3], found["delayed"][:3])
    assert not bit_equal(found["dynamic"], found["delayed"]) and bool(found["delayed"][-1].isfinite().all())
    report = fp8compile.report(model)
    roles = {o.label.rpartition(".")[2] for o in report.notes.operands}
    assert roles == {"input", "gradient"} and len(report.notes.weights) == 3
    assert {m.formats for m in report.linears if m.direction == "forward"} == {
        "e4m3 x e4m3 delayed, cached weight, emulated"
    }


def test_the_report_tells_of_each_weight_and_each_matmul() -> None:
    model = Block()
    trained(model, compiled(model, **CACHED), 1)
    report = fp8compile.report(model)
    told = {(m.origin.module, m.direction): "cached weight" in m.formats for m in report.linears}
    assert told == {
        (n, d): d != "wgrad" for n in "abc" for d in ("forward", "dgrad", "wgrad") if (n, d) != ("a", "dgrad")
    }
    assert all(isinstance(w, CachedWeight) and w.dtype == "f32" for w in report.notes.weights)
    assert "cached weight" in report.to_text() and '"by_rows": true' in report.to_json()


def test_only_modules_whose_recipe_asks_for_it() -> None:
    model = Block()
    compiled(model, modules={"b": {"linears.cache_weights": True}}, **{"linears.emulate": True})(
        data()
    ).sum().backward()
    assert [w.origin.module for w in fp8compile.report(model).notes.weights] == ["b"]


@pytest.mark.parametrize(
    "changes",
    [
        {"linears.emulate": True},
        {"linears.emulate": True, "linears": "rowwise", "linears.cache_weights": True},
        {"linears": "off", "linears.cache_weights": True},
    ],
)
def test_nothing_is_kept_without_tensorwise_linears_or_the_option(changes: dict[str, Any]) -> None:
    model = Block()
    trained(model, compiled(model, **changes), 2)
    assert fp8compile.tools.scaling_state(model).weight_bytes == 0
    assert not any("cached weight" in getattr(m, "formats", "") for m in matmul_entries(fp8compile.report(model)))


def test_inference_takes_no_codes(encoded: list[tuple[int, ...]]) -> None:
    model = Block()
    run = compiled(model, **CACHED)
    with torch.no_grad():
        assert torch.allclose(run(data()), model(data()), atol=1e-6)
    assert not encoded and fp8compile.tools.scaling_state(model).weight_bytes == 0


def test_two_graphs_share_one_encoding(encoded: list[tuple[int, ...]]) -> None:
    model = Block().requires_grad_(False)
    run = torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager", **CACHED}, dynamic=False)
    torch._dynamo.utils.counters.clear()
    for rows in (24, 40, 24, 40):
        run(data(rows=rows).requires_grad_()).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 and len(encoded) == 3


def test_graphs_that_take_other_layouts_share_both(
    monkeypatch: pytest.MonkeyPatch, encoded: list[tuple[int, ...]]
) -> None:
    """A graph whose input takes no gradient has no dgrad, and takes no transposed codes."""
    multiply_fp8_on_the_cpu(monkeypatch)
    model = nn.Linear(32, 64)
    model.weight.requires_grad_(False)
    run, held, found = compiled(model, **{"linears.cache_weights": True}), [], []
    for grad in (False, True, False, True):
        x = data().requires_grad_(grad)
        found.append(run(x))
        found[-1].sum().backward()
        held.append(fp8compile.tools.scaling_state(model).weight_bytes)
    assert held == [64 * 32 + 4] + 3 * [2 * 64 * 32 + 4] and len(encoded) == 2
    assert all(torch.equal(found[0], each) for each in found)


def test_models_that_share_compiled_code_do_not_share_codes() -> None:
    """Nor do blocks of one model that are compiled once."""
    first, found = nn.Sequential(Block(), Block(), Block()), []
    for cache in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = copy.deepcopy(first)
        for block in model:
            block.compile(
                backend="fp8compile",
                options={"debug.codegen": "eager", "linears.emulate": True, "linears.cache_weights": cache},
            )
        found.append(trained(model, model))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, (
            "the first block's input takes no gradient"
        )
    assert bit_equal(*found)


def test_other_tensors_in_a_functional_call_have_codes_of_their_own() -> None:
    model, x = Block(), data()
    other = {name: nn.Parameter(2 * value.detach()) for name, value in model.named_parameters()}
    found = []
    for cache in (False, True):
        torch._dynamo.reset()
        run = compiled(model, **{"linears.emulate": True, "linears.cache_weights": cache})
        optimizer, outs = torch.optim.SGD(model.parameters(), 0.0), []
        for _ in range(3):
            outs += [run(x), torch.func.functional_call(run, {f"_orig_mod.{n}": v for n, v in other.items()}, x)]
            outs[-2].sum().backward()
            optimizer.step()  # the model's own weights are trusted then
        assert not torch.equal(outs[-1], outs[-2])
        found.append([out.detach() for out in outs])
    assert bit_equal(*found)


def test_codes_and_weights_die_with_the_model() -> None:
    model = Block()
    trained(model, compiled(model, **CACHED), 2)
    kept = [one for p in model.parameters() for one in weight_codes.store._kept.get(p, {}).values()]
    codes = [weakref.ref(t) for one in kept for t in one.made if t is not None]
    weights = [weakref.ref(p) for p in model.parameters()]
    state = fp8compile.tools.scaling_state(model)
    assert len(codes) == 6 and state.weight_bytes > 0
    torch._dynamo.reset()
    del model, kept
    gc.collect()
    assert not any(dead() is not None for dead in codes + weights)
    assert not weight_codes.store._asked and state.weight_bytes == 0
    state.forget_weights()  # nothing to forget
