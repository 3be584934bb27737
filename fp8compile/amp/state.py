"""``LossScaler.state_dict``: plain numbers, enough for the rest of a run to be the same bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fp8compile._arguments import is_count, is_finite
from fp8compile.amp.collapse import Limits
from fp8compile.amp.options import ScalerOptions

VERSION = 1
COUNT = "a whole number, 0 or more,"
NUMBERS = ("growth_factor", "backoff_factor", "growth_interval", "period", "threshold")
WATCHDOG = ("bad_in_a_row", "warned", *(each.name for each in fields(Limits)))
FIELDS = ("scale", "since", "small", "large", "quiet", "updates", "idle", "options", "history", "skipped", "watchdog")


def packed(options: ScalerOptions, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with version and mode."""
    kept = {name: getattr(options, name) for name in NUMBERS} | {"bounds": options.bounds}
    return {"version": VERSION, "mode": options.mode, "options": kept, **numbers}


def checked(state: Mapping[str, Any], options: ScalerOptions) -> Mapping[str, Any]:
    """The state, if it is one for a scaler of these options.

    Raises:
        ValueError: it is empty, or of another version or mode, or something is missing.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}: the dict that state_dict() returned is needed")
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
    for name, inner in nested:
        _check(name, inner, isinstance(inner, Mapping), "a dict")
    wanted = {"options": (*NUMBERS, "bounds"), "watchdog": WATCHDOG}
    missing = [name for name in FIELDS if name not in state]
    missing += [f"{outer}.{name}" for outer, inner in nested for name in wanted[outer] if name not in inner]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}: it is not what state_dict() returned")
    if not (is_finite(state["scale"]) and state["scale"] > 0):
        raise ValueError(f"the state's scale is {state['scale']!r}: a positive finite number is needed")
    return state


@dataclass(frozen=True)
class LoadedState:
    """The checked values of a state: loading them cannot fail half way."""

    options: ScalerOptions
    numbers: dict[str, float]
    history: list[tuple[int, float]]
    skipped: int
    watchdog: dict[str, Any]
    updates: int
    idle: bool | None


def loaded(state: Mapping[str, Any], options: ScalerOptions) -> LoadedState:
    """The state for a scaler of these options; it keeps the ``kinds`` and ``modules`` of the options.

    Raises:
        ValueError: it does not fit, or has an impossible value; the message names the entry.
    """
    state = checked(state, options)
    _check_types(state)
    scale, kept = float(state["scale"]), state["options"]
    try:
        own = {name: kept[name] for name in NUMBERS}
        floor, ceiling = kept["bounds"]
        new = replace(options, init_scale=scale, floor=floor, ceiling=ceiling, **own)
        Limits(**{each.name: state["watchdog"][each.name] for each in fields(Limits)})
    except ValueError as error:
        raise ValueError(f"the state's options cannot be: {error}. Nothing was changed") from error
    numbers = {"scale": scale, **{name: state[name] for name in ("since", "small", "large", "quiet")}}
    history = [(int(step), float(value)) for step, value in state["history"]]
    watchdog = {"acknowledged": 0, **state["watchdog"]}
    return LoadedState(new, numbers, history, state["skipped"], watchdog, state["updates"], state["idle"])


def _check_types(state: Mapping[str, Any]) -> None:
    watchdog = state["watchdog"]
    for name in ("bad_in_a_row", "warned"):
        _check(f"watchdog.{name}", watchdog[name], is_count(watchdog[name]) and watchdog[name] >= 0, COUNT)
    known = watchdog.get("acknowledged", 0)
    _check("watchdog.acknowledged", known, is_count(known) and known >= 0, COUNT)
    for name, low in (("since", 0), ("quiet", -1), ("updates", 0), ("skipped", 0)):
        _check(name, state[name], is_count(state[name]) and state[name] >= low, f"a whole number, {low} or more,")
    for name in ("small", "large"):
        _check(name, state[name], is_finite(state[name]) and state[name] >= 0, "a finite number, 0 or more,")
    _check("idle", state["idle"], state["idle"] is None or isinstance(state["idle"], bool), "True, False or None")
    bounds = state["options"]["bounds"]
    _check("options.bounds", bounds, isinstance(bounds, (list, tuple)) and len(bounds) == 2, "(floor, ceiling)")
    history = state["history"]
    _check("history", type(history).__name__, isinstance(history, (list, tuple)), "a list of (update, scale)")
    for i, each in enumerate(history):
        is_pair = isinstance(each, (list, tuple)) and len(each) == 2 and is_count(each[0])
        _check(f"history[{i}]", each, is_pair and is_finite(each[1]) and each[1] >= 0, "(update, scale)")


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise ValueError(f"the state's {name} is {value!r}: {wanted} is needed. Load what state_dict() returned; nothing "
                         "was changed")  # fmt: skip
