"""``LossScaler.state_dict``: plain numbers, enough for the rest of a run to be the same bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fp8compile.amp.collapse import Limits
from fp8compile.amp.options import Options

VERSION = 1
NUMBERS = ("growth_factor", "backoff_factor", "growth_interval", "period", "threshold")
WATCHDOG = ("bad_in_a_row", "warned", *(each.name for each in fields(Limits)))
FIELDS = ("scale", "since", "small", "large", "quiet", "updates", "idle", "options", "history", "skipped", "watchdog")


def packed(options: Options, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with version and mode."""
    kept = {name: getattr(options, name) for name in NUMBERS} | {"bounds": options.bounds}
    return {"version": VERSION, "mode": options.mode, "options": kept, **numbers}


def checked(state: Mapping[str, Any], options: Options) -> Mapping[str, Any]:
    """The state, if it is one for a scaler of these options.

    Raises:
        ValueError: it is empty, or of another version or mode, or something is missing.
    """
    if not state:
        raise ValueError("the state is empty: it was saved from a scaler with enabled=False")
    if "version" not in state and "_growth_tracker" in state:
        raise ValueError(
            "the state is one of torch.amp.GradScaler: build LossScaler('dynamic', init_scale=state['scale'])"
        )
    if state.get("version") != VERSION:
        raise ValueError(f"the state has version {state.get('version')!r}, and this fp8compile reads {VERSION}: "
                         "load it with the fp8compile that saved it")  # fmt: skip
    if state.get("mode") != options.mode:
        raise ValueError(f"the state is of mode {state.get('mode')!r}, the scaler of {options.mode!r}: build "
                         f"LossScaler(mode={state.get('mode')!r})")  # fmt: skip
    nested = [(name, state.get(name) or {}) for name in ("options", "watchdog")]
    wanted = {"options": (*NUMBERS, "bounds"), "watchdog": WATCHDOG}
    missing = [name for name in FIELDS if name not in state]
    missing += [f"{outer}.{name}" for outer, inner in nested for name in wanted[outer] if name not in inner]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}: it is not what state_dict() returned")
    if not (isinstance(state["scale"], float) and 0 < state["scale"] < math.inf):
        raise ValueError(f"the state's scale is {state['scale']!r}: a positive finite number is needed")
    return state
