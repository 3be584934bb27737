"""Whether the report tells of every linear of a model: each product in FP8, or left with a reason.

The linears are the modules ``nn.Linear`` and transformers' ``Conv1D`` that run in a forward, by module path. Each has a
forward product, a wgrad where its weight is trained, and a dgrad where its input needs a gradient.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.reporting.entries import Linear, Skip


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one matrix product with a weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def products_due(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, collections.Counter[str]]:
    """For every linear that runs in ``run(model)``, by path: how often each of its products is due. Runs a copy."""
    model = copy.deepcopy(model)
    due: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def count(path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del output
            found = {"forward": True, "dgrad": args[0].requires_grad, "wgrad": _weight(module).requires_grad}
            due[path].update(direction for direction, wanted in found.items() if wanted)

        return hook

    for path, module in model.named_modules():
        if is_linear(module):
            module.register_forward_hook(count(path))
    run(model)
    return dict(due)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def products_told(linears: Sequence[Linear | Skip]) -> dict[str, collections.Counter[str]]:
    """For every module path in a report: how often each product is told of."""
    told: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for entry in linears:
        told[entry.origin.module][entry.direction] += 1
    return dict(told)


@dataclass(frozen=True)
class Account:
    """What is due beside what the report tells; ``differences`` is empty where the two agree."""

    due: dict[str, collections.Counter[str]]
    linears: tuple[Linear, ...]
    left: tuple[Skip, ...]

    @property
    def differences(self) -> dict[str, str]:
        """By path: products that are due and not told of, or the other way round."""
        told = products_told((*self.linears, *self.left))
        return {
            path: f"due {dict(self.due.get(path, {}))}, told {dict(told.get(path, {}))}"
            for path in sorted(self.due.keys() | told.keys())
            if self.due.get(path) != told.get(path)
        }

    def summary(self) -> dict[str, Any]:
        """For JSON: counts of linears and products, those left by reason, and the differences."""
        left = collections.Counter(x.reason for x in self.left)
        in_fp8 = {x.origin.module for x in self.linears}
        return {
            "linears_of_the_model": len(self.due),
            "linears_in_fp8": len(in_fp8),
            "linears_left": len({x.origin.module for x in self.left} - in_fp8),
            "products_in_fp8": dict(collections.Counter(x.formats for x in self.linears)),
            "products_left": dict(left),
            "differences": self.differences,
        }


def account(model: nn.Module, run: Callable[[nn.Module], Any], told: Sequence[Linear | Skip]) -> Account:
    """The account of what the report of a compilation of ``model`` says of its linears; ``run`` calls the model."""
    linears = tuple(entry for entry in told if isinstance(entry, Linear))
    left = tuple(entry for entry in told if isinstance(entry, Skip))
    with torch.enable_grad():
        return Account(products_due(model, run), linears, left)
