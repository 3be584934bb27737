"""Ways to scale the loss in pure FP16: which diverge, how well the others end, where the scale goes.

    python benchmarks/studies/bench_loss_scaling.py --tasks llama,bert,efficientnet,vit --seeds 5

Tasks: ``loss_scaling_tasks``; arms: ``loss_scaling_runs``. For each arm: the share of seeds that diverge (the rule is in
``extras.demo.loss_scales``), final validation loss and accuracy of the others, steps skipped, and the range of the scale
after the learning rate's warm-up. Claim: in histogram mode no seed diverges, and the scale stays within a factor 4. Beside
it, in the JSON: how far the largest gradient of a step moves itself, from end to end and as a trend.

Runs that the JSON already has are not run again, but for those that failed; it is written after every run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.loss_scaling_runs import Models, Row, run
from benchmarks.studies.loss_scaling_tasks import TRAININGS
from fp8compile.extras.demo.arms import FP16_ARMS, FP32, HISTOGRAM
from fp8compile.extras.demo.fp16_plots import draw_rate, draw_scales
from fp8compile.extras.demo.loss_scales import DIVERGED, Course, Ends, course, made_progress, power_text
from fp8compile.extras.demo.model import rate_schedule, warm_up_steps
from fp8compile.extras.demo.plots import COLOURS
from fp8compile.reporting.figure import empty_figure

WINDOW = 20  # steps
Runs = dict[str, dict[str, dict[str, Any]]]  # [arm][seed]


def run_row(arm: str, seed: int, models: Models, steps: int) -> dict[str, Any]:
    """One run, ready for JSON. A run that cannot be run (no kernel for FP16, say) says so in its status."""
    try:
        row = run(arm, seed, models, steps)
    except Exception as error:
        traceback.print_exc()
        row = Row(status=f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    found = asdict(row)
    found["losses"] = [round(loss, 5) if math.isfinite(loss) else None for loss in row.losses]
    found["largest"] = [float(f"{x:.5g}") for x in row.largest]
    found["start"], found["end"] = _finite(row.start), _finite(row.end)
    return found


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None  # JSON has neither inf nor NaN


def diverged(runs: Runs, arm: str, seed: str) -> str | None:
    """How it diverged, "" if it did not, None where the run failed."""
    row = runs[arm][seed]
    if row["status"].startswith(DIVERGED):
        return str(row["status"])
    if row["status"] != "done":
        return None
    reference = runs.get(FP32, {}).get(seed)
    known = reference is not None and reference["status"] == "done"
    progressed = made_progress(_ends(row), _ends(reference) if reference and known else None)
    return "" if progressed else f"{DIVERGED}: no progress by the end"


def _ends(row: Mapping[str, Any]) -> Ends:
    return Ends(row["start"], row["end"])


def summary(runs: Runs, steps: int) -> dict[str, Any]:
    """By arm, over its seeds; what is of the sound runs alone is None where there is none."""
    found = {}
    for arm, rows in runs.items():
        verdicts = {seed: diverged(runs, arm, seed) for seed in rows}
        sound = [rows[seed] for seed, verdict in verdicts.items() if verdict == ""]
        courses = [c for row in rows.values() if (c := course(row["scales"], warm_up_steps(steps)))]
        found[arm] = {
            "seeds": len(rows),
            "diverged": sum(bool(verdict) for verdict in verdicts.values()),
            "failed": sum(verdict is None for verdict in verdicts.values()),
            "verdicts": {seed: verdict for seed, verdict in verdicts.items() if verdict != ""},
            "validation_loss": _mean([row["end"] for row in sound]),
            "accuracy": _mean([row["accuracy"] for row in sound]),
            "gap": _mean([gap for row in sound if (gap := _gap(runs, rows, row)) is not None]),
            "skipped": _mean([row["skipped"] for row in rows.values()]),
            "scale": _scale(courses),
            "gradient": _gradient([row.get("largest", [])[warm_up_steps(steps) :] for row in rows.values()]),
        }
    return found


def _gap(runs: Runs, rows: Mapping[str, dict[str, Any]], row: dict[str, Any]) -> float | None:
    seed = next(seed for seed, each in rows.items() if each is row)
    reference = runs.get(FP32, {}).get(seed)
    return row["end"] / reference["end"] - 1 if reference and reference["end"] else None


def _scale(courses: Sequence[Course]) -> dict[str, float] | None:
    if not courses:
        return None
    return {
        "lowest": min(c.lowest for c in courses),
        "highest": max(c.highest for c in courses),
        "largest_factor_of_a_run": max(c.factor for c in courses),
        "least_share_within_4": min(c.within_4 for c in courses),
    }


def _gradient(several: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """How far the largest gradient of a step moves in a run: from end to end, and by its medians over ``WINDOW`` steps."""
    known = [each for each in several if len(each) >= 2 * WINDOW and min(each) > 0]
    if not known:
        return None
    ends = [max(each) / min(each) for each in known]
    trends = []
    for each in known:
        medians = [statistics.median(each[k : k + WINDOW]) for k in range(0, len(each) - WINDOW + 1, WINDOW)]
        trends.append(max(medians) / min(medians))
    return {"least_factor": min(ends), "largest_factor": max(ends), "largest_factor_of_medians": max(trends)}


def _mean(values: Sequence[float]) -> list[float] | None:
    """Mean and standard deviation."""
    if not values:
        return None
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def table(name: str, found: Mapping[str, Any]) -> Table:
    columns = (
        "seeds",
        "diverged",
        "loss",
        "gap to fp32",
        "accuracy",
        "skipped",
        "scale after warm-up",
        "most / least",
    )
    made = Table("arm", *columns, title=f"{name}: {found['about']}, {found['steps']} steps", title_justify="left")
    for arm, row in found["summary"].items():
        loss, gap, hits, scale = (row[key] for key in ("validation_loss", "gap", "accuracy", "scale"))
        made.add_row(
            arm,
            str(row["seeds"]),
            f"{row['diverged']}" + (f", {row['failed']} failed" if row["failed"] else ""),
            f"{loss[0]:.4f} ± {loss[1]:.4f}" if loss else "-",
            f"{gap[0]:+.2%} ± {gap[1]:.2%}" if gap else "-",
            f"{hits[0]:.2%}" if hits else "-",
            f"{row['skipped'][0]:.3g}",
            f"{power_text(scale['lowest'])} to {power_text(scale['highest'])}" if scale else "-",
            f"{scale['largest_factor_of_a_run']:g}" if scale else "-",
        )
    return made


def plot(tasks: Mapping[str, Any], path: Path) -> None:
    """Above: scales of every seed and the learning rate. Below: where each run ended; a cross diverged."""
    made, grid = empty_figure(2, len(tasks), 5.2 * len(tasks), 8)
    for column, (name, found) in enumerate(tasks.items()):
        above, below = grid[0, column], grid[1, column]
        _plot_scales(above, found)
        above.set(xlabel="optimizer step", title=name)
        _plot_ends(below, found)
        below.set(xlabel="validation loss at the end (cross: before training, of a run that diverged)")
    made.savefig(path, dpi=100)


def _plot_scales(axes: Any, found: Mapping[str, Any]) -> None:
    rate = rate_schedule(found["steps"])
    draw_rate(axes, [found["rate"] * rate(step) for step in range(found["steps"])])
    for arm, rows in found["runs"].items():
        scaled = {seed: row for seed, row in rows.items() if row["scales"]}
        ended = [bool(diverged(found["runs"], arm, seed)) for seed in scaled]
        draw_scales(axes, {arm: [row["scales"] for row in scaled.values()]}, ended)


def _plot_ends(axes: Any, found: Mapping[str, Any]) -> None:
    names = list(found["runs"])
    for i, (arm, rows) in enumerate(found["runs"].items()):
        for seed, row in rows.items():
            bad = diverged(found["runs"], arm, seed) != ""
            x = row["start"] if bad else row["end"]
            axes.plot(x, i, "x" if bad else "o", color=COLOURS[arm], markersize=7, alpha=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Which loss scales FP16 training survives.")
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "loss-scaling-cpu.json")
    parser.add_argument("--tasks", default=",".join(TRAININGS), help="comma-separated")
    parser.add_argument("--arms", default=",".join(FP16_ARMS), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few steps without the compiler: does it run?")
    arguments = parser.parse_args(words)
    for name, known in (("tasks", TRAININGS), ("arms", FP16_ARMS)):
        asked = getattr(arguments, name).split(",")
        setattr(arguments, name, asked)
        if unknown := set(asked) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return arguments


def task_of(tasks: dict[str, Any], name: str, quick: bool) -> dict[str, Any]:
    """What the JSON has of a task; a new one if it was trained otherwise."""
    training = TRAININGS[name]
    steps = 3 if quick else training.steps
    fresh = {"about": training.about, "steps": steps, "rate": training.rate, "runs": {}, "summary": {}}
    known = tasks.get(name, {})
    same = all(known.get(key) == fresh[key] for key in ("about", "steps", "rate"))
    tasks[name] = known if same else fresh
    found: dict[str, Any] = tasks[name]
    return found


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(words)
    tasks = json.loads(arguments.json.read_text())["tasks"] if arguments.json.exists() else {}
    found: dict[str, Any] = {"tasks": tasks}
    for name in arguments.tasks:
        task = task_of(tasks, name, arguments.quick)
        models = Models(TRAININGS[name], compiled=not arguments.quick)
        for seed, arm in [(seed, arm) for seed in range(arguments.seeds) for arm in arguments.arms]:
            rows = task["runs"].setdefault(arm, {})
            if not rows.get(str(seed), {"status": "failed"})["status"].startswith("failed"):
                continue
            row = run_row(arm, seed, models, task["steps"])
            rows[str(seed)] = row | {"environment": environment()}
            task["runs"] = {known: task["runs"][known] for known in FP16_ARMS if known in task["runs"]}
            task["summary"] = summary(task["runs"], task["steps"])
            found = {**environment(), "tasks": tasks}
            write_json(arguments.json, found)
            print(f"{name}, {arm}, {seed}: {_said(row)}", file=sys.stderr, flush=True)
    plot(tasks, arguments.json.with_suffix(".png"))
    for name in arguments.tasks:
        Console(width=150).print(table(name, tasks[name]))
    return found


def _said(row: Mapping[str, Any]) -> str:
    end = "-" if row["end"] is None else f"{row['end']:.4f}"
    return f"{row['status']}, loss {end}, {row['skipped']} skipped, {row['seconds']:.0f} s"


def kept(found: Mapping[str, Any]) -> bool:
    """The claim about divergence: no seed of any task diverged in histogram mode."""
    return not any(task["summary"].get(HISTOGRAM, {}).get("diverged") for task in found["tasks"].values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(0 if kept(main()) else "the histogram arm diverged")
