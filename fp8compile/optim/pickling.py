"""Copies and pickles of an optimizer: facts stored by an object's identity go along by parameter, FP8 as bytes.

torch.optim.Optimizer passes on only defaults, states and groups, and pickle does not know FP8. The copy of a parameter has
another ``id``, so its name, and the format that ``override`` asked for, would be lost.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fp8compile._distributed import viewed
from fp8compile.optim.checkpoint import fp8_as_uint8
from fp8compile.optim.interface import OptimizerShell
from fp8compile.optim.placement import Names

State = dict[str, Any]


def packed(optimizer: OptimizerShell, plain: State) -> State:
    """What ``__getstate__`` returns; ``plain`` is what torch's does."""
    parameters = [(p, group) for _, group, p in optimizer._parameters()]
    placements, names = optimizer._placements, optimizer.names.names
    return plain | {
        "state": fp8_as_uint8(optimizer.state),
        "dtypes": [(p, {name: t.dtype for name, t in state.items()}) for p, state in optimizer.state.items()],
        "names": [(p, names[id(p)]) for p, _ in parameters if id(p) in names],
        "_placements": {p: placements.get(p) or optimizer._placed(p, group) for p, group in parameters},
        "seed": optimizer.seed,
        "compiled": optimizer.compiled,
        "weight_codes": optimizer.weight_codes,
        "patterns": optimizer.patterns,
    }


def unpacked(state: State) -> State:
    """The attributes of the copy. Another state (``{"state": defaultdict(dict)}`` resets an optimizer) is taken as it is."""
    if "dtypes" not in state:
        return state
    dtypes, names = dict(state["dtypes"]), {id(p): name for p, name in state["names"]}
    states = {p: {name: viewed(t, dtypes[p][name]) for name, t in each.items()} for p, each in state["state"].items()}
    kept = {name: value for name, value in state.items() if name not in ("dtypes", "names")}
    return kept | {"state": defaultdict(dict, states), "_model_names": Names(names)}
