"""quantize_linears on grouped matmuls: gradients against float64, wherever tokens go."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from tests.support.experts import Grouped, any_experts, ends_at, experts_case, rows_of
from tests.support.grouped_codes import grouped_units
from tests.support.measure import compiled, gradient_sqnr, gradients, kept_bytes

TOKENS_GO = {
    "all over": (16, 32, 48, 64),
    "ragged": (7, 20, 21, 64),
    "to one expert": (64, 64, 64, 64),
    "to the last": (0, 0, 0, 64),
    "to all but one": (16, 16, 40, 64),
}
ROUNDED = 21.0  # dB: two operands in E4M3 are 28.8 dB from exact, and a group of few rows has few errors to average


@functools.cache
def wherever_tokens_go(emulate: bool) -> dict[tuple[int, ...], tuple[dict[str, float], dict[str, float]]]:
    """By where groups end, the dB of gradients in FP8 and in 16 bits: one graph is for all."""
    torch.manual_seed(0)
    model, x, found = Grouped(), rows_of(64), {}
    with grouped_units():
        fn = compiled(model, linears="rowwise", **{"linears.emulate": emulate})
        for ends in TOKENS_GO.values():
            args = (x, ends_at(*ends))
            found[ends] = gradient_sqnr(model, fn, args), gradient_sqnr(model, model, args)
    return found


@pytest.mark.parametrize("ends", TOKENS_GO.values(), ids=TOKENS_GO)
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "codes"])
def test_gradients_wherever_tokens_go(ends: tuple[int, ...], emulate: bool) -> None:
    found, in_16_bit = wherever_tokens_go(emulate)[ends]
    assert min(found.values()) > ROUNDED, (found, in_16_bit)
    assert min(in_16_bit.values()) > 40


@pytest.mark.parametrize("tokens", [37, 61])
def test_any_number_of_tokens(tokens: int) -> None:
    model, args = Grouped(), (rows_of(tokens), ends_at(10, 10, 30, tokens))
    with grouped_units():
        for emulate in (True, False):
            torch._dynamo.reset()
            fn = compiled(model, linears="rowwise", **{"linears.emulate": emulate})
            assert min(gradient_sqnr(model, fn, args).values()) > ROUNDED


def test_codes_multiply_to_what_is_emulated() -> None:
    layer, x = experts_case(256, hidden=128, inner=192)
    args, found = (x, any_experts(layer, 256)), []
    with grouped_units():
        for emulate in (True, False):
            torch._dynamo.reset()
            fn = compiled(layer, linears="rowwise", **{"linears.emulate": emulate, "saved.min_numel": 0})
            found.append(gradients(layer, fn, args))
    for name, value in found[0].items():
        assert (value - found[1][name]).norm() < 0.1 * value.norm(), name


def test_rows_of_no_one_count_for_nothing() -> None:
    """As with experts on several ranks: rows behind the last expert's may hold anything, also what is not finite."""

    class Tail(Grouped):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            kept = torch.arange(x.shape[0]) < ends[-1]
            rows = torch.where(kept.unsqueeze(-1), x, torch.inf)
            y = F.grouped_mm(rows, self.weight.transpose(1, 2), offs=ends)
            return torch.where(kept.unsqueeze(-1), y, 0)

    args = (rows_of(64), ends_at(16, 16, 40, 50))
    for emulate in (True, False):
        torch._dynamo.reset()
        with grouped_units():
            model = Tail()
            grads = gradients(model, compiled(model, linears="rowwise", **{"linears.emulate": emulate}), args)
        assert grads["weight"].isfinite().all() and grads["weight"].any()


def test_a_layer_beside_16_bit_and_its_bytes() -> None:
    """Codes of gathered tokens and of the gated product are made again in the backward: FP8 keeps no more than 16 bit."""
    layer, x = experts_case(512, hidden=128, inner=192, experts=8)
    args, found, kept = (x, any_experts(layer, 512)), {}, {}
    for linear in ("off", "rowwise"):
        torch._dynamo.reset()
        fn = compiled(layer, linears=linear, **{"linears.emulate": linear != "off", "saved.min_numel": 0})
        found[linear], kept[linear] = gradient_sqnr(layer, fn, args), kept_bytes(layer, fn, args)
    assert kept["rowwise"] == kept["off"]
    assert min(found["rowwise"].values()) > 22 and min(found["off"].values()) > 36, found


def test_sizes_that_vary() -> None:
    model = Grouped()
    fn = torch.compile(
        model, backend="fp8compile", dynamic=True, options={"debug.codegen": "eager", "linears.emulate": True}
    )
    for tokens in (48, 80):
        args = (rows_of(tokens), ends_at(10, 10, 30, tokens))
        assert min(gradient_sqnr(model, fn, args).values()) > ROUNDED


def test_code_is_generated_for_them() -> None:
    layer, x = experts_case()
    args = (x, any_experts(layer, 128))
    ours = gradients(
        layer, compiled(layer, **{"linears.emulate": True, "saved.min_numel": 0, "debug.codegen": "inductor"}), args
    )
    torch._dynamo.reset()
    node_by_node = gradients(layer, compiled(layer, **{"linears.emulate": True, "saved.min_numel": 0}), args)
    for name, value in ours.items():
        assert (value - node_by_node[name]).norm() < 0.1 * value.norm(), name


def test_experts_stored_the_other_way() -> None:
    """[E, K, N] as it is multiplied, as gpt-oss has it."""

    class Other(Grouped):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(self.weight.detach().transpose(1, 2).contiguous())

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                parts = zip(torch.tensor_split(x, ends[:-1].long()), self.weight, strict=True)
                return torch.cat([part @ w for part, w in parts])
            return F.grouped_mm(x, self.weight, offs=ends)

    with grouped_units():
        for emulate in (True, False):
            torch._dynamo.reset()
            model = Other()
            fn = compiled(model, linears="rowwise", **{"linears.emulate": emulate})
            assert min(gradient_sqnr(model, fn, (rows_of(64), ends_at(7, 20, 21, 64))).values()) > ROUNDED
            assert len(fp8compile.report(fn).linears) == 3
