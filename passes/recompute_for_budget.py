"""Numbers change as far as codes round: what is given up for memory is computed again, from values that came back from codes.

    Recipe(memory=0.5)    the peak of forward and backward, beyond parameters, at most half of what it is if nothing is
                          given up; or an integer, bytes; or "fit", what Recipe.memory.card_gib has left

Gradients of parameters count from where they are made (fp8compile/memory/timeline.py).

The default never repeats a matmul or attention. Under a budget it does, where that saves the most bytes per predicted
microsecond (fp8compile/memory/frontier.py), until the predicted peak is within the budget. Each operation is repeated
directly before what reads it first, so that one layer's values are alive at a time.

The peak is predicted at stored bytes: what ``encode_saved`` will store as codes counts as codes. A value that repeated
operations read may have to stay exact; that takes more bytes than predicted, and the report tells both.
Left as they are: what the forward returns (the caller has it), what is random, collectives, higher-order operators, custom
operators, values that a checkpoint policy says to save, what logits are made from again (passes/chunk_logits.py), values of
modules whose recipe has ``memory.budget=1.0``, and graphs with sizes that only a run knows.

A weight that is changed between forward and backward raises, as for any saved tensor, also where only a copy reads it.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile._text import human
from fp8compile.fx.graph import EXACT, NOT_STATIC, is_static, storage_root
from fp8compile.fx.ops import is_random_state
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.memory.fitting import Room, room_on
from fp8compile.memory.frontier import Frontier, State, chosen
from fp8compile.memory.placing import give_up
from fp8compile.memory.repeatable import Repeatable
from fp8compile.memory.timeline import Timeline
from fp8compile.recipe.context import Context
from fp8compile.recipe.rates import rates_or_assumed
from fp8compile.reporting.budget import Budget, Point
from fp8compile.reporting.entries import Notes, Recomputed
from fp8compile.saved.plan import plan_saved

NOT_WHOLE = "a graph break parts the model, and 'fit' has to see all of it: give Recipe.memory.budget in bytes"
NO_ROOM = (
    "does not fit at any budget: parameters and optimizer states take {held}, and gradients and the optimizer's step "
    "{update} more, of {card}"
)


def recompute_for_budget(split: PartitionedGraph, ctx: Context) -> Notes:
    """Give up saved values until the predicted peak is within the recipe's budget."""
    asked = ctx.recipe.memory.budget
    if not ctx.recipe.limits_memory:
        return Notes()
    if any(not is_static(node) and not is_random_state(node) for node in split.fw.graph.nodes):
        return Notes(budgets=(Budget(asked, reason=NOT_STATIC),))
    room = room_on(ctx.recipe.memory.card_gib, split) if asked == "fit" and ctx.recipe.memory.card_gib else None
    if room and (reason := _no_room(room, ctx)):
        return Notes(budgets=(Budget(asked, reason=reason),))
    rates = rates_or_assumed(split.inputs, ctx.recipe)
    repeatable = Repeatable(split)
    timeline = Timeline(split, plan_saved(split, ctx).nbytes)
    states = Frontier(split, repeatable, timeline, rates, lambda edge: _may_go(split, edge, ctx)).states()
    target = room.left if room else _target(asked, states[0].peak)
    state = chosen(states, target)
    entries = _entries(split, state)
    give_up(split, state)
    points = tuple(Point(s.saved, s.peak, s.us) for s in states)
    entry = Budget(asked, target, points, states.index(state), rates.name, held=room.held if room else 0)
    return Notes(recomputed=entries, budgets=(entry,))


def _target(asked: Any, peak: int) -> int:
    """The bytes that a fraction of a peak is, or bytes themselves."""
    return int(asked if asked > 1 else asked * peak)


def _no_room(room: Room, ctx: Context) -> str | None:
    """Why no budget would make the step fit, or why that is not known."""
    if not ctx.is_whole_model:
        return NOT_WHOLE
    if room.update <= room.left:
        return None
    return NO_ROOM.format(**{name: human(size) for name, size in room._asdict().items()})


def _may_go(split: PartitionedGraph, edge: SavedTensor, ctx: Context) -> bool:
    """Whether a value may go: the caller does not hold it; neither its module's recipe nor a checkpoint policy keeps it."""
    if split.belongs_to(edge.forward).startswith("output") or EXACT in storage_root(edge.forward).meta:
        return False
    if edge.forward.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return False
    return ctx.recipe_at(edge.info.origin.module).memory.budget != 1.0


def _entries(split: PartitionedGraph, state: State) -> tuple[Recomputed, ...]:
    """What is given up, with the names of the values that its copies are made from: kept ones, parameters, data."""
    again, found = set(state.repeated), []
    for edge in filter(lambda edge: edge.is_tensor, state.given_up(split)):
        waiting, seen, sources = [edge.forward], set[Node](), list[str]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            sources += [] if node in again else [node.name]
            waiting += node.all_input_nodes if node in again else []
        found.append(Recomputed(edge.info, tuple(sources), for_budget=True))
    return tuple(found)
