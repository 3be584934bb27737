"""Whether the codes of a value cost no more than the recipe allows (``Recipe.saved.max_cost``)."""

from __future__ import annotations

from functools import cached_property

from fp8compile.cost.device_rates import RATES
from fp8compile.fx.checkpointed import has_regions
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.recipe.rates import device_name, rates_for
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.price import Prices

WORTH = 1.0  # what "auto" allows: codes take no longer than making their bytes again would

UNKNOWN = (
    "saved.max_cost={:g} knows no rates of {}: name a device in Recipe.debug.device_rates ({}), "
    "or set saved.max_cost to 'any'"
)


class Allowance:
    """Prices of what a graph saves; each device's are found once."""

    def __init__(self, split: PartitionedGraph, ctx: Context) -> None:
        self._split = split
        self._measures = ctx.measures_saved  # every way to store a value, for a budget of bytes
        self._prices: dict[str, Prices] = {}

    def reason_against(self, edge: SavedTensor, recipe: Recipe) -> str | None:
        """Why codes of a value would take longer than the recipe allows; None where they do not."""
        allowed, device = recipe.saved.max_cost, edge.forward.meta["val"].device
        rates = rates_for(device, recipe)
        if allowed == "auto":
            allowed = "any" if rates is None or self._measures or self._asks_for_memory(recipe) else WORTH
        if isinstance(allowed, str):
            return None  # "any"
        if rates is None:
            return UNKNOWN.format(allowed, device_name(device), ", ".join(RATES))
        if rates.name not in self._prices:
            self._prices[rates.name] = Prices(self._split, rates)
        price = self._prices[rates.name].of(edge, recipe.saved.group_size)
        return None if price.pays(allowed) else price.reason(allowed, rates.name)

    def _asks_for_memory(self, recipe: Recipe) -> bool:
        return recipe.asks_for_memory or self._is_checkpointed

    @cached_property
    def _is_checkpointed(self) -> bool:
        return has_regions(self._split.fw.graph) or has_regions(self._split.bw.graph)
