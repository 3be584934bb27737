"""The folder that the demo leaves: pictures, fp8compile's report, the table, and every number behind them.

    loss.png  saved_bytes.png   plots; in FP16 loss_scale.png instead of the second
    report.txt                  the table, fp8compile's report, tracebacks of arms that failed
    report.json                 fp8compile's report
    results.json                losses and seconds of every step, the configuration, versions

All of them are written, with what was measured so far, even if the run was stopped.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp8compile.extras.demo import fp16_plots, plots
from fp8compile.extras.demo.arms import FP32
from fp8compile.extras.demo.data import Corpus
from fp8compile.extras.demo.results import LIMIT, Results, Run, mean_of
from fp8compile.extras.demo.table import summary

NO_REPORT = "no report: the fp8compile arm did not finish its first step"


def write_files(results: Results, corpus: Corpus, options: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write what was measured, also after an interruption; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    report = results.report
    document = to_document(results, corpus, options)
    texts = {
        "results.json": json.dumps(without_nan(document), indent=1) + "\n",
        "report.json": (report.json if report else json.dumps({"note": NO_REPORT})) + "\n",
        "report.txt": "\n\n".join([summary(results), report.text if report else NO_REPORT, *_tracebacks(results)])
        + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    plots.plot_losses(results, folder / "loss.png")
    second = "loss_scale.png" if results.reference == FP32 else "saved_bytes.png"
    draw = fp16_plots.plot_scales if results.reference == FP32 else plots.plot_saved_bytes
    draw(results, folder / second)
    return [folder / name for name in ("loss.png", second, *texts)]


def to_document(results: Results, corpus: Corpus, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured, as JSON values. Seconds, bytes, and nats per byte."""
    gaps = results.gaps()
    mean = mean_of(gaps)
    return {
        "interrupted": results.interrupted,
        "interrupted_at": results.interrupted_at,
        "gap": {
            "per_seed": gaps,
            "mean": mean.mean if mean else None,
            "standard_error": mean.error if mean else None,
            "limit": LIMIT,
            "after_step": results.gap_step if gaps else None,
        },
        "eager_saved_bytes": results.eager_saved_bytes,
        "runs": [_run(run) | _scales(run, results) for run in results.runs],
        "options": dict(options),
        "size": dataclasses.asdict(results.size),
        "precision": {
            "dtype": str(results.precision.dtype).removeprefix("torch."),
            "why": results.precision.why,
            "probe_seconds": results.precision.probe_seconds,
        },
        "corpus": {
            "train_bytes": len(corpus.train),
            "validation_bytes": len(corpus.validation),
            "train_files": len(corpus.train_files),
            "validation_files": list(corpus.validation_files),
            "sha256": corpus.sha256,
        },
        "environment": environment(),
    }


def _scales(run: Run, results: Results) -> dict[str, Any]:
    if not run.scales:
        return {}
    course = results.course(run)
    return {
        "diverged": results.divergence(run),
        "skipped": run.skipped,
        "scales": run.scales,
        "scales_after_warm_up": dataclasses.asdict(course) | {"factor": course.factor} if course else None,
    }


def without_nan(value: Any) -> Any:
    """JSON has neither NaN nor inf: None stands for them."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tracebacks(results: Results) -> list[str]:
    return [f"{run.arm}, seed {run.seed}:\n{run.traceback}" for run in results.runs if run.traceback]


def environment() -> dict[str, Any]:
    """What the numbers depend on in addition to the configuration."""
    import fp8compile

    return {
        "fp8compile": fp8compile.__version__,
        "torch": torch.__version__,
        "transformers": _version_of("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(run: Run) -> dict[str, Any]:
    report = run.report
    return {
        "arm": run.arm,
        "seed": run.seed,
        "status": run.status,
        "train_loss": run.train_loss,
        "validation_loss": run.validation_loss,
        "compile_seconds": run.compile_s,
        "warm_cache": run.warm_cache,
        "median_step_seconds": run.median_step_s,
        "saved_bytes": run.saved_bytes,
        "reported_saved_bytes": report.saved_bytes if report else None,
        "reported_saved_bytes_plain": report.saved_bytes_plain if report else None,
        "peak_bytes": run.peak_bytes,
        "evaluations": [dataclasses.asdict(e) for e in run.evaluations],
        "losses": run.losses,
        "step_seconds": run.step_seconds,
    }
