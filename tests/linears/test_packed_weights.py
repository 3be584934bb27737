"""Codes of several weights in one matrix: made anew with any of them, and living no longer than they do."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.linears import packed_weights
from fp8compile.linears.packed_weights import of_one_input, side_by_side
from fp8compile.linears.weight_codes import store
from fp8compile.numerics import E4M3, Tensorwise
from tests.linears.test_merged_dgrads import OPTIONS, Two, data, fp8_units, in_one, nearly
from tests.support.measure import compiled, gradients

__all__ = ["fp8_units"]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each pack that is made holds."""
    made, pack = list[int](), packed_weights.side_by_side

    def noting(codes: Any) -> Tensor:
        made.append(len(codes))
        return pack(codes)

    monkeypatch.setattr(packed_weights, "side_by_side", noting)
    return made


def losses(model: nn.Module, run: Callable[..., Any], steps: int = 4, micro: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        for _ in range(micro):
            sum(y.square().mean() for y in run(data())).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_columns_are_the_weights_in_order() -> None:
    codes = [Tensorwise(E4M3).encode(torch.randn(n, 64))[0] for n in (32, 16)]
    packed = side_by_side(codes)
    assert packed.shape == (64, 48) and packed.is_contiguous() and packed.dtype == torch.float8_e4m3fn
    assert torch.equal(packed[:, :32].float(), codes[0].t().float())
    assert torch.equal(packed[:, 32:].float(), codes[1].t().float())


def test_a_pack_is_made_once_a_step(packed: list[int], fp8_units: None) -> None:
    model = Two()
    losses(model, compiled(model, **OPTIONS))
    assert packed == [2] * (3 + 3), "each call of the first step, which trusts nothing yet"


def test_a_pack_is_made_anew_with_any_of_its_weights(packed: list[int], fp8_units: None) -> None:
    """And is right: the gradient is that of dgrads apart."""
    model, x = Two(), data()
    model.requires_grad_(False)  # trusted at once
    run = compiled(model, **OPTIONS)
    for changed in (None, None, model.a, model.b):
        if changed is not None:
            with torch.no_grad():
                changed.weight.mul_(-3)
        (merged,) = gradients(model, in_one(run), (x,)).values()
    assert packed == [2, 2, 2]
    (exact,) = gradients(model, in_one(model), (x,)).values()
    assert nearly(exact, merged)


def test_a_pack_takes_the_place_of_transposed_codes(fp8_units: None) -> None:
    held = []
    for merge in (False, True):
        torch._dynamo.reset()
        model = Two()
        losses(model, compiled(model, **OPTIONS | {"linears.merge_dgrads": merge}), 1, 1)
        held.append(fp8compile.tools.scaling_state(model).weight_bytes)
    assert held[0] == 2 * 64 * 48 + 2 * 4 and held[1] == held[0] + 4, "and the largest scale"
    weights = fp8compile.report(model).notes.weights
    assert all(w.packs == (0,) and w.by_rows and not w.transposed for w in weights)
    assert sum(w.bytes for w in weights) == 2 * 64 * 48
    fp8compile.tools.scaling_state(model).forget_weights()
    assert fp8compile.tools.scaling_state(model).weight_bytes == 0


def test_emulated_nothing_is_packed(packed: list[int]) -> None:
    model = Two()
    losses(model, compiled(model, **OPTIONS, **{"linears.emulate": True}), 2)
    assert not packed and fp8compile.tools.scaling_state(model).weight_bytes == 64 * 48 + 2 * 4


def test_a_backward_to_come_keeps_the_pack_of_its_forward(fp8_units: None) -> None:
    model, x = Two().requires_grad_(False), data()
    run, found = compiled(model, **OPTIONS), []
    in_one(run)(x).sum().backward()
    for change in (False, True):
        x.grad = None
        out = in_one(run)(x)
        if change:
            with torch.no_grad():
                model.b.weight.mul_(-3)
            in_one(run)(data())  # makes a new pack
        out.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_models_that_share_compiled_code_share_no_pack(fp8_units: None) -> None:
    first = nn.ModuleList(Two() for _ in range(2))
    found = []
    for merge in (False, True):
        torch._dynamo.reset()
        model, x = copy.deepcopy(first), data()
        for block in model:
            block.compile(
                backend="fp8compile", options={"debug.codegen": "eager", **OPTIONS, "linears.merge_dgrads": merge}
            )
        grads = []
        for _ in range(3):
            grads = [gradients(block, in_one(block), (x,))["arg0"] for block in model]
        found.append(grads)
    assert all(map(nearly, *found))


def test_packs_die_with_their_weights(fp8_units: None) -> None:
    model = Two()
    losses(model, compiled(model, **OPTIONS), 2)
    alive = [weakref.ref(pack.packed) for pack in store.packs._kept[model.a.weight].values()]
    assert len(alive) == 1
    torch._dynamo.reset()
    del model
    gc.collect()
    assert alive[0]() is None


def test_weights_of_one_input_in_a_dynamo_graph() -> None:
    graphs = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(x) + self.a(x) + self.a(x)
            return self.c(y) + self.d(y) + self.c(y.relu())

    model = Model()
    torch.compile(model, backend=lambda gm, inputs: graphs.append((gm, inputs)) or gm)(torch.randn(4, 16))
    gm, inputs = graphs[0]
    at = {name: next(i for i, v in enumerate(inputs) if v is p) for name, p in model.named_parameters()}
    everything = of_one_input(gm, range(len(inputs)))
    assert {frozenset(each) for each in everything} == {
        frozenset(at[f"{n}.weight"] for n in names) for names in ("ab", "cd")
    }
    assert all(each == tuple(sorted(each)) for each in everything)
    few = [position for position in range(len(inputs)) if position != at["d.weight"]]
    assert [*map(set, of_one_input(gm, few))] == [{at["a.weight"], at["b.weight"]}]
