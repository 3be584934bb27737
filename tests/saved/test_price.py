"""``Recipe.saved.max_cost``: costs and worths counted by hand, and what a recipe does with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.cost.device_rates import RATES, DeviceRates
from fp8compile.fx.graph import numel, storage_root
from fp8compile.recipe import rates
from fp8compile.reporting.report import Report
from fp8compile.reporting.waterfall import UNPAID
from fp8compile.saved.attention_result import is_read_by_attention, tokens_of
from fp8compile.saved.price import DECODE, ENCODE, Price, Prices
from tests.support.graphs import split_of
from tests.support.measure import compiled, llama_case
from tests.support.sources import ROOT

HIDDEN, HEADS, BATCH, TOKENS, GROUP = 64, 2, 2, 64, 64
ONE = DeviceRates(
    "ONE", copy=1.0, bf16=1.0, fp8=10.0, attention=1.0, attention_backward=1.0, gap=0.0
)  # bytes, operations
ELEMENTS = BATCH * TOKENS * HIDDEN


class Layer(nn.Module):
    """q is turned by a table (a generated kernel writes it), k and v are what products make."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.causal = causal

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (f(x).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q * table, k, v, is_causal=self.causal)
        return self.o(o.transpose(1, 2).reshape(x.shape))


def args() -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16)
    return x, torch.randn(TOKENS, HIDDEN // HEADS, dtype=torch.bfloat16)


def prices(rates: DeviceRates = ONE, causal: bool = True) -> dict[str, Price]:
    """Of operands by the name of the linear that makes them, and of the result as "o"."""
    found = split_of(Layer(causal).bfloat16(), *args(), linears="off", disabled="encode_saved")
    read = [e for e in found.edges if e.is_tensor and is_read_by_attention(e.backward)]
    large = [
        e for e in read if numel(e.forward.meta["val"]) == ELEMENTS and storage_root(e.forward).op != "placeholder"
    ]
    of = Prices(found, rates).of
    return {"o" if tokens_of(e.forward) else e.info.origin.module: of(e, GROUP) for e in large}


WHOLE, CODES = 2 * ELEMENTS, ELEMENTS + 2 * ELEMENTS // GROUP


def test_what_storing_moves() -> None:
    found = prices()
    turned = next(name for name in found if name not in ("k", "v", "o"))
    assert found[turned].us * 1e6 == pytest.approx(CODES + CODES + WHOLE), "written anyway, decoded to memory"
    for name in ("k", "v", "o"):
        assert found[name].us * 1e6 == pytest.approx(WHOLE + CODES + CODES + WHOLE), name
    assert {each.saved for each in found.values()} == {WHOLE - CODES}


def test_what_bytes_are_worth() -> None:
    share = (WHOLE - CODES) / WHOLE
    found, both_ways = prices(), prices(causal=False)
    for name in found.keys() - {"o"}:
        assert found[name].worth_us * 1e6 == pytest.approx(2 * HIDDEN * ELEMENTS * share), name
    assert found["o"].worth_us * 1e6 == pytest.approx(2 * TOKENS * ELEMENTS * share)
    assert both_ways["o"].worth_us * 1e6 == pytest.approx(4 * TOKENS * ELEMENTS * share)


def test_launches_take_time() -> None:
    gap = DeviceRates("gap", copy=1e9, bf16=1.0, fp8=1.0, attention=1.0, attention_backward=1.0, gap=3.0, lanes=1e9)
    assert sorted(round(each.us, 3) for each in prices(gap).values()) == [3.0, 6.0, 6.0, 6.0]


class Between(nn.Module):
    """A function between two linears: what the first makes is saved for it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def test_what_generated_kernels_alone_read_is_stored_for_nothing() -> None:
    found = split_of(
        Between(lambda x: F.gelu(x.exp2())), torch.randn(64, HIDDEN), linears="off", disabled="encode_saved"
    )
    (edge,) = (e for e in found.edges if storage_root(e.forward).op != "placeholder")
    price = Prices(found, ONE).of(edge, GROUP)
    assert price.pays(0.0) and price.us < 0.0
    assert price.us * 1e6 == pytest.approx(2 * (64 * HIDDEN * (1 + 2 / GROUP)) - 4 * 64 * HIDDEN)


def test_codes_of_a_kernel_that_waits_for_its_instructions_cost_theirs() -> None:
    found = split_of(
        Between(F.gelu).bfloat16(), torch.randn(64, HIDDEN).bfloat16(), linears="off", disabled="encode_saved"
    )
    (edge,) = (e for e in found.edges if storage_root(e.forward).op != "placeholder")
    slow = dataclasses.replace(ONE, lanes=0.1)
    assert Prices(found, slow).of(edge, GROUP).us * 1e6 == pytest.approx((ENCODE + DECODE) * 64 * HIDDEN / 0.1)


def test_what_is_read_by_a_norm_is_encoded_apart() -> None:
    """Plain Inductor writes the sum in the norm's kernel; groups are no rows, so that it is summed again for its codes."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x) + y))

    x, y = (torch.randn(64, HIDDEN).bfloat16() for _ in range(2))
    found = split_of(Normed().bfloat16(), x, y, linears="off", disabled="encode_saved")
    (edge,) = (e for e in found.edges if e.forward.name.startswith("add") and numel(e.forward.meta["val"]) > 64)
    whole, codes = 2 * 64 * HIDDEN, 64 * HIDDEN + 2 * 64
    us = Prices(found, ONE).of(edge, GROUP).us * 1e6
    assert us == pytest.approx(-whole + (2 * whole + codes) + (codes - whole)), "not written; made again; read"
    late = Prices(found, dataclasses.replace(ONE, gap=3.0)).of(edge, GROUP).us
    assert late == pytest.approx(us / 1e6 + 3.0), "one more launch"


@pytest.mark.parametrize(
    ("us", "worth", "share", "pays"),
    [
        (1.0, 2.0, 0.5, True),
        (1.0, 2.0, 0.4, False),
        (0.0, 0.0, 0.0, True),
        (-1.0, 0.0, 1.0, True),
        (1e-3, 9.0, 0.0, False),
    ],
)
def test_it_pays_where_it_costs_no_more_than_its_share(us: float, worth: float, share: float, pays: bool) -> None:
    assert Price(us, worth, 1).pays(share) == pays


# -------------------------------------------------------------------------------------------------- in a recipe


def report_of(**options: object) -> Report:
    torch._dynamo.reset()
    layer, inputs = llama_case(seq=64, hidden=128, ffn=344)
    fn = compiled(layer, **{"linears": "off", **options})
    fn(*inputs).float().sum().backward()
    return fp8compile.report(fn)


def left(report: Report) -> list[str]:
    return [skip.reason for skip in report.notes.skipped("saved for backward") if skip.reason.startswith(UNPAID)]


def test_small_layers_stay_in_16_bit_with_both_figures() -> None:
    found = report_of(**{"saved.max_cost": 1.0, "debug.device_rates": "h100"})
    reasons = left(found)
    assert len(reasons) >= 4, "q, k, v and the result"
    assert all("us, more than 1 of the" in r and "made again (predicted for H100)" in r for r in reasons)
    assert f"{UNPAID}: {len(reasons)} tensors, " in str(found) and 'saved.max_cost="any" stores them too' in str(
        found
    )
    assert found.saved, "what costs nothing is stored"


def test_what_is_worth_its_time_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = DeviceRates("slow", copy=1.0, bf16=1e-3, fp8=1e-3, attention=1e-3, attention_backward=1.0, gap=0.0)
    monkeypatch.setattr(rates, "rates_of", lambda device: slow)
    found = report_of(**{"saved.max_cost": 1.0})
    assert all(" the 0 us in which" in reason for reason in left(found)), "what comes into the graph has no product"
    assert report_of().saved_bytes <= found.saved_bytes < report_of(**{"saved.max_cost": 0.0}).saved_bytes


def test_a_module_may_pay_more() -> None:
    given = {"saved.max_cost": 0.0, "debug.device_rates": "h100"}
    stored = {each.info.origin.module for each in report_of(**given, modules={"v": {"saved.max_cost": "any"}}).saved}
    assert "v" in stored - {each.info.origin.module for each in report_of(**given).saved}


def test_by_default_codes_have_a_price_where_rates_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not left(report_of()), "nobody knows a CPU's"
    for found in (report_of(**{"debug.device_rates": "h100"}), _on_a_known_device(monkeypatch)):
        reasons = left(found)
        assert len(reasons) >= 4 and all("us, more than 1 of the" in r for r in reasons)


def _on_a_known_device(monkeypatch: pytest.MonkeyPatch) -> Report:
    with monkeypatch.context() as patched:
        patched.setattr(rates, "rates_of", lambda device: RATES["h100"])
        return report_of()


@pytest.mark.parametrize(
    "asked",
    [
        {"saved.max_cost": "any"},
        {"saved.format": "int8"},
        {"saved.format": "4bit"},
        {"memory.offload": "all"},
        {"memory.budget": 0.9},
    ],
    ids=str,
)
def test_who_asks_for_memory_gets_every_code(asked: dict[str, object]) -> None:
    found = report_of(**{"debug.device_rates": "h100", **asked})
    assert not left(found) and found.saved


def test_who_checkpoints_asks_for_memory_too() -> None:
    layer, inputs = llama_case(seq=64, hidden=128, ffn=344)
    for options in ({}, {"saved.max_cost": 1.0}):
        torch._dynamo.reset()
        fn = compiled(Checkpointed(layer, 128), **{"linears": "off", "debug.device_rates": "h100", **options})
        fn(*inputs).float().sum().backward()
        assert bool(left(fp8compile.report(fn))) == bool(options)


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, hidden: int) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(hidden, hidden, dtype=torch.bfloat16), layer

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return checkpoint(self.layer, self.first(x), *tables, use_reentrant=False)  # type: ignore[no-any-return]


def test_an_unknown_device_is_named() -> None:
    reasons = {skip.reason for skip in report_of(**{"saved.max_cost": 0.5}).notes.skipped("saved for backward")}
    assert any(
        r.startswith("saved.max_cost=0.5 knows no rates of cpu: name a device in Recipe.debug.device_rates")
        for r in reasons
    )


# ------------------------------------------------------------------------------------------------ in lowered layers


@pytest.mark.parametrize("layer", ["vit 16k", "bert 16k", "llama 16k"])
@pytest.mark.parametrize("pipeline", ["default", "`speed`", "storage alone, `speed`"])
def test_it_is_predicted_no_slower_than_plain_inductor_and_keeps_less(layer: str, pipeline: str) -> None:
    """Of kernels lowered for an H100 and disassembled, not of this file's guesses. What linears save goes to both."""
    rows = json.loads((ROOT / "benchmarks/results/layer-instructions-sm90-lowered.json").read_text())["rows"]
    found = {row["pipeline"]: row for row in rows if row["layer"] == layer}
    plain, ours = found["plain Inductor"], found[pipeline]
    times, kept = (1.02, 0.75) if "alone" in pipeline else (0.97, 0.85)
    assert ours["us"] + ours["matmuls_us"] <= times * (plain["us"] + plain["matmuls_us"])
    assert ours["kept"] <= kept * plain["kept"]
