"""``optimizer.report()``: the formats, bits, ranges and errors of every state, and what was kept whole and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._distributed import local_part
from fp8compile._text import printed, table
from fp8compile.numerics.metrics import sqnr
from fp8compile.optim.interface import OptimizerShell


@dataclass(frozen=True)
class StateReport:
    """One state of one parameter.

    Attributes:
        name: ``exp_avg`` ...
        format: how it is stored.
        bits: per element, metadata included, counted from the storages.
        k: least, median and largest k of its groups, where ranges are expanded.
        error_db: SQNR of what the next step would store, against the FP32 value; None without a gradient.
    """

    name: str
    format: str
    bits: float
    k: tuple[float, float, float] | None = None
    error_db: float | None = None


@dataclass(frozen=True)
class ParameterReport:
    """One parameter: ``reason`` says why its states are not in the format that its group asks for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    states: tuple[StateReport, ...]
    reason: str | None


@dataclass(frozen=True)
class StatesReport:
    """All parameters of an optimizer that have been updated."""

    parameters: tuple[ParameterReport, ...]

    @property
    def bits_per_parameter(self) -> float:
        """Bits that the states of a parameter cost, on average."""
        numel = sum(math.prod(p.shape) for p in self.parameters)
        bits = sum(math.prod(p.shape) * state.bits for p in self.parameters for state in p.states)
        return bits / numel if numel else 0.0

    def __str__(self) -> str:
        columns = ("parameter", "shape", "state", "format", "bits", "k", "SQNR dB", "kept whole because")
        rows = [_row(p, state) for p in self.parameters for state in p.states]
        return printed(
            [f"{self.bits_per_parameter:.2f} bits per parameter for optimizer states", table("", columns, rows)]
        )


def _row(p: ParameterReport, state: StateReport) -> tuple[str, ...]:
    k = "" if state.k is None else "{:.1f} {:.1f} {:.1f}".format(*state.k)
    error = "" if state.error_db is None else f"{state.error_db:.1f}"
    shape = "x".join(map(str, p.shape))
    return p.name, shape, state.name, state.format, f"{state.bits:.2f}", k, error, p.reason or ""


@torch.no_grad()
def report(optimizer: OptimizerShell) -> StatesReport:
    """The report of an optimizer; parameters without a state are left out."""
    found = []
    for index, group, p in optimizer._parameters():
        if optimizer.state.get(p):
            name = optimizer.names.names.get(id(p), f"parameter {index}")
            states = tuple(_state_reports(optimizer, group, p))
            reason = optimizer.placement(p, group).reason
            found.append(ParameterReport(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), states, reason))
    return StatesReport(tuple(found))


def _state_reports(optimizer: OptimizerShell, group: dict[str, Any], p: Tensor) -> list[StateReport]:
    plan, here = optimizer.plan_of(p, group), {name: local_part(part) for name, part in optimizer.state[p].items()}
    errors = _errors(optimizer, p) if p.grad is not None else {}
    reports = []
    for state, codec in plan.codecs:
        parts = [here[key] for key in plan.part_keys(state)]
        bits = sum(part.numel() * part.element_size() * 8 for part in parts) / max(1, local_part(p).numel())
        k = dict(zip(codec.parts, parts, strict=True)).get("k")
        reports.append(StateReport(state, codec.name, bits, None if k is None else _spread(k), errors.get(state)))
    for name in ("correction", "master"):
        if name in here:
            reports.append(
                StateReport(name, str(here[name].dtype).removeprefix("torch."), here[name].element_size() * 8)
            )
    return reports


def _spread(k: Tensor) -> tuple[float, float, float]:
    k = k.flatten().float() / 16
    return (k.min().item(), k.median().item(), k.max().item()) if k.numel() else (0.0, 0.0, 0.0)


def _errors(optimizer: OptimizerShell, p: Tensor) -> dict[str, float]:
    """SQNR in dB of each state as the next step would store it."""
    plan, tensors = optimizer.step_function(p)
    exact = plan.fresh_states(tensors)
    stored = plan.decoded(plan(tensors), tensors["param"].shape)
    return {name: sqnr(exact[name], stored[name]) for name in exact}
