"""State dicts: encoded plain tensors out; our own, torch.optim's or another format's in; all of it or nothing.

    exp_avg.e4m3_expanded.codes      state, format, part: a state says itself how it is stored
    exp_avg                          a float tensor, as torch.optim has it
    step;  correction, master ...    of all optimizers; of 16-bit parameters (``low_bits``)

FP8 codes go out as bytes, over the same memory: gloo, NumPy and readers of flat files do not all know FP8. A state dict with
other entries is refused, so that AdamW's is not taken for Lion's. How states are stored is never taken from a state dict.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._arguments import is_number
from fp8compile._distributed import here, is_sharded, local_part, shard_like, viewed, why_not_here
from fp8compile.numerics.formats import FP8
from fp8compile.numerics.states.interface import StateCodec
from fp8compile.numerics.states.registry import stored_codec
from fp8compile.optim import checking, low_bits
from fp8compile.optim.interface import OptimizerShell

VERSION_KEY, VERSION = "fp8compile_state_version", 1
OUR_GROUP_KEYS = (VERSION_KEY, "state_format", "master")  # keys of a group that torch.optim does not know
# Keys whose values the loading optimizer keeps, as torch's AdamW does.
KEPT_GROUP_KEYS = (*OUR_GROUP_KEYS, "params", "param_names", "decoupled_weight_decay")
BESIDE_STATES = ("step", *low_bits.BESIDE_STATES)
UNCOUNTED = {"momentum_buffer"}  # with these states alone (SGD, Muon) torch.optim counts no steps
EMPTY = (
    "the state dict has an empty state for each parameter. That is what set_optimizer_state_dict makes of a flattened one "
    "if the optimizer has no states yet and parameters have gradients: call optimizer.zero_grad() before"
)

StateDict = dict[str, Any]


def fp8_as_uint8(states: Mapping[Any, StateDict]) -> dict[Any, StateDict]:
    """Parameters' states, with FP8 codes viewed as bytes."""
    return {
        key: {name: viewed(t, torch.uint8) if getattr(t, "dtype", None) in FP8 else t for name, t in state.items()}
        for key, state in states.items()
    }


def as_saved(optimizer: OptimizerShell, plain: StateDict) -> StateDict:
    """The state dict that torch.optim.Optimizer's ``state_dict`` returned, in the form that goes out."""
    states = fp8_as_uint8(plain["state"])
    for state in states.values():  # counts are elements of one tensor; flat files want tensors apart
        if (step := state.get("step")) is not None:
            state["step"] = step.clone()
    for group, packed in zip(optimizer.param_groups, plain["param_groups"], strict=False):  # hooks may change it
        for p, key in zip(group["params"], packed["params"], strict=False):
            if key in states:
                states[key] |= low_bits.extra_entries(p, states[key])
    return {**plain, "state": states}


def load(optimizer: OptimizerShell, state_dict: Mapping[str, Any]) -> None:
    """Check and convert all of a state dict, then take it over.

    Raises:
        ValueError: it does not fit; then nothing was changed.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"the state dict is a {type(state_dict).__name__}: pass what state_dict() gave")
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    states, saved_groups = _taken_apart(state_dict)
    groups = [_merged(optimizer, i, *pair) for i, pair in enumerate(_pairs(optimizer, saved_groups))]
    if (
        states
        and not any(states.values())
        and any(optimizer.update_of(p, group).states for group in groups for p in group["params"])
    ):
        raise ValueError(EMPTY)
    new: dict[Tensor, StateDict] = {}
    for group, theirs in zip(groups, saved_groups, strict=True):
        for p, key in zip(group["params"], theirs["params"], strict=True):
            if key in states and (made := _converted(optimizer, p, group, states.pop(key), key)):
                new[p] = made
    if states:
        raise ValueError(f"the state dict has states of parameters that are in none of its groups: {[*states][:5]}")
    for ours, group in zip(optimizer.param_groups, groups, strict=True):
        ours.update(group)  # in place, since others may hold these dicts
    optimizer.state.clear()
    optimizer.state.update(new)
    optimizer.clear_caches()
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _taken_apart(state_dict: Mapping[str, Any]) -> tuple[StateDict, list[StateDict]]:
    """States and groups, checked to have the types they must have."""
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        raise ValueError(
            "not the state dict of an optimizer: it has no dict 'state' and list 'param_groups'. A flattened one goes "
            "through torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    checking.check_saved_groups(groups)
    for key, state in states.items():
        if not isinstance(state, Mapping):
            raise ValueError(f"the state of parameter {key} is a {type(state).__name__}, not a dict of tensors")
    return dict(states), list(groups)


def _pairs(optimizer: OptimizerShell, saved: list[StateDict]) -> list[tuple[StateDict, StateDict]]:
    """Our groups with the saved ones, checked to have as many parameters each and a version that we can read."""
    groups = optimizer.param_groups
    cure = "build the optimizer with the groups that it was saved with"
    if len(groups) != len(saved):
        raise ValueError(f"the state dict has {len(saved)} parameter groups, this optimizer {len(groups)}: {cure}")
    for i, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        if len(ours["params"]) != len(theirs["params"]):
            counts = f"{len(theirs['params'])} parameters in the state dict, {len(ours['params'])} here"
            raise ValueError(f"group {i} has {counts}: {cure}")
        version = theirs.get(VERSION_KEY, VERSION)
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise ValueError(
                f"the state dict is of version {version}, this fp8compile reads up to {VERSION}: upgrade fp8compile, or "
                "save it with export_fp32_state_dict() where it was made"
            )
    return list(zip(groups, saved, strict=True))


def _merged(optimizer: OptimizerShell, index: int, ours: StateDict, theirs: StateDict) -> StateDict:
    """The saved options over ours, as in torch; but this optimizer decides how states are stored, and keeps its names."""
    group = ours | {k: deepcopy(v) for k, v in theirs.items() if k not in KEPT_GROUP_KEYS}
    try:
        optimizer.check_options(group)
        checking.check_values(group)
    except ValueError as error:
        raise ValueError(f"param_groups[{index}] of the state dict: {error}. Nothing was changed") from error
    return group


def _converted(
    optimizer: OptimizerShell, p: Tensor, group: StateDict, values: Mapping[str, Any], key: object
) -> StateDict:
    """One parameter's saved state in the form that this optimizer keeps; empty if there is none yet."""
    plan = optimizer.plan_of(p, group)
    states = plan.update.states
    # None: SGD's momentum before its first step
    known = {name: value for name, value in values.items() if value is not None or name != "momentum_buffer"}
    saved = CheckpointState(p, known, optimizer.names.names.get(id(p), f"parameter {key}"))
    if not known:
        return {}
    singles = plan.update.singles
    for name in known:
        if str(name).split(".")[0] not in (*BESIDE_STATES, *states, *singles):
            raise saved.error(f"it has {name}, and this optimizer keeps {', '.join(states) or 'no states'}")
        if known[name] is None:
            raise saved.error(f"its {name} is None")
    made: StateDict = {"step": saved.step(optional=set(states) <= UNCOUNTED)}
    for state, codec in plan.codecs:
        parts = saved.encoded(state, codec, signed=states[state])
        made |= zip(plan.part_keys(state), (shard_like(p, part) for part in parts), strict=True)
    made |= {name: saved.number(name) for name in singles}
    return made | low_bits.sharded(p, plan, low_bits.loaded(p, plan, saved))


@dataclass(frozen=True)
class CheckpointState:
    """The state of one parameter as it is loaded. Every method raises ValueError for what does not fit.

    Attributes:
        p: the parameter.
        values: the saved values, by key.
        name: the name of the parameter.
    """

    p: Tensor
    values: Mapping[str, Any]
    name: str

    def error(self, what: object) -> ValueError:
        return ValueError(
            f"state of {self.name}: {what}. Load the state dict of the same model and kind of optimizer, or leave this "
            "parameter's entry out, so that it starts anew. Nothing was changed"
        )

    def step(self, *, optional: bool) -> Tensor:
        """How many steps were taken; 1 where the number is optional and missing."""
        step = self.number("step", 1.0 if optional else None)
        if not 0 <= step.item() < torch.inf:
            raise self.error(f"its step is {step.item()}")
        return step

    def number(self, name: str, missing: float | None = None) -> Tensor:
        """A state that is one number, FP32; ``missing`` where it has none."""
        value = self.values.get(name, missing)
        is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not is_one and not is_number(value):
            raise self.error(f"it has no {name}" if value is None else f"its {name} is {value!r}, not a number")
        found = torch.as_tensor(value, dtype=torch.float32).detach().reshape(()).clone()
        return found.to(local_part(self.p).device)

    def encoded(self, state: str, codec: StateCodec, *, signed: bool) -> tuple[Tensor, ...]:
        """This rank's part of a state, in the codec's parts; not encoded again if it was stored by the same codec."""
        stored = self._codec_of(state, signed)
        if stored == codec:
            return tuple(self._mine(part) for part in self._parts(state, codec, signed))
        return codec.encode(self._decoded(state, stored, signed))

    def _decoded(self, state: str, stored: StateCodec | None, signed: bool) -> Tensor:
        """This rank's part of a state, in FP32."""
        if stored is None:
            return self.mine(state, torch.float32, signed)
        parts = self._parts(state, stored, signed)
        if any(map(is_sharded, parts)):
            return stored.decode([self._mine(part) for part in parts], local_part(self.p).shape)
        device = local_part(self.p).device
        return self._mine(stored.decode([part.to(device) for part in parts], self.p.shape))

    def _codec_of(self, state: str, signed: bool) -> StateCodec | None:
        """The codec that a saved state is stored by; None for a plain tensor."""
        ways = {key.split(".")[1] if "." in key else None for key in self.values if key.split(".")[0] == state}
        if len(ways) != 1:
            found = "in several formats" if ways else f"not among {', '.join(self.values)}"
            raise self.error(f"{state} is {found}")
        [fmt] = ways
        try:
            return None if fmt is None else stored_codec(fmt, signed=signed)
        except ValueError as error:
            raise self.error(f"{state}: {error}") from error

    def _parts(self, state: str, codec: StateCodec, signed: bool) -> list[Tensor]:
        """The saved parts of a state, checked to have possible shapes, dtypes and values."""
        prefix = f"{state}.{codec.name}."
        found = {key.removeprefix(prefix) for key in self.values if key.startswith(prefix)}
        if found != {*codec.parts}:
            raise self.error(f"{state} has {', '.join(sorted(found))}, and {codec.name} is {', '.join(codec.parts)}")
        layouts = stored_as(codec, self.p.shape)  # type: ignore[arg-type]  # codecs are frozen dataclasses
        parts = zip(codec.parts, layouts, strict=True)
        return [self._sound(f"{prefix}{part}", part, *layout, signed) for part, layout in parts]

    def _sound(self, key: str, part: str, shape: torch.Size, dtype: torch.dtype, signed: bool) -> Tensor:
        """A value that is checked: its shape, its dtype, and that every element is possible."""
        value = self._checked(key, shape, dtype)
        if reason := checking.why_no_state(part, value, signed=signed):
            raise self.error(f"{key} {reason}")
        return value

    def _checked(self, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        value = self.values[key]
        if isinstance(value, Mapping):  # what torch puts in for a key that it does not find
            raise self.error(
                f"{key} is not there: flatten_optimizer_state_dict=True finds this optimizer's formats only"
            )
        if isinstance(value, Tensor) and value.dtype == torch.uint8 and dtype in FP8:
            value = viewed(value, dtype)
        if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
            found = f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise self.error(f"{key} is {found}, and {dtype} {[*shape]} fits the parameter")
        if reason := why_not_here(self.p, value):
            raise self.error(f"{key} is {reason}")
        return value

    def mine(self, key: str, dtype: torch.dtype, signed: bool = True) -> Tensor:
        """This rank's part of a value of the parameter's shape, in ``dtype``; for a float any float dtype is accepted."""
        value = self.values[key]
        is_float = isinstance(value, Tensor) and value.is_floating_point() and dtype.is_floating_point
        part, wanted = ("value", value.dtype) if is_float else (key, dtype)
        return self._mine(self._sound(key, part, self.p.shape, wanted, signed)).to(dtype)

    def _mine(self, value: Tensor) -> Tensor:
        """This rank's part, in memory of its own."""
        return here(self.p, value).to(local_part(self.p).device, copy=True, memory_format=torch.contiguous_format)


@functools.cache
def stored_as(codec: StateCodec, shape: torch.Size) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of a codec's parts for a state of ``shape``."""
    with torch.device("meta"):
        return [(part.shape, part.dtype) for part in codec.encode(torch.empty(shape, dtype=torch.float32))]


def export_fp32(optimizer: OptimizerShell, plain: StateDict) -> StateDict:
    """The state dict with every state decoded, under torch.optim's keys; without the bits kept beside 16-bit parameters.

    ``plain`` is what torch.optim.Optimizer's ``state_dict`` returns.
    """
    states: dict[Any, StateDict] = {}
    for group, packed in zip(optimizer.param_groups, plain["param_groups"], strict=True):
        for p, key in zip(group["params"], packed["params"], strict=True):
            if state := optimizer.state.get(p):
                states[key] = low_bits.decoded_state(p, optimizer.plan_of(p, group), state)
    groups = [{k: v for k, v in group.items() if k not in OUR_GROUP_KEYS} for group in plain["param_groups"]]
    return {**plain, "state": states, "param_groups": groups}
