"""The numbers of a step as compiled code reads them: FP32, a row for each parameter, computed for a whole group at once.

    numbers [P, n] of P parameters   <-   the group's floats, in double, and the step that each parameter is at

A parameter always has the same row, so that code which is prepared for it goes on. One-number states (NAdam's ``mu_product``)
are computed here too, and written behind the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._distributed import local_part
from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.compiled_numbers import fill

ALIGNED = 4  # FP32 numbers that a GPU loads at once
Several = list[Tensor]
Member = tuple[Tensor, Mapping[str, Any], CapturedUpdate, dict[str, Tensor]]  # parameter, its group, update, state


@dataclass
class ParameterRows:
    """Parameters of one group, update and device: their states, one-number states by name, and rows.

    Attributes:
        block: all rows as one tensor, where they lie one after the other.
        counts: ``[P]``, of which each ``step`` is an element, if ``join`` found or made it.
    """

    update: CapturedUpdate
    group: Mapping[str, Any]
    device: torch.device
    states: Sequence[dict[str, Tensor]]
    singles: Mapping[str, Several]
    rows: Several
    block: Tensor | None
    counts: Tensor | None = None

    def join(self) -> None:
        """Make the counts of steps elements of one tensor, which is faster to count, before code is prepared for them.

        Each begins where a GPU may load 16 bytes: code relies on that. Counts that are joined stay where they are, whichever
        parameters a later step has.
        """
        steps = [state["step"] for state in self.states]
        if all(step._base is None for step in steps):
            rows = steps[0].new_zeros(len(steps), ALIGNED)
            rows[:, 0] = torch.stack(steps)
            steps = [*rows[:, 0].unbind()]
            for state, step in zip(self.states, steps, strict=True):
                state["step"] = step
        base = steps[0]._base
        in_order = all(t._base is base and t.storage_offset() == ALIGNED * i for i, t in enumerate(steps))
        self.counts = None
        if base is not None and base.shape == (len(steps), ALIGNED) and in_order:
            self.counts = base[:, 0]

    def count(self) -> None:
        if self.counts is None:
            torch._foreach_add_([state["step"] for state in self.states], 1)
        else:
            self.counts.add_(1)

    def steps(self) -> Tensor:
        """``[P]``, how many each parameter has taken."""
        return torch.stack([state["step"] for state in self.states]) if self.counts is None else self.counts


def join(places: Sequence[ParameterRows]) -> None:
    """``ParameterRows.join`` of each, before code is prepared."""
    for place in places:
        place.join()


def count(places: Sequence[ParameterRows]) -> None:
    """One step more of each."""
    for place in places:
        place.count()


class StepNumbers:
    """Of one optimizer's parameters.

    Args:
        compiled: whether they are computed by one kernel on a GPU.
    """

    def __init__(self, *, compiled: bool = True) -> None:
        self._compiled = compiled
        self._rows: dict[Tensor, Tensor] = {}
        self._floats: dict[tuple[int, torch.device], tuple[Any, Tensor]] = {}
        self._pending: list[tuple[list[Tensor], list[Tensor]]] = []

    def row(self, p: Tensor, update: CapturedUpdate) -> Tensor:
        """FP32 ``[n]``, always the same tensor for a parameter as long as it has as many numbers."""
        known = self._rows.get(p)
        if known is None or known.shape[0] != len(update.names) + len(update.bound_names):
            [known] = _new_rows(1, update, local_part(p).device)
            self._rows[p] = known
        return known

    def keep(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Forget other groups, and parameters that are in none of these."""
        ids, parameters = {*map(id, groups)}, {p for group in groups for p in group["params"]}
        self._rows = {p: row for p, row in self._rows.items() if p in parameters}
        self._floats = {key: each for key, each in self._floats.items() if key[0] in ids}

    def compute(self, members: Sequence[Member]) -> list[ParameterRows]:
        """Fill the rows of these parameters for the step that follows; ``leave`` writes their one-number states."""
        places: dict[
            tuple[int, int, torch.device], list[Member]
        ] = {}  # equal groups, or updates, may differ in numbers
        for member in members:
            p, group, update, _ = member
            places.setdefault((id(group), id(update), local_part(p).device), []).append(member)
        found = [self._place(several, device) for (_, _, device), several in places.items()]
        self.again(found)
        return found

    def _place(self, several: Sequence[Member], device: torch.device) -> ParameterRows:
        _, group, update, _ = several[0]
        states = [state for _, _, _, state in several]
        singles = {name: [state[name] for state in states] for name in update.singles}
        parameters = [p for p, _, _, _ in several]
        if not any(p in self._rows for p in parameters):
            self._rows |= zip(parameters, _new_rows(len(parameters), update, device), strict=True)
        rows = [self.row(p, update) for p in parameters]
        return ParameterRows(update, group, device, states, singles, rows, block_of(rows))

    def again(self, places: Sequence[ParameterRows]) -> None:
        """``compute`` for the parameters that it returned these for, whose states are the same tensors."""
        self._pending.clear()
        for place in places:
            counts, singles = place.steps(), [*map(torch.stack, place.singles.values())]
            of_group = self._of_group(place.group, place.update, counts.device)
            into = place.block
            if into is None:
                into = torch.empty(len(place.rows), len(place.rows[0]), device=place.device)
            new = self._filled(into, place.update, of_group, counts, singles)
            if place.block is None:
                torch._foreach_copy_(place.rows, [*into.unbind()])
            for each, values in zip(place.singles.values(), new, strict=True):
                self._pending.append((each, [*values.to(torch.float32).unbind()]))

    def _filled(
        self, into: Tensor, update: CapturedUpdate, of_group: Tensor, counts: Tensor, singles: Several
    ) -> Several:
        """The numbers of the step that follows ``counts``, which may be on the host; the new one-number states."""
        if self._compiled and into.numel() and in_one_kernel(into, counts):
            return fill(into, update, of_group, counts, singles)
        before = dict(zip(update.singles, (each.double() for each in singles), strict=True))
        matrix, new = update.of_step([*of_group.unbind()], counts.double() + 1, before)
        into.copy_(matrix, non_blocking=True)
        return new

    def _of_group(self, group: Mapping[str, Any], update: CapturedUpdate, device: torch.device) -> Tensor:
        """The group's numbers, FP64, on the device; copied there again if one has changed."""
        values = update.numbers(group)
        known, there = self._floats.get((id(group), device), (None, torch.empty(0)))
        floats = update, tuple(None if isinstance(each, Tensor) else each for each in values)
        if known != floats:
            there = torch.tensor([each or 0.0 for each in floats[1]], dtype=torch.float64)
            there = there.to(device, non_blocking=True)
            self._floats[id(group), device] = floats, there
        if None not in floats[1]:
            return there
        return torch.stack(
            [
                each.detach().to(device, torch.float64).reshape(()) if isinstance(each, Tensor) else mine
                for each, mine in zip(values, there.unbind(), strict=True)
            ]
        )

    def leave(self) -> None:
        """Behind the step: write the one-number states that ``compute`` has computed."""
        for states, values in self._pending:
            torch._foreach_copy_(states, values)
        self._pending.clear()


def in_one_kernel(into: Tensor, counts: Tensor) -> bool:
    return into.device == counts.device and into.is_cuda


def width_of(count: int) -> int:
    """How far apart rows of so many numbers begin, each where a GPU may load 16 bytes."""
    return -(-count // ALIGNED) * ALIGNED


def _new_rows(several: int, update: CapturedUpdate, device: torch.device) -> Several:
    """Rows one after the other, each of which begins where a GPU may load 16 bytes."""
    count = len(update.names) + len(update.bound_names)
    return [*torch.empty(several, width_of(count), dtype=torch.float32, device=device)[:, :count].unbind()]


def block_of(rows: Several) -> Tensor | None:
    """Rows of one tensor, all at the same distance, as ``[P, n]``; None for others."""
    first, count = rows[0], rows[0].shape[0]
    width = width_of(count)
    begins = [first.data_ptr() + 4 * width * i for i in range(len(rows))]
    size = first.storage_offset() + width * (len(rows) - 1) + count
    if [row.data_ptr() for row in rows] != begins or first.untyped_storage().nbytes() < 4 * size:
        return None
    return first.as_strided((len(rows), count), (width, 1))
