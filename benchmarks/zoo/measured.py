"""One model of the zoo, measured: what the report says, gradients in dB, losses of three arms.

twin    eager PyTorch under BF16 autocast
off     fp8compile with preset "off": captured and run, nothing encoded
ours    fp8compile's default recipe with FP8 linears emulated

SQNR    20 log10(|ref| / |ref - g|) of each parameter's gradient, against float64 (eager), after ten steps in FP32: before
        them many are zero by construction. One that is zero in theory has none. One that the twin misses by more than
        ``BAR`` is not determined in BF16: it is counted, and not judged.
gap     mean loss of the last five steps over the twin's, minus 1; the same weights, batches and AdamW for all arms
"""

from __future__ import annotations

import collections
import copy
import statistics
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8compile
from benchmarks.studies.linears import account
from benchmarks.studies.measuring import (
    LINEARS,
    Built,
    Way,
    build,
    call,
    gradients,
    kept_storages,
    quality,
    train,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.studies.models import Case
from benchmarks.zoo.registry import ZooModel
from fp8compile.numerics.gradient_quality import BAR
from fp8compile.reporting.entries import LINEAR, Linear, Skip
from fp8compile.reporting.report import Report

PRECISION = "amp"
LAST_STEPS = 5
STEPS = 20
OURS = {"fp8compile", "passes"}
Row = dict[str, Any]


def row_of(model: ZooModel, seeds: int, steps: int = STEPS, codegen: str = "eager") -> Row:
    """Everything about one model, ready for JSON. What an arm raises is in ``errors``, under its name.

    Args:
        model: of the zoo.
        seeds: how many runs of ``steps`` steps, each from other weights on other batches.
        steps: training steps of a run.
        codegen: "eager" runs the rewritten graphs node by node, "inductor" generates kernels.
    """
    case = model.case(0)
    warm_up(case)
    exact, reference = reference_gradients(case)
    row: Row = {
        "family": model.family,
        "note": model.note,
        "codegen": codegen,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "reference": reference,
        "errors": {},
    }
    measured: dict[str, Seen] = {}
    losses: dict[str, list[list[float]]] = {}
    for arm, way in ways(codegen).items():
        torch._dynamo.utils.counters.clear()
        try:
            built = build(case, way, PRECISION)
            measured[arm] = look(case, built)
            if arm == "ours":
                row |= reported(case, built, measured[arm])
            losses[arm] = [run_of(model, built, seed, steps) for seed in range(seeds)]
        except Exception as error:
            row["errors"][arm] = crash(error)
    return row | judged(exact, measured) | trained(losses, model.rate, steps)


def ways(codegen: str) -> Mapping[str, Way]:
    """The arms, the twin first."""
    return {"twin": Way("eager", codegen), "off": Way("plain", codegen), "ours": Way("linears", codegen)}


def reference_gradients(case: Case) -> tuple[dict[str, Tensor], str]:
    """Gradients of eager PyTorch in float64, or in FP32 for a model that mixes dtypes when it is cast; and which."""
    for dtype in (torch.float64, torch.float32):
        exact, batch = copy.deepcopy(case.model).to(dtype), case.batch(0).to(dtype)
        try:
            return gradients(exact, lambda e=exact, b=batch: case.loss(call(e, b, "fp64"), b)), str(dtype)  # type: ignore[misc]
        except RuntimeError:
            if dtype == torch.float32:
                raise
    raise AssertionError


def run_of(model: ZooModel, built: Built, seed: int, steps: int) -> list[float]:
    """Losses from the weights of that seed, on its batches."""
    case = model.case(seed)
    built.model.load_state_dict(case.model.state_dict())
    return train(case, built, steps, seed, model.rate)


# -------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Seen:
    """One arm after a step: gradients, what autograd kept, and the report of ours; None where Dynamo captured nothing."""

    gradients: dict[str, Tensor]
    kept: int
    report: Report | None


def look(case: Case, built: Built) -> Seen:
    """Compile by a forward, then one with its backward, and one more for what is kept."""
    batch = case.batch(0)

    def run() -> Any:
        return call(built.run, batch, PRECISION)

    run()
    found = gradients(built.model, lambda: case.loss(run(), batch))
    captured = built.way.name in LINEARS and bool(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    report = fp8compile.report(built.run) if captured else None  # type: ignore[arg-type]
    # Last: by these hooks a result that is saved too holds itself for ever, and its call would count as alive.
    kept = sum(each.nbytes for each in kept_storages(built.model, run, batch))
    return Seen(found, kept, report)


NOTHING: Row = {"graphs": 0, "products_fp8": 0, "products_told": 0, "left": {}, "linears_differ": {}, "remarks": []}


def reported(case: Case, built: Built, ours: Seen) -> Row:
    """What the report says: graphs, linears, bytes; and where it differs from what autograd keeps and what ran."""
    report = ours.report
    if report is None:
        return NOTHING | {"saved_before": ours.kept, "saved_after": ours.kept, "saved_measured": ours.kept}
    told: list[Linear | Skip] = [*report.linears, *report.notes.skipped(LINEAR)]
    batch = case.batch(0)
    ran = account(copy.deepcopy(case.model), lambda copied: call(copied, batch, PRECISION), told).summary()
    return {
        "graphs": sum(g.kind == "training" for g in report.graphs),
        "graphs_run": sum(g.runs for g in report.graphs if g.kind == "training"),
        "products_fp8": len(report.linears),
        "products_told": len(told),
        "left": dict(collections.Counter(s.reason for s in report.notes.skipped(LINEAR)).most_common()),
        "linears_fp8": ran["linears_in_fp8"],
        "linears_total": ran["linears_of_the_model"],
        "linears_differ": ran["differences"],
        "saved_before": report.saved_bytes_plain,
        "saved_after": report.saved_bytes,
        "saved_measured": ours.kept,
        "graph_breaks": breaks(),
        "remarks": list(report.remarks),
    }


def breaks() -> dict[str, int]:
    """Why Dynamo broke the graph of what was compiled last, the first line of each reason, and how often."""
    found = torch._dynamo.utils.counters["graph_break"]
    return {str(reason).strip().splitlines()[0]: times for reason, times in found.items()}


# --------------------------------------------------------------------------------------------------- gradients


def judged(exact: dict[str, Tensor], measured: Mapping[str, Seen]) -> Row:
    """The dB of every arm, over the gradients that BF16 itself determines."""
    zero = zero_up_to_rounding(exact)
    found = {arm: quality(exact, each.gradients, zero).by_parameter for arm, each in measured.items()}
    if "twin" not in found:
        return {}
    known = [name for name, db in found["twin"].items() if db >= BAR]
    rows: Row = {"gradients": len(exact), "zero": len(zero), "undetermined": len(exact) - len(zero) - len(known)}
    return rows | {"db": {arm: summary({name: by[name] for name in known}) for arm, by in found.items()}}


def summary(db: Mapping[str, float]) -> Row:
    """The worst and the median, and the parameters below the bar; empty without parameters."""
    if not db:
        return {}
    worst = min(db, key=db.__getitem__)
    below = {name: value for name, value in db.items() if value < BAR}
    return {
        "worst": db[worst],
        "worst_parameter": worst,
        "median": statistics.median(db.values()),
        "below_bar": dict(sorted(below.items(), key=lambda each: each[1])[:8]),
        "count_below_bar": len(below),
    }


# ---------------------------------------------------------------------------------------------------- training


def trained(losses: Mapping[str, Sequence[Sequence[float]]], rate: float, steps: int) -> Row:
    """The twin's losses, and the gap of every arm for each seed."""
    if "twin" not in losses:
        return {}
    twin = losses["twin"]
    row: Row = {
        "rate": rate,
        "steps": steps,
        "seeds": len(twin),
        "loss_first": statistics.fmean(run[0] for run in twin),
        "loss_last": statistics.fmean(map(end, twin)),
        "losses": {arm: [[float(f"{loss:.5g}") for loss in run] for run in runs] for arm, runs in losses.items()},
    }
    gaps = {arm: [gap(a, b) for a, b in zip(runs, twin, strict=True)] for arm, runs in losses.items()}
    return row | {"gap": {arm: {"mean": statistics.fmean(each), "each": each} for arm, each in gaps.items()}}


def end(run: Sequence[float]) -> float:
    """The mean of the last losses of a run."""
    return statistics.fmean(run[-LAST_STEPS:])


def gap(run: Sequence[float], twin: Sequence[float]) -> float:
    """How much higher a run ends than its twin, relative to the twin."""
    return (end(run) - end(twin)) / abs(end(twin))


# ------------------------------------------------------------------------------------------------------- errors


def crash(error: BaseException) -> dict[str, Any]:
    """What was raised, and where: the last frames of it, and those in fp8compile."""
    text = "".join(traceback.format_exception_only(error)).strip()
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for place, f in enumerate(stack) if place >= len(stack) - 4 or OURS & set(Path(f.filename).parts)][
        -10:
    ]
    return {
        "type": type(error).__name__,
        "text": text[:1500],
        "where": [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames],
    }
