"""``Recipe.saved.attention="auto"``: costs and worths counted by hand, and what a recipe does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.cost.device_rates import RATES, DeviceRates
from fp8compile.fx.graph import numel, storage_root
from fp8compile.fx.partition import SavedTensor
from fp8compile.recipe import rates
from fp8compile.reporting.report import Report
from fp8compile.saved.attention_cost import Price, price_of
from fp8compile.saved.attention_result import is_read_by_attention, tokens_of
from tests.support.graphs import split_of
from tests.support.measure import compiled, llama_case

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


def edges(causal: bool = True, **options: Any) -> dict[str, SavedTensor]:
    """Operands by the name of the linear that makes them, and the result as "o"."""
    found = split_of(Layer(causal).bfloat16(), *args(), linears="off", disabled="encode_saved", **options)
    read = [e for e in found.edges if e.is_tensor and is_read_by_attention(e.backward)]
    large = [
        e for e in read if numel(e.forward.meta["val"]) == ELEMENTS and storage_root(e.forward).op != "placeholder"
    ]
    return {"o" if tokens_of(e.forward) else e.info.origin.module: e for e in large}


def prices(rates: DeviceRates = ONE, causal: bool = True) -> dict[str, Price]:
    return {name: price_of(edge, GROUP, rates) for name, edge in edges(causal).items()}


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
    gap = DeviceRates("gap", copy=1e9, bf16=1.0, fp8=1.0, attention=1.0, attention_backward=1.0, gap=3.0)
    assert sorted(round(each.us, 3) for each in prices(gap).values()) == [3.0, 6.0, 6.0, 6.0]


def test_what_generated_kernels_alone_read_is_stored_for_nothing() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x).exp2()))

    found = split_of(Gated(), torch.randn(64, HIDDEN), linears="off", disabled="encode_saved")
    (edge,) = (e for e in found.edges if storage_root(e.forward).op != "placeholder")
    price = price_of(edge, GROUP, ONE)
    assert price.pays == (price.us <= price.worth_us)
    assert price.us * 1e6 == pytest.approx(2 * (64 * HIDDEN * (1 + 2 / GROUP)) - 4 * 64 * HIDDEN)


@pytest.mark.parametrize(
    ("us", "worth", "pays"), [(1.0, 2.0, True), (2.0, 1.0, False), (0.0, 0.0, True), (-1.0, 0.0, True)]
)
def test_it_pays_where_it_costs_no_more_than_it_is_worth(us: float, worth: float, pays: bool) -> None:
    assert Price(us, worth, 1).pays == pays


def test_the_figures_in_the_module() -> None:
    h100 = RATES["h100"]
    saved, codes = 2 - (1 + 2 / 128), 1 + 2 / 128
    for moved, inner in ((2 * codes + 2, 1050), (2 * codes + 4, 1580)):
        assert moved / h100.copy * 2 / saved * h100.bf16 / 2 == pytest.approx(inner, rel=5e-3)
    assert (2 * codes + 4) / h100.copy * 2 / saved * h100.attention / 4 == pytest.approx(630, rel=1e-2)


# -------------------------------------------------------------------------------------------------- in a recipe


def report_of(**options: object) -> Report:
    torch._dynamo.reset()
    layer, inputs = llama_case(seq=64, hidden=128, ffn=344)
    fn = compiled(layer, **{"linears": "off", **options})
    fn(*inputs).float().sum().backward()
    return fp8compile.report(fn)


def left(report: Report) -> list[str]:
    return [skip.reason for skip in report.notes.skipped("saved for backward") if "does not pay" in skip.reason]


def test_small_layers_stay_in_16_bit_with_both_figures() -> None:
    found = report_of(**{"saved.attention": "auto", "debug.device_rates": "h100"})
    reasons = left(found)
    assert len(reasons) == 4, "q, k, v and the result"
    assert all("us to encode and decode" in r and "bytes are worth (predicted for H100)" in r for r in reasons)
    assert found.saved, "what is not attention's is stored"


def test_what_is_worth_its_time_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = DeviceRates("slow", copy=1.0, bf16=1e-3, fp8=1e-3, attention=1e-3, attention_backward=1.0, gap=0.0)
    monkeypatch.setattr(rates, "rates_of", lambda device: slow)
    found = report_of(**{"saved.attention": "auto"})
    assert not left(found)
    assert found.saved_bytes == report_of().saved_bytes < report_of(**{"saved.attention": False}).saved_bytes


def test_an_unknown_device_is_named() -> None:
    reasons = {skip.reason for skip in report_of(**{"saved.attention": "auto"}).notes.skipped("saved for backward")}
    assert any(
        r.startswith("saved.attention='auto' knows no rates of cpu: name a device in Recipe.debug.device_rates")
        for r in reasons
    )
