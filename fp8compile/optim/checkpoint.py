"""State dicts: encoded plain tensors out; our own, torch.optim's FP32 or another format's in; all or nothing.

    own key      exp_avg.e4m3_expanded.codes     state, format, part: a state says itself how it is stored
    stock key    exp_avg                         an FP32 state, as torch.optim has it
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8compile.numerics.grouping import StateCodec
from fp8compile.numerics.state_codecs import state_codec
from fp8compile.optim.plan import Plan
from fp8compile.optim.sharding import distributed, like, local, part_shape

if TYPE_CHECKING:
    from fp8compile.optim.base import EncodedOptimizer

VERSION_KEY, VERSION = "fp8compile_state_version", 1
OURS = (VERSION_KEY, "state_format", "master")  # keys of a group that torch.optim does not know
KEEPS_P = ("master", "correction")


def load(optimizer: EncodedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Check and convert all of a state dict, then take it over.

    Raises:
        ValueError: it does not fit; nothing was changed then.
    """
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("not the state dict of an optimizer: it has no 'state' and 'param_groups'")
    groups = [_merged(optimizer, *pair) for pair in _pairs(optimizer, state_dict["param_groups"])]
    states = dict(state_dict["state"])
    new: dict[Tensor, dict[str, Any]] = {}
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for p, key in zip(group["params"], saved["params"], strict=True):
            if key in states:
                new[p] = _converted(optimizer, p, group, states.pop(key), key)
    if states:
        raise ValueError(f"the state dict has states of parameters that are in none of its groups: {sorted(states)[:5]}")
    optimizer.param_groups[:] = groups
    optimizer.state.clear()
    optimizer.state.update(new)
    optimizer.forget()
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _pairs(optimizer: EncodedOptimizer, saved: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        raise ValueError(f"the state dict has {len(saved)} parameter groups, this optimizer {len(groups)}")
    for i, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        if len(ours["params"]) != len(theirs["params"]):
            raise ValueError(
                f"group {i} has {len(theirs['params'])} parameters in the state dict, {len(ours['params'])} here"
            )
        if theirs.get(VERSION_KEY, VERSION) > VERSION:
            raise ValueError(
                f"the state dict is of version {theirs[VERSION_KEY]}, this fp8compile reads up to {VERSION}: upgrade it"
            )
    return list(zip(groups, saved, strict=True))


def _merged(optimizer: EncodedOptimizer, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The saved options over ours, but for how states are stored: that is for this optimizer to say."""
    known = {k: deepcopy(v) for k, v in theirs.items() if k in ours and k not in (*OURS, "params", "param_names")}
    group = {**ours, **known}
    optimizer.update_of(group)
    return group


def _converted(
    optimizer: EncodedOptimizer, p: Tensor, group: dict[str, Any], saved: Mapping[str, Any], key: object
) -> dict[str, Any]:
    """One parameter's saved state in the form that this optimizer keeps."""
    plan = optimizer.plan_of(p, group)
    where = f"state of {optimizer.names.names.get(id(p), f'parameter {key}')}"
    step = saved.get("step", 0.0)
    device = local(p).device
    made: dict[str, Any] = {"step": torch.as_tensor(step, dtype=torch.float32).detach().clone().to(device)}
    for state, codec in plan.codecs:
        own = dict(zip(plan.part_keys(state), codec.parts, strict=True))
        if own.keys() <= saved.keys():
            made |= {name: _fitting(distributed(p, saved[name]), p, codec, name, where) for name in own}
        else:
            made |= _encoded(p, plan, state, _fp32(p, state, saved, where))
    return made | _kept_of_parameter(p, plan, saved)


def _fitting(value: Tensor, p: Tensor, codec: StateCodec, name: str, where: str) -> Tensor:
    """A part as it is, if it has the shape and dtype that the codec gives a state of ``p``."""
    part = name.rsplit(".", 1)[1]
    with torch.device("meta"):
        wanted = dict(zip(codec.parts, codec.encode(torch.empty(local(p).shape)), strict=True))[part]
    if not isinstance(value, Tensor) or local(value).shape != wanted.shape or value.dtype != wanted.dtype:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
        raise ValueError(f"{where}: {name} is {found}, but {wanted.dtype} {tuple(wanted.shape)} fits the parameter")
    return value.detach().clone().to(local(p).device)


def _fp32(p: Tensor, state: str, saved: Mapping[str, Any], where: str) -> Tensor:
    """This rank's part of a saved state in FP32, whatever it was stored as."""
    if isinstance(saved.get(state), Tensor):
        whole = saved[state]
        if whole.shape != p.shape:
            raise ValueError(f"{where}: {state} has shape {tuple(whole.shape)}, the parameter {tuple(p.shape)}")
        return local(distributed(p, whole)).to(local(p).device, torch.float32)
    formats = {key.split(".")[1] for key in saved if key.startswith(f"{state}.")}
    if len(formats) != 1:
        raise ValueError(f"{where}: it has no {state}; it has {', '.join(map(str, saved)) or 'nothing'}")
    codec = state_codec(formats.pop(), signed=_is_signed(state))
    try:
        parts = [local(distributed(p, saved[f"{state}.{codec.name}.{part}"])) for part in codec.parts]
        value = codec.decode([each.to(local(p).device) for each in parts], local(p).shape)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{where}: {state} is not a whole {codec.name} state of shape {tuple(p.shape)}: {error}") from error
    return value


def _is_signed(state: str) -> bool:
    return state not in ("exp_avg_sq", "max_exp_avg_sq", "square_avg")


def _encoded(p: Tensor, plan: Plan, state: str, value: Tensor) -> dict[str, Tensor]:
    parts = zip(plan.part_keys(state), dict(plan.codecs)[state].encode(value), strict=True)
    return {name: like(p, part, part_shape(p, part)) for name, part in parts}


def _kept_of_parameter(p: Tensor, plan: Plan, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The correction or FP32 copy of a 16-bit parameter, from the saved one where it has the same."""
    fresh = {name: part for name, part in plan.initial(local(p)).items() if name in KEEPS_P}
    made = {}
    for name, part in fresh.items():
        value = saved.get(name)
        fits = isinstance(value, Tensor) and local(distributed(p, value)).shape == part.shape
        part = local(distributed(p, value)).detach().clone().to(part.device, part.dtype) if fits else part
        made[name] = like(p, part, part_shape(p, part))
    return made


def export_fp32(optimizer: EncodedOptimizer) -> dict[str, Any]:
    """The state dict with every state decoded, under torch.optim's keys."""
    plain = torch.optim.Optimizer.state_dict(optimizer)
    states: dict[Any, dict[str, Any]] = {}
    for index, group, p in optimizer._parameters():
        if optimizer.state.get(p):
            plan = optimizer.plan_of(p, group)
            here = {name: local(part) for name, part in optimizer.state[p].items()}
            decoded = plan.decoded(here, local(p).shape)
            states[index] = {"step": optimizer.state[p]["step"].clone()}
            states[index] |= {name: like(p, value, tuple(p.shape)) for name, value in decoded.items()}
    groups = [{k: v for k, v in group.items() if k not in OURS} for group in plain["param_groups"]]
    return {"state": states, "param_groups": groups}
