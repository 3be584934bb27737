"""Runs a program eagerly and under the backend's arms, and says what is wrong.

Arms: "default" is the default recipe; "stored" the same storage with groups of 32 and every tensor, however small;
"everything" adds FP8 linears, emulated; "budget" encodes nothing and makes again in the backward what lowers the peak.
All of them run the rewritten graph node by node (``debug.codegen="eager"``).

A value passes at ``bar`` dB against eager, or where the same dtype without any rewrite (preset "off") is within 3 dB of it:
then it is the program that amplifies rounding, not the storage. "everything" is held to its FP8 linears alone in the same
way: what their products' error (31.8 dB an operand, two operands, gradients in E5M2 6 dB less) becomes is theirs.
Where eager is finite a value is finite; where eager raises the arm raises; where PyTorch's own ``aot_eager`` declines, so may
the arm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference import sqnr_db
from tests.sweeps.registry import Program, Run, Values, tensors

EAGER = {"debug.codegen": "eager"}
EVERY = {**EAGER, "saved.min_numel": 0, "saved.group_size": 32}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "default": EAGER,
    "stored": {**EVERY, "linears": "off"},
    "everything": {**EVERY, "linears.emulate": True},
    "budget": {**EAGER, "preset": "off", "memory": 0.0},
}
ALONE: Mapping[str, Mapping[str, Any]] = {
    "off": {**EAGER, "preset": "off"},
    "linears": {**EAGER, "linears": "tensorwise", "saved": "off", "linears.emulate": True},
}
NOISE_OF: Mapping[str, tuple[str, ...]] = {
    "default": ("off",),
    "stored": ("off",),
    "everything": ("off", "linears"),
    "budget": ("off",),
}
CHANGED = (
    "modified by an inplace operation"  # "budget" may raise it: a copy reads a weight that nothing else reads again
)
NOISE = 3.0  # dB: half the power of a value's error may be the program's own


@dataclass(frozen=True)
class Outcome:
    """What a run left behind, or the exception it ended in."""

    values: Mapping[str, Tensor | None]
    error: Exception | None = None


def outcome(program: Program, arm: str | None) -> Outcome:
    """Run ``program`` from scratch: eagerly (None), by the backend's arm, or by "aot_eager"."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = program.model()
    inputs = tuple(make() for make in program.inputs)
    torch.manual_seed(1)
    try:
        with torch._dynamo.config.patch(dict(program.config)) if program.config else contextlib.nullcontext():
            run = Run(
                _compiled(program, arm, lambda *args: program.call(model, *args)),
                lambda f: _compiled(program, arm, f),
            )
            more = program.drive(run, model, *inputs)
    except Exception as error:
        return Outcome({}, getattr(error, "inner_exception", None) or error)
    return Outcome(_left_behind(model, inputs, more))


def wrong(program: Program, arms: Mapping[str, Mapping[str, Any]] = ARMS) -> list[str]:
    """What is wrong with ``program`` in each of ``arms``; nothing if all is well."""
    eager = outcome(program, None)
    others: dict[str, Outcome] = {}
    found = []
    for arm in arms:
        ours = outcome(program, arm)
        if arm == "budget" and not eager.error and CHANGED in str(ours.error):
            continue
        if eager.error or ours.error:
            texts = _wrong_errors(program, eager, ours)
        else:
            texts = _wrong_values(program, eager, ours, NOISE_OF[arm], others)
        found += [f"{arm}: {text}" for text in texts]
    return found


def _wrong_values(
    program: Program, eager: Outcome, ours: Outcome, noisy: tuple[str, ...], others: dict[str, Outcome]
) -> list[str]:
    """Values under the bar and under what each of ``noisy`` reaches; those are run (into ``others``) if it comes to it."""
    found = []
    for name, reference in eager.values.items():
        level = decibels(reference, ours.values.get(name))
        if level >= program.bar or {name, "*"} & program.argued.keys():
            continue
        for other in noisy:
            others.setdefault(other, outcome(program, other))
        noise = {other: decibels(reference, others[other].values.get(name)) for other in noisy}
        if level < min(noise.values()) - NOISE:
            found.append(f"{name} {level:.1f} dB ({', '.join(f'{other} {v:.1f}' for other, v in noise.items())})")
    return found


def decibels(reference: Tensor | None, got: Tensor | None) -> float:
    """SQNR of ``got`` where the reference is finite; -inf if it is not finite there, missing, or of another kind."""
    if reference is None or got is None:
        return torch.inf if reference is got else -torch.inf
    if reference.shape != got.shape or reference.dtype != got.dtype:
        return -torch.inf
    reference, got = _real(reference), _real(got)
    finite = reference.isfinite()
    reference, got = reference[finite], got[finite]
    if not got.isfinite().all():
        return -torch.inf
    return sqnr_db(reference, got)


def _wrong_errors(program: Program, eager: Outcome, ours: Outcome) -> list[str]:
    if eager.error is None:
        if "raises" in program.argued and _text(outcome(program, "inductor").error) == _text(ours.error):
            return []
        upstream = outcome(program, "aot_eager")
        if upstream.error is not None and type(upstream.error) is type(ours.error):
            return []
        return [f"raises {_text(ours.error)}; eager and aot_eager do not"]
    if ours.error is None:
        upstream = outcome(program, "aot_eager")
        declined = "too" if upstream.error is None else f"({_text(upstream.error)})"
        return [
            f"does not raise {_text(eager.error)}; aot_eager {'does not ' if declined == 'too' else 'does '}{declined}"
        ]
    if "modified by an inplace operation" in str(eager.error) and "inplace" not in str(ours.error):
        return [f"raises {_text(ours.error)} for {_text(eager.error)}"]
    return []


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"


def _compiled(program: Program, arm: str | None, function: Any) -> Any:
    if arm is None:
        return function
    if arm in ("aot_eager", "inductor"):
        return torch.compile(function, backend=arm, dynamic=program.dynamic)
    options = dict({**ARMS, **ALONE}[arm])
    if program.bits:
        options["debug.inductor"] = {"fallback_random": True}
    return torch.compile(function, backend="fp8compile", options=options, dynamic=program.dynamic)


def _left_behind(model: Any, inputs: tuple[Any, ...], more: Values) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            found[name], found[f"{name}.grad"] = _copy(parameter), _copy(parameter.grad)
        found |= {name: _copy(buffer) for name, buffer in model.named_buffers()}
    for i, tensor in enumerate(tensors(inputs)):
        found[f"input{i}"] = _copy(tensor)
        if tensor.requires_grad and tensor.is_leaf:
            found[f"input{i}.grad"] = _copy(tensor.grad)
    for name, value in more.items():
        found |= {f"{name}{i}": _copy(t) for i, t in enumerate(tensors(value))}
        if value is None:
            found[f"{name}0"] = None
    return found


def _copy(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).clone()


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
