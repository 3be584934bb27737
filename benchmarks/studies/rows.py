"""What the model sweep measured, as rows for JSON."""

from __future__ import annotations

import argparse
import collections
import copy
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.studies.linears import Account, account
from benchmarks.studies.measuring import (
    LARGEST_NORM,
    LINEARS,
    RISING_STEPS,
    Kept,
    Measured,
    call,
    parameter_dtype,
    quality,
    reference_gradients,
    reported_storages,
    zero_up_to_rounding,
)
from benchmarks.studies.models import Case
from fp8compile.reporting.entries import LINEAR, SAVED
from fp8compile.reporting.report import Report

LAST_STEPS = 5
AGREEMENT = 0.01  # how far report and measurement may differ


def measured_row(case: Case, precision: str, measured: dict[str, Measured]) -> dict[str, Any]:
    """Bytes, SQNR and report of every way of compiling."""
    reference = reference_gradients(case)
    skipped = zero_up_to_rounding(reference)
    plain = measured["plain"]
    row: dict[str, Any] = {"without_gradient_in_theory": skipped}
    for way, found in measured.items():
        row[way] = {
            "saved_bytes": _total(found.kept),
            "loss": found.loss,
            "seconds": round(found.seconds, 1),
            "sqnr": quality(reference, found.gradients, skipped).summary(),
        }
        if found.report is not None:
            row[way]["sqnr_to_plain"] = quality(plain.gradients, found.gradients, skipped).summary()
            row[way]["report"] = _report_row(found, plain)
        if found.report is not None and way in LINEARS:
            row[way]["linears"] = _account(case, precision, found.report).summary()
    return row


def _account(case: Case, precision: str, report: Report) -> Account:
    model = copy.deepcopy(case.model).to(parameter_dtype(precision))
    batch = case.batch(0).to(parameter_dtype(precision))
    return account(
        model, lambda copied: call(copied, batch, precision), (*report.linears, *report.notes.skipped(LINEAR))
    )


def _report_row(ours: Measured, plain: Measured) -> dict[str, Any]:
    """What the report says, where it disagrees with the measurement, and the largest tensors left alone."""
    report = ours.report
    assert report is not None
    row: dict[str, Any] = {
        "saved_bytes": report.saved_bytes,
        "saved_bytes_plain": report.saved_bytes_plain,
        "graphs": len(report.graphs),
        "encoded": len(report.saved),
        "recomputed": len(report.recomputed),
        "left_alone": [
            {"name": s.name, "op": s.origin.op, "module": s.origin.module, "shape": s.shape, "dtype": s.dtype}
            | {"bytes": s.bytes, "reason": s.reason}
            for s in sorted(report.notes.skipped(SAVED), key=lambda s: -s.bytes)[:12]
        ],
    }
    if not agree(report.saved_bytes, _total(ours.kept)):
        row["disagreement"] = _differences(ours.kept, reported_storages(report))
    if not agree(report.saved_bytes_plain, _total(plain.kept)):
        row["plain_disagreement"] = {"measured": _total(plain.kept), "reported": report.saved_bytes_plain}
    return row


def agree(reported: int, measured: int) -> bool:
    """Whether two numbers of bytes are the same up to ``AGREEMENT``."""
    return abs(reported - measured) <= AGREEMENT * max(measured, 1)


def _differences(measured: list[Kept], reported: list[Kept]) -> dict[str, list[str]]:
    """Shapes that one side has and the other has not, the heaviest ten each."""

    def counted(kept: list[Kept]) -> collections.Counter[str]:
        return collections.Counter(str(list(k.shape)) for k in kept if k.nbytes >= 1024)

    left, right = counted(measured), counted(reported)
    return {
        "measured only": [f"{n} x {shape}" for shape, n in (left - right).most_common(10)],
        "reported only": [f"{n} x {shape}" for shape, n in (right - left).most_common(10)],
    }


def _total(kept: list[Kept]) -> int:
    return sum(k.nbytes for k in kept)


def training_row(
    losses: dict[str, list[list[float]]], precision: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Losses of the twin and of every arm for each seed, and the gaps between them."""
    twin_ends = [_end(run) for run in losses["plain"]]
    gaps = {}
    for arm in arguments.arms:
        each = [_end(run) / end - 1 for run, end in zip(losses[arm], twin_ends, strict=True)]
        gaps[arm] = {"mean": _mean(each), "standard_error": _standard_error(each), "each": each}
    return {
        "precision": precision,
        "twin": "Inductor" if (arguments.twin or arguments.codegen) == "inductor" else "preset off, codegen eager",
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "optimizer": f"AdamW, learning rate {arguments.learning_rate} after {RISING_STEPS} steps, "
        f"norm clipped to {LARGEST_NORM}",
        "twin_loss_first": _mean([run[0] for run in losses["plain"]]),
        "twin_loss_last5": _mean(twin_ends),
        "gap_last5": gaps,
        "losses": losses,
    }


def _end(losses: list[float]) -> float:
    return _mean(losses[-LAST_STEPS:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
