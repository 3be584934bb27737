"""Whether the codes of a value cost no more than the recipe allows (``Recipe.saved.max_cost``)."""

from __future__ import annotations

from fp8compile.cost.device_rates import RATES
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.rates import device_name, rates_for
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.price import Prices

UNKNOWN = (
    "saved.max_cost={:g} knows no rates of {}: name a device in Recipe.debug.device_rates ({}), "
    "or set saved.max_cost to 'any'"
)


class Allowance:
    """Prices of what a graph saves; each device's are found once."""

    def __init__(self, split: PartitionedGraph) -> None:
        self._split = split
        self._prices: dict[str, Prices] = {}

    def reason_against(self, edge: SavedTensor, recipe: Recipe) -> str | None:
        """Why codes of a value would take longer than the recipe allows; None where they do not."""
        allowed = recipe.saved.max_cost
        if isinstance(allowed, str):
            return None  # "any"
        device = edge.forward.meta["val"].device
        rates = rates_for(device, recipe)
        if rates is None:
            return UNKNOWN.format(allowed, device_name(device), ", ".join(RATES))
        if rates.name not in self._prices:
            self._prices[rates.name] = Prices(self._split, rates)
        price = self._prices[rates.name].of(edge, recipe.saved.group_size)
        return None if price.pays(allowed) else price.reason(allowed, rates.name)
