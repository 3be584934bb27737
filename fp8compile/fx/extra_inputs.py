"""Extra inputs of a Dynamo graph, behind its own: tensors of ours go into compiled code, their gradients come out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.fx.graph import copy_with_attributes

T = TypeVar("T")


def with_inputs(
    gm: GraphModule, example_inputs: Sequence[Any], extra: Mapping[str, Tensor]
) -> tuple[GraphModule, Sequence[Any]]:
    """A copy of a Dynamo graph with an input for each of these tensors, by name, and its example inputs with theirs."""
    gm = copy_with_attributes(gm)
    fake_mode = private.detect_fake_mode(example_inputs)
    values = list(extra.values())
    if fake_mode is not None:
        values = [
            value if private.is_plain_fake(value) else fake_mode.from_tensor(value, static_shapes=True)
            for value in values
        ]
    last = gm.graph.find_nodes(op="placeholder")[-1]
    for name, value in zip(extra, values, strict=True):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(name)
        last.meta["example_value"] = value
        last._dynamo_source = None
    gm.recompile()
    return gm, [*example_inputs, *values]


def handed_to(owner: ReferenceType[T], take: Callable[[T, Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that moves a leaf's gradient to ``take(owner, gradient)``; it does not keep the owner alive."""

    def hand_over(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        alive = owner()
        if alive is not None and gradient is not None:
            with torch.no_grad():
                take(alive, gradient)

    return hand_over


def taken_at(node: Any, leaf: Tensor, owner: ReferenceType[T], take: Callable[[T, Tensor], None]) -> None:
    """Each time this autograd node has run, move the leaf's gradient to ``take(owner, gradient)``, even if nobody asked
    autograd for it; does not keep the owner alive."""
    place = next(i for i, (edge, _) in enumerate(node.next_functions) if getattr(edge, "variable", None) is leaf)

    def hand_over(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        alive, gradient = owner(), gradients[place]
        if alive is not None and gradient is not None:
            with torch.no_grad():
                take(alive, gradient.detach())
        return (*gradients[:place], None, *gradients[place + 1 :])

    node.register_hook(hand_over)


class ByParameters(Generic[T]):
    """What belongs to a compiled graph together with the parameters it is called with, found by the first of them.

    Compiled code is shared by all modules of the same code. ``make(parameters)`` is called once for each set of parameters.
    """

    def __init__(self, positions: Sequence[int], make: Callable[[list[Tensor]], T]) -> None:
        self.positions, self.make = tuple(positions), make
        self._known: dict[int, tuple[ReferenceType[Tensor] | None, T]] = {}

    def of(self, args: Sequence[Any]) -> T:
        """That of a call with these arguments."""
        first = args[self.positions[0]] if self.positions else None
        known = self._known.get(id(first))
        if known is not None and (known[0] is None or known[0]() is first):
            return known[1]
        self._known = {key: kept for key, kept in self._known.items() if kept[0] is None or kept[0]() is not None}
        made = self.make([args[i] for i in self.positions])
        self._known[id(first)] = (None if first is None else ref(first), made)
        return made
