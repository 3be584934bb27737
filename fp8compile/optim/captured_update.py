"""What an optimizer does to one parameter, from its captured step: a pure function on FP32 tensors.

update(p, g, states, n) -> (p, states)        n: numbers of the step, 0-d

capture  ->  operations on tensors alone  ->  proofs  ->  numbers of the step, apart from elements
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.optim.as_tensors import OnTensors, TakesNumbers
from fp8compile.optim.capture import Captured, Path, capture, fp32_by_default, numbers_in
from fp8compile.optim.initial_states import Initial, initial_states
from fp8compile.optim.proofs import Bounds, class_of, proven
from fp8compile.optim.short_forms import apart, is_elementwise, once, one_number_nodes, shortened
from fp8compile.optim.standing_in import NotCaptured, plain_class
from fp8compile.optim.step_bounds import Bound, bound_of

aten = torch.ops.aten
States = dict[str, Tensor]
STEP = "step"
COUNTS = "its state 'step' does not count steps"
OTHER_STATES = "its later steps have other states than its first: {}"
FROM_ALL = "its state {!r} is one number that is made from all elements"
OTHER_KIND = "its state {!r} becomes a tensor of another shape or dtype"


@dataclass(frozen=True)
class CapturedUpdate:
    """One parameter's update.

    Attributes:
        code: of ``elements``, which is what compiled code depends on.
        states: the states of the parameter's shape, and whether they are signed.
        exact: those of them that are not encoded, and why.
        singles: the states that are one number.
        initial: what states begin as.
        in_python: the states that the optimizer itself keeps as Python numbers.
        whole_tensor: whether elements depend on others.
        elements, scalars: see ``as_tensors.py``.
        captured, first: one step as it was captured, and the first where that is another.
        classes: bounds that the proofs assume of the group's numbers.
        names: of the numbers that ``n`` has.
        bound: of the largest step, where one is known.
        bound_names: of the bound's numbers, which ``n`` has too.
    """

    code: str
    states: Mapping[str, bool] = field(compare=False)
    exact: Mapping[str, str] = field(compare=False)
    singles: tuple[str, ...]
    initial: Mapping[str, float] = field(compare=False)
    in_python: tuple[str, ...] = field(compare=False)
    whole_tensor: bool
    elements: GraphModule = field(compare=False, repr=False)
    scalars: GraphModule = field(compare=False, repr=False)
    captured: Captured = field(compare=False, repr=False)
    first: Captured | None = field(compare=False, repr=False)
    classes: tuple[Bounds, ...] = field(compare=False)
    names: tuple[str, ...]
    bound: Bound | None
    bound_names: tuple[str, ...]

    def numbers(self, group: Mapping[str, Any]) -> list[float | Tensor]:
        """What ``of_step`` takes of a group: the captured numbers, and the bound's."""
        found = numbers_in(group)
        of_bound = self.bound.numbers(group).values() if self.bound else ()
        return [*(found[path] for path in self.captured.numbers), *of_bound]

    def holds(self, group: Mapping[str, Any]) -> bool:
        """Whether it is the update of this group too, whose numbers may have changed."""
        same = all(each.holds(group) for each in (self.captured, self.first) if each)
        return same and _classes(self.captured, group) == self.classes

    def of_step(
        self, numbers: Sequence[Tensor], step: Tensor, singles: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The numbers of a step for P parameters ``[P, n]``, FP32, and their new one-number states ``[P]``, FP64."""
        rows, new = self.rows_of_step(numbers, step, singles)
        return torch.stack(rows, -1) if rows else step.new_zeros(len(step), 0, dtype=torch.float32), new

    def rows_of_step(
        self, numbers: Sequence[Tensor], step: Tensor, singles: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each number for P parameters, ``[P]``, FP32, and their new one-number states.

        Args:
            numbers: the group's, 0-d, FP64.
            step: ``[P]``, FP64, which step it is, from 1.
            singles: the one-number states before it, ``[P]``, FP64.
        """
        captured, of_bound = numbers[: len(self.captured.numbers)], numbers[len(self.captured.numbers) :]
        made = self.scalars(*captured, step - 1, *(singles[name] for name in self.singles))
        needed, new = [*made[: len(self.names)], *of_bound], made[len(self.names) :]
        rows = [each.to(torch.float32).expand(step.shape) for each in needed]
        return rows, [each.expand(step.shape) for each in new]

    def __call__(self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor]) -> tuple[Tensor, States]:
        moved, *new = self.elements(p, g, *(states[name] for name in self.states), *(n[name] for name in self.names))
        return moved, dict(zip(self.states, new, strict=True))


@fp32_by_default()
def captured_update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    states: Mapping[str, Initial] | None = None,
) -> CapturedUpdate:
    """The update of a parameter of ``shape`` in ``group``: the way that torch.optim has for CUDA graphs where only that is
    element-wise.

    Args:
        states: what its states begin as, where that is known.

    Raises:
        NotCaptured: the reason.
    """
    shape = shape or (1,)
    states = states or initial_states(optimizer, group, shape)
    ways = (False, True) if "capturable" in group else (False,)
    whole: CapturedUpdate | None = None
    reason: NotCaptured | None = None
    for capturable in ways:
        try:
            found = _captured(optimizer, group, shape, states, capturable)
        except NotCaptured as error:
            reason = error
            continue
        if not found.whole_tensor:
            return found
        whole = whole or found
    if whole is None:
        assert reason is not None
        raise reason
    return whole


def _captured(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    states: Mapping[str, Initial],
    capturable: bool,
) -> CapturedUpdate:
    fixed: set[Path] = set()
    like = {name: each.like for name, each in states.items()}
    while True:
        captures = functools.partial(capture, optimizer, group, shape, capturable=capturable, fixed=frozenset(fixed))
        later = captures(like)
        if others := {*later.returned} ^ {*states}:
            raise NotCaptured(OTHER_STATES.format(", ".join(sorted(others))))
        first = captures({}) if any(each.value is None for each in states.values()) else None
        try:
            return _update(plain_class(optimizer), later, first, states, shape, group)
        except NotCaptured:
            raise
        except TakesNumbers as error:
            if not error.places:
                raise NotCaptured("an operation of its step takes a number of the step") from error
            fixed |= {later.numbers[i] for i in error.places}
        except Exception as error:
            raise NotCaptured(f"its step has an operation that is not known: {error}".splitlines()[0]) from error


def _update(
    kind: type[torch.optim.Optimizer],
    later: Captured,
    first: Captured | None,
    states: Mapping[str, Initial],
    shape: tuple[int, ...],
    group: Mapping[str, Any],
) -> CapturedUpdate:
    wide = [name for name in states if states[name].like.dim()]
    singles = [name for name in states if name not in wide and name != STEP]
    graph = _on_tensors(later, first, wide, singles, STEP in states, shape)
    inputs = graph.find_nodes(op="placeholder")
    count = len(later.numbers)
    numbers, before, ones = inputs[:count], inputs[count], inputs[count + 1 : count + 1 + len(singles)]
    p, g, *old = inputs[count + 1 + len(singles) :]
    outputs: Any = graph.output_node().args[0]
    new = dict(zip(wide, outputs[1:], strict=False))
    made = dict(zip((*singles, *([STEP] if STEP in states else [])), outputs[1 + len(wide) :], strict=True))
    if STEP in states and states[STEP].value not in (0, None):
        raise NotCaptured(COUNTS)
    one = one_number_nodes(graph, inputs[: count + 1 + len(singles)])
    for name in singles:
        if isinstance(made[name], Node) and made[name] not in one:
            raise NotCaptured(FROM_ALL.format(name))
    _check(p, new, made, before)
    classes = _classes(later, group)
    known = {**dict(zip(numbers, classes, strict=True)), before: (0.0, float("inf"))}
    below = {name for name, each in states.items() if each.value is not None and each.value < 0}
    facts = proven(graph, known, dict(zip(wide, old, strict=True)), new, below)
    shortened(graph, {*numbers, before, *ones}, facts.roots)
    elements, scalars, names = apart(graph, [*numbers, before, *ones], [p, g, *old], len(singles))
    initial = {name: each.value or 0.0 for name, each in states.items() if name != STEP}
    bound = bound_of(kind, group)
    return CapturedUpdate(
        elements.code,
        facts.signed,
        facts.exact,
        tuple(singles),
        initial,
        tuple(name for name, each in states.items() if each.in_python),
        not is_elementwise(elements.graph),
        elements,
        scalars,
        later,
        first,
        classes,
        names,
        bound,
        tuple(bound.numbers(group)) if bound else (),
    )


def _classes(captured: Captured, group: Mapping[str, Any]) -> tuple[Bounds, ...]:
    """Of the group's numbers; tensors are not read, and are taken to be in [0, 1)."""
    numbers = numbers_in(group)
    values = [numbers[path] for path in captured.numbers]
    return tuple(class_of(0.5 if isinstance(each, Tensor) else each) for each in values)


def _on_tensors(
    later: Captured, first: Captured | None, wide: list[str], singles: list[str], counts: bool, shape: tuple[int, ...]
) -> Graph:
    """One graph of both: numbers, the step before, one-number states, p, g, states -> p', states', one-number ones, step."""
    count = len(later.numbers)

    def step(*taken: Tensor) -> list[Any]:
        numbers, before, ones = taken[:count], taken[count], taken[count + 1 : count + 1 + len(singles)]
        p, g, *old = taken[count + 1 + len(singles) :]
        values = {**dict(zip(wide, old, strict=True)), **dict(zip(singles, ones, strict=True)), STEP: before}
        new = _run(later, numbers, p, g, [values[name] for name in later.states])
        if first is not None:
            begun = _run(first, numbers, p, g, [])
            new = {
                name: value if name == STEP else torch.where(before == 0, begun[name], value)
                for name, value in new.items()
            }
        return [new[name] for name in ("", *wide, *singles, *([STEP] if counts else []))]

    with private.FakeTensorMode():
        of_step = [torch.empty((), dtype=torch.float64) for _ in range(count + 1 + len(singles))]
        elements = [torch.empty(shape) for _ in range(2 + len(wide))]
        graph = private.make_fx(step, decomposition_table={})(*of_step, *elements).graph
    once(graph)
    return graph


def _run(captured: Captured, numbers: Sequence[Tensor], p: Tensor, g: Tensor, states: list[Tensor]) -> dict[str, Any]:
    moved, *new = OnTensors(captured.graph, len(numbers)).run(*numbers, p, g, *states)
    return {"": moved, **dict(zip(captured.returned, new, strict=True))}


def _check(p: Node, new: Mapping[str, Node], made: Mapping[str, Any], before: Node) -> None:
    """Raises NotCaptured for states that become something else."""
    wanted = p.meta["val"]
    for name, node in new.items():
        value = node.meta["val"]
        if value.shape != wanted.shape or value.dtype != torch.float32:
            raise NotCaptured(OTHER_KIND.format(name))
    counted = made.get(STEP)
    if STEP in made and not (
        isinstance(counted, Node) and counted.target is aten.add.Tensor and counted.args == (before, 1)
    ):
        raise NotCaptured(COUNTS)
