"""What a graph may spend so that less is kept for its backward (``Recipe.saved.max_cost``).

    "any"     whatever it takes
    a share   for each value, of the time in which its bytes could be made again (``price.py``)
    "auto"    "any" where the recipe asks for memory, the graph has checkpointed regions, or nobody knows the device's rates;
              elsewhere each code up to its worth, and all that is spent together up to

                  0.02 of the predicted step  +  half of what FP8 linears are predicted to save

Where time counts, what plain Inductor keeps and the backward could make again is kept unless that is worth it. From one
allowance, the fewest microseconds a byte first: values that are made again, which changes no numbers, then codes with what
is left. Each is chosen beside the codes that the others are expected to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, Node

from fp8compile.cost.device_rates import RATES, DeviceRates
from fp8compile.cost.op_cost import step_us
from fp8compile.fx.checkpointed import has_regions
from fp8compile.fx.graph import encoding_of, is_tensor
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.recipe.rates import device_name, rates_for
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.waterfall import UNPAID
from fp8compile.saved.price import Price, Prices
from fp8compile.saved.stored import Stored

WORTH = 1.0  # what "auto" allows a code: no longer than making its bytes again would take
SHARE = 0.02  # and all of them, of a step
OF_GAIN = 0.5  # and of what FP8 linears are predicted to save: the rest covers what the prediction is off by

UNKNOWN = (
    "saved.max_cost={:g} knows no rates of {}: name a device in Recipe.debug.device_rates ({}), "
    "or set saved.max_cost to 'any'"
)
SPENT = (
    f"{UNPAID}: {{:.3g}} us for {{}} bytes; the {{:.3g}} us that a step may take longer go to what costs less a byte"
)
FREE = Price(0.0, 0.0, 1)


def counts_time(ctx: Context, graphs: Sequence[Graph]) -> bool:
    """Whether it is asked what it takes to keep less of a graph, a joint one or two halves."""
    inputs = (n for graph in graphs for n in graph.find_nodes(op="placeholder") if is_tensor(n))
    device = next((n.meta["val"].device for n in inputs), torch.device("cpu"))
    allowed = _allowed(ctx.recipe, rates_for(device, ctx.recipe))
    return allowed != "any" and not (allowed == "auto" and (ctx.measures_saved or any(map(has_regions, graphs))))


def _allowed(recipe: Recipe, rates: DeviceRates | None) -> float | str:
    """``max_cost``, but "any" where "auto" comes to that in any graph."""
    if recipe.saved.max_cost != "auto":
        return recipe.saved.max_cost
    return "any" if recipe.asks_for_memory or rates is None else "auto"


@dataclass(frozen=True)
class _Option:
    """To keep less of a value: by making it again, else by codes. ``is_limited``: its time is taken from the allowance."""

    node: Node  # the backward's input
    price: Price
    is_made: bool
    is_limited: bool


class Allowance:
    """Of one graph's halves, as they are when it is made; a device's prices are found once."""

    def __init__(self, split: PartitionedGraph, ctx: Context) -> None:
        self._split, self._ctx = split, ctx
        self._graphs = split.fw.graph, split.bw.graph
        self._prices: dict[str, Prices] = {}

    def worth_making(self, chains: Mapping[Node, Sequence[Node]]) -> Mapping[Node, float]:
        """Which values the backward may make again, by its inputs, with the microseconds that each is predicted to take.

        Args:
            chains: for an input of the backward, the operations that would be repeated.
        """
        edges = [edge for edge in self._split.edges if edge.is_tensor]
        options = [each for edge in edges for each in self._options(edge, chains.get(edge.backward))]
        return {each.node: each.price.us for each in self._chosen(options) if each.is_made}

    def reasons_against(self, stored: Iterable[tuple[SavedTensor, Stored]]) -> Mapping[Node, str]:
        """For inputs of the backward whose codes would take longer than is allowed: why."""
        found, options = dict[Node, str](), list[_Option]()
        for edge, how in stored:
            allowed, rates = self._asked(edge)
            if allowed == "any":
                continue
            if rates is None:
                found[edge.backward] = UNKNOWN.format(allowed, device_name(_device(edge)), ", ".join(RATES))
                continue
            share = WORTH if isinstance(allowed, str) else allowed
            price = self._price_of_codes(edge, rates, keeps_sides=how.sides is not None)
            if price.pays(share):
                options.append(_Option(edge.backward, price, False, isinstance(allowed, str)))
            else:
                found[edge.backward] = price.reason(share, rates.name)
        left = {each.node: each.price for each in options}
        for each in self._chosen(options):
            del left[each.node]
        return found | {node: SPENT.format(price.us, price.saved, self._limit) for node, price in left.items()}

    def _options(self, edge: SavedTensor, chain: Sequence[Node] | None) -> Iterator[_Option]:
        allowed, rates = self._asked(edge)
        is_limited = allowed == "auto"
        if chain is not None:
            price = FREE if rates is None else self._prices_for(rates).of_making(edge, chain)
            if isinstance(allowed, str) or price.pays(allowed):
                yield _Option(edge.backward, price, True, is_limited)
        if rates is not None and is_limited and self._split.may_be_codes(edge) and not encoding_of(edge.forward):
            price = self._price_of_codes(edge, rates)
            if price.pays(WORTH):
                yield _Option(edge.backward, price, False, True)

    def _chosen(self, options: Iterable[_Option]) -> Iterator[_Option]:
        """One for each value: the fewest microseconds a byte first, as far as the allowance goes."""
        done, spent = set[Node](), 0.0
        for each in sorted(options, key=lambda option: (option.is_limited, option.price.rate)):
            us = max(0.0, each.price.us) if each.is_limited else 0.0
            if each.node not in done and (not us or spent + us <= self._limit):
                done.add(each.node)
                spent += us
                yield each

    @cached_property
    def _limit(self) -> float:
        """Microseconds that all that is "auto" may take longer; asked for where something has a price."""
        rates = next(iter(self._prices.values())).rates
        return max(0.0, SHARE * step_us(self._graphs, rates) + self._split.to_spend_us)

    @cached_property
    def _has_regions(self) -> bool:
        return any(map(has_regions, self._graphs))

    def _asked(self, edge: SavedTensor) -> tuple[float | str, DeviceRates | None]:
        recipe = self._recipe(edge)
        rates = rates_for(_device(edge), recipe)
        allowed = _allowed(recipe, rates)
        return "any" if allowed == "auto" and self._has_regions else allowed, rates

    def _recipe(self, edge: SavedTensor) -> Recipe:
        return self._ctx.recipe_at(edge.info.origin.module)

    def _price_of_codes(self, edge: SavedTensor, rates: DeviceRates, keeps_sides: bool = False) -> Price:
        return self._prices_for(rates).of(edge, self._recipe(edge).saved.group_size, keeps_sides)

    def _prices_for(self, rates: DeviceRates) -> Prices:
        if rates.name not in self._prices:
            self._prices[rates.name] = Prices(self._split, rates)
        return self._prices[rates.name]


def _device(edge: SavedTensor) -> torch.device:
    device: torch.device = edge.forward.meta["val"].device
    return device
