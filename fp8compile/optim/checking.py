"""The checks of an optimizer's inputs, before anything is changed: arguments, parameter groups, gradients, states.

A ``ValueError`` names the value and what to do. ``check_options`` checks those of the arithmetic (``lr``, ``betas`` ...).
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile._arguments import FLAGS, check_one_of, is_count
from fp8compile._distributed import complete_grad, local_part
from fp8compile.numerics.formats import E4M3, E5M2
from fp8compile.optim.capture import numbers_in
from fp8compile.optim.formats import state_format_pair
from fp8compile.optim.interface import OptimizerShell
from fp8compile.optim.plan import MASTERS

NAN_FROM = {E4M3.dtype: 0x7F, E5M2.dtype: 0x7C}  # codes from here on, without their sign, are NaN or inf


def check_arguments(seed: object, compiled: object, overrides: object, weight_codes: object) -> None:
    """Check the arguments that every optimizer has in addition to those of its parameter groups."""
    if not (is_count(seed) and -(2**63) <= seed < 2**64):  # type: ignore[operator]
        raise ValueError(f"seed={seed!r}: a whole number of 64 bits is needed")
    check_one_of("compiled", compiled, FLAGS)
    check_one_of("weight_codes", weight_codes, FLAGS)
    check_formats(overrides)


def check_formats(overrides: object) -> None:
    """Check that ``overrides`` maps patterns to formats."""
    if overrides is None:
        return
    if not isinstance(overrides, Mapping) or not all(isinstance(pattern, str) for pattern in overrides):
        raise ValueError(f'overrides={overrides!r}: formats by patterns on names are needed, as {{"*.bias": "fp32"}}')
    for each in overrides.values():
        state_format_pair(each)


def check_overrides(patterns: Collection[str], names: Collection[str]) -> None:
    """Check that every pattern of ``overrides`` matches a parameter's name."""
    if patterns and not names:
        raise ValueError(
            f"overrides={[*patterns]} go by names, and these parameters have none: pass the model itself, or "
            "model.named_parameters()"
        )
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or sorted(names)[:3]
            raise ValueError(f"overrides: {pattern!r} matches no parameter; near it: {', '.join(near)}")


def check_group(optimizer: OptimizerShell, param_group: dict[str, Any]) -> None:
    """Check a parameter group that is about to be added. Parameters from an iterator are a list afterwards."""
    if not isinstance(param_group, dict):
        raise ValueError(f"a parameter group is a dict with 'params', not a {type(param_group).__name__}")
    if "params" not in param_group:
        raise ValueError(
            f"a parameter group without 'params': it has {', '.join(map(repr, param_group)) or 'nothing'}"
        )
    if isinstance(param_group["params"], Iterator):
        param_group["params"] = list(param_group["params"])
    check_options(optimizer, param_group)
    group = {**optimizer.defaults, **param_group}
    state_format_pair(group["state_format"])
    check_one_of("master", group["master"], MASTERS)
    optimizer.check_options(group)
    check_values(group)
    params = group["params"]
    several: Sequence[Any] = (
        [params] if isinstance(params, Tensor) else params if isinstance(params, list) else [*params]
    )
    for i, each in enumerate(several):
        named = isinstance(each, tuple) and len(each) == 2
        p = each[1] if named else each
        if isinstance(p, Tensor):  # torch says what is wrong with others
            optimizer.check_parameter(p, f"parameter {each[0]}" if named else in_group(group, i))


def check_options(optimizer: OptimizerShell, param_group: Mapping[str, Any]) -> None:
    """Raises ValueError for torch.optim's ways to run a step, which have no effect, and for a misspelt option."""
    kind, group = type(optimizer).__name__, {**optimizer.defaults, **param_group}
    for name in optimizer.refused_ways:
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r} has no effect: fp8compile's {kind} has one compiled step; leave it out"
            )
    for name in param_group.keys() - optimizer.defaults.keys() - {"params", "param_names"}:
        if near := difflib.get_close_matches(str(name), [*optimizer.defaults], n=1, cutoff=0.85):
            raise ValueError(f"a parameter group has {name!r}, which {kind} does not read: did you mean {near[0]!r}?")


def in_group(group: Mapping[str, Any], i: int) -> str:
    """For errors, which parameter of a group it is."""
    return f"parameter {group['param_names'][i]}" if "param_names" in group else f"parameter {i} of its group"


def check_values(group: Mapping[str, Any]) -> None:
    """Check options that are tensors, which ``check_options`` never reads: finite and not negative. Waits for the device."""
    for name in ("lr", "betas"):
        value = group.get(name)
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, Tensor) and not each.is_meta and not 0 <= float(each) < math.inf:
                raise ValueError(f"{name}={value!r}: at least 0 and finite is needed")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a number that is NaN, of an optimizer whose options are not known."""
    for (name, *_), value in numbers_in(group).items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name}={group[name]!r}: a number is needed")


@contextlib.contextmanager
def unchanged(mapping: dict[str, Any]) -> Iterator[None]:
    """Restores a dict if the body of the ``with`` statement fails."""
    before = dict(mapping) if isinstance(mapping, dict) else {}
    try:
        yield
    except BaseException:
        if before:
            mapping.clear()
            mapping.update(before)
        raise


def check_gradients(optimizer: OptimizerShell, parameters: Sequence[tuple[int, dict[str, Any], Tensor]]) -> None:
    """Raises RuntimeError for a gradient that no update here takes."""
    for index, _, p in parameters:
        if p.grad is None or (p.grad.layout == torch.strided and p.grad.is_floating_point()):
            continue
        name = optimizer.names.names.get(id(p), f"parameter {index}")
        if p.grad.layout != torch.strided:
            raise RuntimeError(
                f"{name} has a sparse gradient, which fp8compile.optim does not take: build the embedding with "
                "sparse=False, or give it to torch.optim.SparseAdam"
            )
        raise RuntimeError(f"{name} has a gradient of {p.grad.dtype}: a real floating-point one is needed")


@contextlib.contextmanager
def started(optimizer: OptimizerShell, parameters: Sequence[tuple[int, dict[str, Any], Tensor]]) -> Iterator[None]:
    """Gives states to all of these parameters; if the body fails, the new states are removed again."""
    new = [p for _, _, p in parameters if not optimizer.state.get(p)]
    try:
        for _, group, p in parameters:
            optimizer._start(p, group)
            complete_grad(p)
        yield
    except BaseException:
        for p in new:
            optimizer.state.pop(p, None)
        raise


def check_saved_groups(groups: Sequence[Any]) -> None:
    """Check that every group of a state dict lists its parameters, each of them once."""
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups):
        raise ValueError("the state dict has a parameter group without 'params', a list: pass what state_dict() gave")
    keys = [key for group in groups for key in group["params"]]
    twice = [key for i, key in enumerate(keys) if key in keys[:i]] if len({*keys}) < len(keys) else []
    if twice:
        raise ValueError(
            f"parameters {twice[:5]} stand twice in the state dict's groups: pass what state_dict() gave"
        )


def why_no_state(part: str, value: Tensor, *, signed: bool) -> str | None:
    """Why a tensor of a state dict cannot be this part of a state, although shape and dtype fit; None: it can.

    Args:
        part: as codecs call it: "codes", "amax", "inv_scale", "k" ...; "value" for a state that
            is not encoded; "correction" for the bits kept beside a 16-bit parameter.
        signed: whether the state may be negative.
    """
    x = local_part(value)
    if part == "codes":
        return _why_no_codes(x, signed)
    if part == "correction":
        return None  # each of its 256 values stands for something
    if part == "k":
        return "has a k of 0, and it is 1 to 255" if bool((x == 0).any()) else None
    x = x.float() if x.element_size() == 1 else x  # FP8 has neither isfinite nor <
    if not bool(torch.isfinite(x).all()):
        return "holds NaN or inf"
    if (part != "value" or not signed) and bool((x < 0).any()):
        return "holds negative numbers, and it never is"
    return None


def _why_no_codes(x: Tensor, signed: bool) -> str | None:
    if x.dtype in NAN_FROM:
        code_bytes = x.view(torch.uint8)
        if bool((code_bytes & 0x7F >= NAN_FROM[x.dtype]).any()):
            return "holds codes of NaN or inf"
        if not signed and bool((code_bytes > 0x80).any()):
            return "holds codes of negative numbers, and the state never is"
    if x.dtype == torch.int8 and bool((x == -128).any()):
        return "holds -128, which stands for nothing: codes are -127 to 127"
    return None
