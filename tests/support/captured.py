"""Optimizers whose steps are captured: those of torch.optim with options that they are tried with, and ones of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.optim.captured_update import CapturedUpdate, captured_update

Move = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None]
SHAPE = (4, 6)
SLOW = {"lr": 0.1}  # moves a parameter far beyond its roundings
# By label: the class in torch.optim and its options. Each class that is captured, and each of its forms.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", SLOW | {"weight_decay": 0.1}),
    "AdamW": ("AdamW", SLOW),
    "AdamW amsgrad": ("AdamW", SLOW | {"amsgrad": True, "maximize": True}),
    "SGD": ("SGD", SLOW | {"weight_decay": 0.1}),
    "SGD momentum": ("SGD", SLOW | {"momentum": 0.9}),
    "SGD nesterov": ("SGD", SLOW | {"momentum": 0.9, "nesterov": True}),
    "SGD dampening": ("SGD", SLOW | {"momentum": 0.9, "dampening": 0.5}),
    "Adadelta": ("Adadelta", {"lr": 10.0}),
    "Adagrad": ("Adagrad", SLOW | {"lr_decay": 0.01, "initial_accumulator_value": 0.25}),
    "Adamax": ("Adamax", SLOW),
    "NAdam": ("NAdam", SLOW),
    "RAdam": ("RAdam", SLOW),
    "RMSprop": ("RMSprop", SLOW | {"momentum": 0.9}),
    "RMSprop centered": ("RMSprop", SLOW | {"centered": True}),
    "ASGD": ("ASGD", SLOW | {"t0": 5.0}),
    "Rprop": ("Rprop", SLOW),
    "Muon": ("Muon", SLOW | {"momentum": 0.5, "weight_decay": 0.5}),
}


def of_torch(label: str, parameters: Sequence[Tensor] | None = None) -> torch.optim.Optimizer:
    """One of ``CASES``, of a parameter of ``SHAPE`` where none is given."""
    name, options = CASES[label]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(
        parameters or [nn.Parameter(torch.ones(SHAPE))], **options
    )
    for group in made.param_groups:
        group.update({"foreach": False} if "foreach" in group else {})
    return made


class Own(torch.optim.Optimizer):
    """An optimizer of one's own: a function moves each parameter, ``move(p, g, state, group)``."""

    def __init__(self, parameters: Sequence[Tensor], move: Move, **options: Any) -> None:
        self.move = move
        super().__init__(parameters, {"lr": 0.1} | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, self.state[p], group)


def own(move: Move, shape: Sequence[int] = SHAPE, **options: Any) -> Own:
    return Own([nn.Parameter(torch.ones(tuple(shape)))], move, **options)


def update_of(optimizer: torch.optim.Optimizer) -> CapturedUpdate:
    """Of its first parameter."""
    group = optimizer.param_groups[0]
    return captured_update(optimizer, group, tuple(group["params"][0].shape))


def wide(p: Tensor, state: dict[str, Any], name: str = "v") -> Tensor:
    """The state of this name, zeros at first."""
    found: Tensor = state.setdefault(name, torch.zeros_like(p))
    return found


def at_step(
    update: CapturedUpdate, group: Mapping[str, Any], step: int, singles: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The numbers of one parameter's step, FP32, those of elements first, and its new one-number states."""
    numbers = [torch.as_tensor(each, dtype=torch.float64) for each in update.numbers(group)]
    before = {name: x.double()[None] for name, x in singles.items()}
    [row], new = update.of_step(numbers, torch.tensor([step], dtype=torch.float64), before)
    return row, new


def numbers_of(update: CapturedUpdate, group: Mapping[str, Any], t: int) -> dict[str, Tensor]:
    """The numbers of step ``t`` by name, 0-d, of a parameter without one-number states."""
    row, _ = at_step(update, group, t, {})
    return dict(zip((*update.names, *update.bound_names), row.unbind(), strict=True))
