"""Statistics of a model's values, step by step: rows that compiled graphs or hooks fill.

    compiled graph  --backward-->  gradient of its slot  --add-->  current  --close(step)-->  history, first overflows

A row is what ``numerics.histogram.statistics`` returns. Nothing here waits for a device: ``current``, ``first`` and the
entries of ``history`` stay where the gradients are, until somebody reads them.

A loss scaler closes the steps of the observations it has taken over. Without a scaler they are closed after the step of a
torch optimizer that holds one of their parameters: a step is then an update, with all the backward passes since the previous
one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8compile.fx.extra_inputs import handed_to
from fp8compile.numerics import histogram
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import COLUMNS, INF, NAN

WEIGHT, ACTIVATION, DATA = "weight", "activation", "data"
REST = "all further gradients"  # StatisticsRow.op of a row that several values share, for want of rows
HISTORY = 256  # steps that are kept: 56 bytes a row and step


@dataclass(frozen=True)
class StatisticsRow:
    """Which values one row of statistics is about.

    Attributes:
        module: path of the module they are made in; of a weight's gradient, the weight's name.
        source: the user's source line.
        op: the aten operation that makes them; ``REST`` for a row that several gradients share.
        kind: "weight" (the gradient of a parameter), "activation" (an activation, or the gradient of one) or "data" (an
            input of the graph that is no parameter).
        direction: "forward" or "backward".
        dtype: e.g. "f16".
    """

    module: str
    source: str
    op: str
    kind: str
    direction: str
    dtype: str


class Observations:
    """The statistics of one compiled graph with one set of parameters, or of one model watched by hooks.

    Attributes:
        rows: what each row of the tensors below is about.
        current: float64 ``[rows, 7]``, what was seen since the last ``close``.
        history: ``(step, [rows, 7])`` of the last closed steps, oldest first.
        first: int64 ``[rows]``, the first closed step with an inf or NaN in that row, -1 where there was none.
        parameters: weak references to the parameters the graph reads.
        scaled: whether a loss scaler has taken over; it then closes the steps.
        listeners: called with these observations after each ``add``, and before a step is closed.
    """

    def __init__(
        self, rows: Sequence[StatisticsRow], device: torch.device, parameters: Iterable[Tensor] = ()
    ) -> None:
        self.rows = tuple(rows)
        self.current = torch.zeros(len(rows), len(COLUMNS), dtype=torch.float64, device=device)
        self.first = torch.full((len(rows),), -1, dtype=torch.int64, device=device)
        self.history: deque[tuple[int, Tensor]] = deque(maxlen=HISTORY)
        self.parameters = tuple(map(weakref.ref, parameters))
        self.step = 0
        self.additions = 0  # calls of add since the last close
        self.scaled = False
        self.listeners: list[Callable[[Observations], None]] = []
        _alive.append(weakref.ref(self, _alive.remove))

    def add(self, stats: Tensor) -> None:
        """Fold what one backward saw, ``[rows, 7]``, into ``current``."""
        self.current = histogram.fold(self.current, stats)
        self.additions += 1
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener(self)

    def close(self, step: int | None = None) -> Tensor:
        """End a step: ``current`` goes to the history under this number (by default the next one) and is returned."""
        step = self.step + 1 if step is None else step
        self.step = step - 1
        self._tell()
        self.step = step
        seen, self.current = self.current, torch.zeros_like(self.current)
        broken = (seen[:, INF] + seen[:, NAN] > 0) & (self.first < 0)
        self.first = torch.where(broken, self.step, self.first)
        self.history.append((self.step, seen))
        self.additions = 0
        return seen

    def saturate(self, on: bool) -> None:
        """A loss scaler takes over: ``on`` says whether FP16 gradients are clipped to the largest finite value from now on,
        where that is possible."""
        self.scaled = True

    def reads(self, parameters: Iterable[Tensor]) -> bool:
        """Whether it belongs to one of these parameters."""
        own = {id(p) for ref in self.parameters if (p := ref()) is not None}
        return any(id(p) in own for p in parameters)


class StatsSlot(Observations):
    """Observations that come out of a compiled graph (fp8compile/observe/slot.py).

    Attributes:
        indices: int64 ``[rows]``, where each of ``rows`` stands in what the graph returns.
        values: float64 ``[num_rows, 7]``, an input of the graph that it does not read; its gradient is the statistics.
        limit: 0-d float32, what the graph clips FP16 gradients to: inf, so not at all, until a loss scaler asks for it.
        names: the paths of ``parameters``, as in the rows of their gradients.
    """

    def __init__(
        self,
        rows: Mapping[int, StatisticsRow],
        num_rows: int,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        names: Iterable[str] = (),
    ) -> None:
        super().__init__(tuple(rows.values()), device, parameters)
        self.names = tuple(names)
        self.indices = torch.tensor(list(rows), dtype=torch.int64, device=device)
        self.values = torch.zeros(num_rows, len(COLUMNS), dtype=torch.float64, device=device, requires_grad=True)
        self.values.register_post_accumulate_grad_hook(handed_to(weakref.ref(self), _add_rows))  # type: ignore[no-untyped-call]
        self.limit = torch.full((), torch.inf, dtype=torch.float32, device=device)

    def parameters_seen(self) -> set[int]:
        """``id`` of the parameters whose gradients have a row, of their own or shared with others."""
        weights = [row for row in self.rows if row.kind == WEIGHT]
        counted, shared = {row.module for row in weights}, any(row.op == REST for row in weights)
        names = self.names or ("",) * len(self.parameters)  # without names: all of them
        named = zip(self.parameters, names, strict=True)
        return {id(p) for ref, name in named if (shared or name in counted or not name) and (p := ref()) is not None}

    def saturate(self, on: bool) -> None:
        super().saturate(on)
        self.limit.data.fill_(FP16_MAX if on else torch.inf)  # .data keeps the version: a backward may be under way


def _add_rows(slot: StatsSlot, stats: Tensor) -> None:
    slot.add(stats.index_select(0, slot.indices))


def _close_after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """An optimizer's step ends a step of the observations of what it trains, unless a loss scaler has taken them over."""
    added = [each for each in alive() if each.additions and not each.scaled]
    if added:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        read = [each for each in added if each.reads(trained)]
        step = 1 + max((each.step for each in read), default=0)
        for each in read:
            each.close(step)


# A compiled step traces its hooks, and Dynamo recreates the weak references of a traced hook as the objects they point to.
register_optimizer_step_post_hook(torch.compiler.disable(_close_after))  # type: ignore[no-untyped-call]

_alive: list[weakref.ref[Observations]] = []  # in the order in which they were made


def alive() -> list[Observations]:
    """All observations of this process whose graph or model still exists, oldest first."""
    return [each for ref in list(_alive) if (each := ref()) is not None]


def of_parameters(parameters: Iterable[Tensor]) -> list[Observations]:
    """All observations that belong to one of these parameters."""
    wanted = list(parameters)
    return [each for each in alive() if each.reads(wanted)]


def of_model(model: nn.Module) -> list[Observations]:
    """All observations of a model, compiled or watched by hooks."""
    return of_parameters(model.parameters())


def of_loss(loss: Tensor) -> list[Observations]:
    """All observations that the backward of ``loss`` will add to: those whose slot its autograd graph ends in."""
    slots = {id(each.values): each for each in alive() if isinstance(each, StatsSlot)}
    found: list[Observations] = []
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting and len(found) < len(slots):
        node = waiting.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in slots:
            found.append(slots[id(variable)])
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return found
