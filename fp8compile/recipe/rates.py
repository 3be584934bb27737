"""The rates of the device that a graph runs on, as a recipe says: predictions are made with them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from fp8compile.cost.device_rates import RATES, DeviceRates, rates_named
from fp8compile.fx.graph import is_tensor
from fp8compile.recipe.recipe import OF_THE_DEVICE, Recipe

ASSUMED = "h100"  # the device that times are predicted for where the graph runs on one that nothing is known of


def rates_for(device: torch.device, recipe: Recipe) -> DeviceRates | None:
    """The rates that a recipe names, else those of the device; None where there are none. With TF32 where torch allows it."""
    named = recipe.debug.device_rates
    found = rates_of(device) if named == OF_THE_DEVICE else RATES[named]
    return found.with_tf32 if found is not None and torch.backends.cuda.matmul.allow_tf32 else found


def rates_or_assumed(inputs: Iterable[Node], recipe: Recipe) -> DeviceRates:
    """The rates for the device that a graph's inputs are on; of a device without rates, those of ``ASSUMED``."""
    device = next((node.meta["val"].device for node in inputs if is_tensor(node)), torch.device("cpu"))
    return rates_for(device, recipe) or RATES[ASSUMED]


def device_name(device: torch.device) -> str:
    """What its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def rates_of(device: torch.device) -> DeviceRates | None:
    """The rates of a device; None where there are none, or where a graph is traced for a device that is not here."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return rates_named(torch.cuda.get_device_name(device)) if is_there else None
