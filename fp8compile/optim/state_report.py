"""``optimizer.report()``: the formats, bits, ranges and errors of every state, and which states are not encoded and why.

4.2 MiB of optimizer states on this device, 16.65 bits per parameter
  e4m3_expanded 4.1 MiB, fp32 66.0 KiB

layers.0.up.weight  1024x256
  exp_avg     e4m3_expanded   8.31 bits  k 0.88 1.38 2.19  27.3 dB
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._distributed import local_part
from fp8compile._text import human, terminal_width, wrapped
from fp8compile.numerics.metrics import sqnr
from fp8compile.optim.interface import OptimizerShell
from fp8compile.optim.low_bits import BESIDE_STATES  # exact by themselves
from fp8compile.optim.plan import Tensors, UpdatePlan

Step = tuple[UpdatePlan, Tensors, tuple[Tensor, Tensors]]  # see _next_step
MOST_COLUMNS = 80
NOTHING_YET = (
    "no step was taken yet, so there is no state to report: states are made by the first optimizer.step() that finds a "
    "gradient. Call report() again after it."
)
NO_STATES = "this optimizer keeps no states, as SGD without momentum"
WAITING = "{} more parameters have not been updated yet and are not listed."
WHAT_K_IS = (
    "k: a group of values is raised to the power k before it is rounded to FP8, so that it fills the format's range "
    "(least, median and largest k of all groups). A k below 1 stands for a group that spans more than the format, a k "
    "above 1 for one that spans less; 1 is plain FP8."
)
WHAT_DB_IS = "dB: SQNR of what the next step would store, against the same state in FP32."
NO_GRADIENT = (
    "dB is missing where a parameter has no gradient: the error is that of the next step's states, and these need the "
    "next gradient. Call report() after loss.backward() and before optimizer.zero_grad(). (Where gradients are released in "
    "the backward, end that with .remove() for one step.)"
)

SMALL_UPDATES = (
    "Of {} weights {:.0%} would move by less than half a step of theirs in the next update. They are rounded stochastically: "
    'right on average, with noise. master="split" keeps 8 more bits of each, a byte.'
)
SMALL = 0.5  # of elements whose updates are small: from here on it is said


@dataclass(frozen=True)
class StateReport:
    """One state of one parameter.

    Attributes:
        name: ``exp_avg`` ...
        format: how it is stored.
        bits: bits per element, metadata included, counted from the storages.
        k: least, median and largest k of its groups, where ranges are expanded.
        error_db: SQNR of the value that the next step would store, against the FP32 value; None without a gradient.
        nbytes: the bytes it takes on this device, metadata included.
    """

    name: str
    format: str
    bits: float
    k: tuple[float, float, float] | None = None
    error_db: float | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class ParameterReport:
    """One parameter.

    Attributes:
        reason: why its states are not in the format that its group asks for.
        codes: where weights' codes are asked for, whether its step writes them.
        small_updates: of 16-bit weights without a master the share of those that the next update moves by less than half of
            what two neighbours of their dtype are apart; None without a gradient, or where more bits are kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    states: tuple[StateReport, ...]
    reason: str | None
    codes: str | None = None
    small_updates: float | None = None


@dataclass(frozen=True)
class StatesReport:
    """All parameters of an optimizer that have been updated; ``waiting`` is how many have not been."""

    parameters: tuple[ParameterReport, ...]
    waiting: int = 0

    @property
    def bits_per_parameter(self) -> float:
        """Bits that the states of a parameter cost, on average."""
        numel = sum(math.prod(p.shape) for p in self.parameters)
        bits = sum(math.prod(p.shape) * state.bits for p in self.parameters for state in p.states)
        return bits / numel if numel else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all states on this device, without the counts of steps."""
        return sum(self.bytes_by_format.values())

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of the states in each format, the largest first."""
        found: dict[str, int] = {}
        for state in (state for p in self.parameters for state in p.states):
            found[state.format] = found.get(state.format, 0) + state.nbytes
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def small_updates(self) -> dict[str, float]:
        """By dtype, of all weights of which it is known, the share that the next update moves by less than half a step."""
        known: dict[str, list[tuple[int, float]]] = {}
        for p in self.parameters:
            if p.small_updates is not None:
                known.setdefault(p.dtype, []).append((math.prod(p.shape), p.small_updates))
        return {dtype: sum(n * x for n, x in all_) / max(1, sum(n for n, _ in all_)) for dtype, all_ in known.items()}

    def __str__(self) -> str:
        """At most 80 columns, except for names that are longer."""
        if not self.parameters:
            return _prose(NOTHING_YET)
        states = [state for p in self.parameters for state in p.states]
        by_format = ", ".join(f"{name} {human(size)}" for name, size in self.bytes_by_format.items())
        head = f"{human(self.nbytes)} of optimizer states on this device"
        lines = [f"{head}, {self.bits_per_parameter:.2f} bits per parameter"]
        lines += [_prose(by_format, "  ") if states else NO_STATES, ""]
        lines += [line for p in self.parameters for line in _lines(p, states)]
        small = [_prose(SMALL_UPDATES.format(*each)) for each in self.small_updates.items() if each[1] >= SMALL]
        return "\n".join([*lines, *_legend(states, self.waiting), *small])


def _lines(p: ParameterReport, all_states: list[StateReport]) -> Iterator[str]:
    """A parameter, why it is stored this way, and its states, aligned with those of the others."""
    yield f"{p.name}  {'x'.join(map(str, p.shape)) or 'scalar'}"
    if p.reason:
        yield _prose(f"because: {p.reason}", "  ")
    if p.codes:
        yield _prose(f"weight codes: {p.codes}", "  ")
    widths = [max(len(text) for text in column) for column in zip(*map(_columns, all_states), strict=True)]
    for state in p.states:
        yield (
            "  " + "  ".join(f"{text:{width}}" for text, width in zip(_columns(state), widths, strict=True))
        ).rstrip()


def _prose(text: str, indent: str = "") -> str:
    return wrapped(text, min(MOST_COLUMNS, terminal_width()), indent)


def _columns(state: StateReport) -> tuple[str, ...]:
    k = "" if state.k is None else "k " + " ".join(f"{each:.2f}" for each in state.k)
    error = "" if state.error_db is None else "exact" if math.isinf(state.error_db) else f"{state.error_db:.1f} dB"
    return state.name, state.format, f"{state.bits:5.2f} bits", k, error


def _legend(states: list[StateReport], waiting: int) -> Iterator[str]:
    """What the columns mean that are shown."""
    notes = [WAITING.format(waiting)] * bool(waiting)
    notes += [WHAT_K_IS] * any(s.k is not None for s in states)
    notes += [WHAT_DB_IS] * any(s.error_db is not None and not math.isinf(s.error_db) for s in states)
    encoded = [s for s in states if s.format != "fp32" and s.name not in BESIDE_STATES]
    notes += [NO_GRADIENT] * any(s.error_db is None for s in encoded)
    yield from ("", *(_prose(each) for each in notes)) if notes else ()


@torch.no_grad()
def report(optimizer: OptimizerShell) -> StatesReport:
    """The report of an optimizer; parameters without a state are left out."""
    found, waiting = [], 0
    for index, group, p in optimizer._parameters():
        if optimizer.state.get(p):
            name = optimizer.names.names.get(id(p), f"parameter {index}")
            step = _next_step(optimizer, p) if p.grad is not None else None
            states = tuple(_state_reports(optimizer, group, p, step))
            reason = _reason(optimizer, group, p)
            dtype, codes = str(p.dtype).removeprefix("torch."), optimizer._writer.remark(p, group)
            small = share_of_small_updates(step[0], step[1], step[2][0]) if step else None
            found.append(ParameterReport(name, tuple(p.shape), dtype, states, reason, codes, small))
        else:
            waiting += 1
    return StatesReport(tuple(found), waiting)


def _reason(optimizer: OptimizerShell, group: dict[str, Any], p: Tensor) -> str | None:
    """Why states are not in the format that the group asks for: all of them, or those that have to be exact."""
    placed = optimizer.placement(p, group)
    exact = {} if {*placed.formats} == {"fp32"} else optimizer.update_of(p, group).exact
    reasons = [placed.reason, *(f"{name} stays FP32: {why}" for name, why in exact.items())]
    return "; ".join(filter(None, reasons)) or None


def _state_reports(
    optimizer: OptimizerShell, group: dict[str, Any], p: Tensor, step: Step | None
) -> list[StateReport]:
    plan, here = optimizer.plan_of(p, group), {name: local_part(part) for name, part in optimizer.state[p].items()}
    errors = _errors(step[0], step[1], step[2][1]) if step else {}
    reports = []
    for state, codec in plan.codecs:
        parts = [here[key] for key in plan.part_keys(state)]
        nbytes = _nbytes(*parts)
        bits = nbytes * 8 / max(1, local_part(p).numel())
        k = dict(zip(codec.parts, parts, strict=True)).get("k")
        spread = None if k is None else _spread(k)
        reports.append(StateReport(state, codec.name, bits, spread, errors.get(state), nbytes))
    for name in BESIDE_STATES:
        if name in here:
            part = here[name]
            dtype = str(part.dtype).removeprefix("torch.")
            bits = _nbytes(part) * 8 / max(1, local_part(p).numel())
            reports.append(StateReport(name, dtype, bits, nbytes=_nbytes(part)))
    return reports


def _nbytes(*parts: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in parts)


def _spread(k: Tensor) -> tuple[float, float, float]:
    k = k.flatten().float() / 16
    return (k.min().item(), k.median().item(), k.max().item()) if k.numel() else (0.0, 0.0, 0.0)


def _errors(plan: UpdatePlan, tensors: Tensors, exact: Tensors) -> dict[str, float]:
    """SQNR in dB of each state as the next step would store it."""
    stored = plan.decoded(plan(tensors), tensors["param"].shape)
    return {name: sqnr(exact[name], stored[name]) for name in exact}


def _next_step(optimizer: OptimizerShell, p: Tensor) -> Step:
    """The plan and tensors of the next step of a parameter, and what it makes: the weight and the states, in FP32."""
    plan, tensors = optimizer.step_function(p)
    return plan, tensors, plan.moved(tensors, plan.decoded(tensors, tensors["param"].shape))


def share_of_small_updates(plan: UpdatePlan, tensors: Tensors, new: Tensor) -> float | None:
    """Of the weights that the next step moves: see ``ParameterReport.small_updates``."""
    p = tensors["param"]
    if plan.master != "none" or p.dtype == torch.float32:
        return None
    _, exponent = torch.frexp(p.float())  # |p| is below 2**exponent
    half_step = torch.ldexp(torch.full_like(new, torch.finfo(p.dtype).eps / 4), exponent)
    moved = (new - p.float()).abs()
    share: Tensor = ((moved < half_step) & (p != 0))[moved > 0].float().mean()
    return None if share.isnan() else share.item()
