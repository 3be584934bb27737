"""What a graph may spend so that less is kept: values made again, then codes, the fewest microseconds a byte first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.cost.device_rates import DeviceRates
from fp8compile.cost.op_cost import microseconds, step_us
from fp8compile.fx.graph import nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.recipe import rates
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.report import Report
from fp8compile.reporting.waterfall import UNPAID
from fp8compile.saved import allowance
from fp8compile.saved.price import ENCODE, SIDES, Price, Prices
from tests.support.graphs import joint_of, split_of
from tests.support.measure import compiled

SIZE, ROWS = 64, 256
# Bytes and operations a second: making codes costs more than nothing, and each is worth what it costs.
DEAR = DeviceRates("DEAR", copy=1.0, bf16=1e-3, fp8=1e-3, attention=1e-3, attention_backward=1e-3, gap=1.0)
KNOWN = {"linears": "off", "debug.device_rates": "h200"}


class Gated(nn.Module):
    """tanh(gate) * up, which the last product's wgrad reads: kept by plain Inductor beside gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "rates_of", lambda device: DEAR)


def case() -> tuple[nn.Module, Tensor]:
    return Gated().bfloat16(), torch.randn(ROWS, SIZE, dtype=torch.bfloat16)


def split(**options: object) -> PartitionedGraph:
    torch._dynamo.reset()
    return split_of(*case(), linears="off", **options)


def report() -> Report:
    torch._dynamo.reset()
    model, x = case()
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    fn(x).float().sum().backward()
    return fp8compile.report(fn)


def spent_elsewhere(found: Report) -> list[str]:
    reasons = [skip.reason for skip in found.notes.skipped("saved for backward")]
    return [r for r in reasons if r.startswith(UNPAID) and "go to what costs less a byte" in r]


def of_products(found: PartitionedGraph) -> list[str]:
    """What the backward keeps for its matmuls alone, as plain Inductor does."""
    return [e.forward.name for e in found.edges if e.is_tensor and storage_root(e.forward).name.startswith("mul")]


@pytest.mark.usefixtures("dear")
def test_nothing_is_spent_where_nothing_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "SHARE", 0.0)
    assert of_products(split(disabled="encode_saved")), "the gate's product is kept as plain Inductor keeps it"
    found = report()
    assert spent_elsewhere(found) and not found.saved


@pytest.mark.usefixtures("dear")
def test_with_enough_to_spend_all_that_is_worth_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "SHARE", 1e6)
    assert not of_products(split(disabled="encode_saved"))
    found = report()
    assert found.saved and not spent_elsewhere(found)


@pytest.mark.usefixtures("dear")
def test_the_fewest_microseconds_a_byte_first_and_no_more_than_the_limit() -> None:
    found, ctx = split(disabled="recompute_kept,encode_saved"), Context(Recipe(saved={"min_numel": 0}))
    nodes = [e.backward for e in found.edges if e.is_tensor][:3]
    prices = dict(zip(nodes, (Price(4.0, 9.0, 1), Price(2.0, 9.0, 1), Price(3.0, 9.0, 1)), strict=True))
    options = [allowance._Option(node, price, True, True) for node, price in prices.items()]
    for limit, expected in ((1.9, []), (2.0, [1]), (5.0, [1, 2]), (6.0, [1, 2]), (9.0, [1, 2, 0])):
        spends = allowance.Allowance(found, ctx)
        spends.__dict__["_limit"] = limit
        assert [nodes.index(each.node) for each in spends._chosen(options)] == expected
    free = [allowance._Option(nodes[0], prices[nodes[0]], True, False)]
    spends = allowance.Allowance(found, ctx)
    spends.__dict__["_limit"] = 0.0
    assert list(spends._chosen(free)) == free, "what a share allows is outside the limit"


@pytest.mark.usefixtures("dear")
def test_what_linears_save_may_be_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "SHARE", 0.0)
    found, ctx = split(disabled="recompute_kept,encode_saved"), Context(Recipe(saved={"min_numel": 0}))
    chains = {e.backward: [storage_root(e.forward)] for e in found.edges if e.forward.name in of_products(found)}
    assert chains and not allowance.Allowance(found, ctx).worth_making(chains)
    found.to_spend_us = 1e12
    assert set(allowance.Allowance(found, ctx).worth_making(chains)) == set(chains)


def test_of_what_linears_save_half_is_the_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = DeviceRates("FAST", copy=1e6, bf16=1e-3, fp8=1e3, attention=1.0, attention_backward=1.0, gap=0.0)
    monkeypatch.setattr(rates, "rates_of", lambda device: fast)
    options = {"linears": "auto", "linears.emulate": True}
    found = split_of(*case(), disabled="recompute_kept,encode_saved", **options)
    torch._dynamo.reset()
    saved = [x.us_in_its_dtype - x.us for x in fp8compile.explain(*case()[:1], case()[1:], recipe=options).linears]
    assert len(saved) >= 6 and found.to_spend_us == pytest.approx(sum(saved) / 2)


def test_making_a_value_for_a_product_reads_what_it_is_made_of_and_writes_it() -> None:
    found = split(disabled="recompute_kept,encode_saved,cut_for_bytes")
    (edge,) = (e for e in found.edges if e.forward.name in of_products(found))
    chain = [n for n in found.fw.graph.nodes if n.name.startswith(("tanh", "mul"))]
    one = DeviceRates("ONE", copy=1.0, bf16=1.0, fp8=1.0, attention=1.0, attention_backward=1.0, gap=0.0, lanes=1e9)
    price = Prices(found, one).of_making(edge, chain)
    whole = nbytes(edge.forward.meta["val"])
    assert price.us * 1e6 == pytest.approx(3 * whole), "the forward writes it in any case, for its own product"
    assert price.saved == whole and price.worth_us > 0
    assert Prices(found, one).of_making(edge, []).us == 0.0, "a view"


def test_keeping_sides_takes_instructions() -> None:
    found = split(disabled="encode_saved")
    edge = next(e for e in found.edges if storage_root(e.forward).op != "placeholder")
    slow = DeviceRates(
        "slow", copy=1e9, bf16=1.0, fp8=1.0, attention=1.0, attention_backward=1.0, gap=0.0, lanes=1e-6
    )
    with_sides, without = (Prices(found, slow).of(edge, SIZE, keeps_sides=sides).us for sides in (True, False))
    elements = edge.forward.meta["val"].numel()
    assert with_sides - without == pytest.approx(SIDES * elements / 1e-6 / 1e6, rel=1e-6)
    assert SIDES > ENCODE


def test_a_step_is_the_sum_of_its_operations() -> None:
    found = split(disabled="encode_saved")
    graphs = found.fw.graph, found.bw.graph
    each = [microseconds(n, DEAR) for graph in graphs for n in graph.nodes if n.op == "call_function"]
    assert step_us(graphs, DEAR) == pytest.approx(sum(each)) and len([us for us in each if us]) >= 9


@pytest.mark.parametrize(
    ("recipe", "cuts"),
    [
        ({}, True),
        (KNOWN, False),
        ({**KNOWN, "saved.max_cost": "any"}, True),
        ({**KNOWN, "memory.budget": 0.9}, True),
        ({**KNOWN, "saved.max_cost": 0.2}, False),
    ],
    ids=["rates unknown", "known", "any", "a budget", "a share"],
)
def test_plain_inductor_s_cut_stays_where_time_counts(recipe: dict[str, object], cuts: bool) -> None:
    made = Recipe.from_options({"linears": "off", **recipe})
    graph = joint_of(*case(), linears="off")
    assert ("cut_for_bytes" in [each.name for each in passes_on(On.CUT, Situation(Context(made), graph))]) is cuts


def test_bits_are_measured_for_all_that_a_budget_of_bytes_keeps() -> None:
    """A choice of bits asks for memory, and names values by their order: as many as where it is used."""
    found, known = split(disabled="encode_saved"), Recipe.from_options(KNOWN)
    graphs = found.fw.graph, found.bw.graph
    assert allowance.counts_time(Context(known), graphs)
    assert not allowance.counts_time(Context(known, measures_saved=True), graphs)
