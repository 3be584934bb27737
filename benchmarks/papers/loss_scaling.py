"""Graphcore's automatic loss scaling and stochastic rounding, and AMP's unstable ViT, in small.

    loss scales    fixed, dynamic and by histogram, in FP16 throughout                            ``fp16_runs``
    rounding       FP16 weights updated to nearest or at random, SGD, batch 4                     ``stochastic_rounding``
    islands        a ViT whose early attention leaves FP16's range                                ``vit_islands``

Images are scikit-learn's digits: where it is not installed, the transformer's loss scales are all that is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.papers import fp16_runs, stochastic_rounding, vit_islands
from benchmarks.papers.fp16_runs import Fp16Run, Fp16Task
from benchmarks.papers.outcome import NOT_FOUND, Outcome, Table, mean, with_spread
from fp8compile.extras.demo.arms import FP16_ARMS, FP32, HISTOGRAM
from fp8compile.extras.demo.extras import MissingExtra
from fp8compile.extras.demo.fp16_plots import draw_scales
from fp8compile.extras.demo.loss_scales import course, made_progress, power_text
from fp8compile.extras.demo.model import warm_up_steps
from fp8compile.reporting.figure import empty_figure

RATES, ROUNDING_FACTOR = (0.01, 0.0003), 10  # a rounding run has so many times the steps: its batch is 4
ROUNDED = (("FP32", "FP32"), *(arm for arm in stochastic_rounding.ARMS if arm[0] == "FP16"))
VIT_SHARE = 3  # a ViT has a third of the steps: it diverges in the first
BERT: Mapping[str, str] = {
    "static 1": "every seed diverges",
    "static 2^7": "every seed diverges",
    "static 2^15": "10 % of the seeds diverge",
    "static 2^22": "every seed diverges",
    HISTOGRAM: "no seed diverges",
}  # BERT-Large, LAMB
EFFICIENTNET: Mapping[str, str] = {FP32: "82.3 % (baseline)", HISTOGRAM: "82.33 %"}  # EfficientNet-B4, RMSProp, top 1
SOURCES = "Graphcore's report on automatic loss scaling and its rounding study, as this project's notes quote them"


def reproduce(seeds: int, steps: int, tell: Callable[[str], None]) -> Outcome:
    """All three parts; without scikit-learn the first half of the first."""
    try:
        images, missing = stochastic_rounding.load_images(), ""
    except MissingExtra as error:
        images, missing = None, str(error)
    tasks = [(fp16_runs.transformer_task(), BERT)]
    tasks += [(fp16_runs.image_task(images), EFFICIENTNET)] if images else []
    rows = {task.about: scaled(task, seeds, steps, tell) for task, _ in tasks}
    tables = [scale_table(task.about, rows[task.about], steps, published) for task, published in tasks]
    figures: dict[str, Any] = {"loss_scales": {about: [asdict(row) for row in each] for about, each in rows.items()}}
    if images:
        figures["rounding"] = rounded(seeds, steps * ROUNDING_FACTOR, images, tell)
        figures["vit"] = with_islands(seeds, max(1, steps // VIT_SHARE), images, tell)
        tables += [rounding_table(figures["rounding"]), island_table(figures["vit"])]
    said = (f"Not run: everything on images, since {missing}.",) if missing else ()
    findings = (*said, *(scale_finding(about, each) for about, each in rows.items()))
    findings += (rounding_finding(figures["rounding"]), island_finding(figures["vit"])) if images else ()
    return Outcome(
        difference(steps), SOURCES, tuple(tables), lambda path: draw(rows, figures, path), findings, figures
    )


def difference(steps: int) -> str:
    return (
        f"a transformer of bytes and inverted bottlenecks of 16 channels on 8 x 8 digits, {steps} steps, for BERT-Large and "
        "EfficientNet-B4; an 8-layer ResNet on digits for ResNet32 on CIFAR-100; a ViT of 3 layers with weights made large"
    )


def scaled(task: Fp16Task, seeds: int, steps: int, tell: Callable[[str], None]) -> list[Fp16Run]:
    """Every way to scale the loss, from each seed."""
    found = []
    for arm in FP16_ARMS:
        found += [fp16_runs.run(task, arm, seed, steps) for seed in range(seeds)]
        tell(f"{task.about}, {arm}: {', '.join(f'{row.end:.4f}' for row in found[-seeds:])}")
    return found


def rounded(seeds: int, steps: int, images: Any, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every arithmetic, update and rate, from each seed."""
    found = []
    for arithmetic, update in ROUNDED:
        for rate in RATES:
            runs = (stochastic_rounding.train(arithmetic, update, rate, seed, images, steps) for seed in range(seeds))
            found += list(runs)
        tell(f"ResNet, {arithmetic} / {update}: {found[-1]['accuracy']:.1%} at rate {RATES[-1]}")
    return found


def with_islands(seeds: int, steps: int, images: Any, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every way to get islands, from each seed."""
    found = []
    for arm in vit_islands.ARMS:
        found += [vit_islands.train(arm, seed, images, steps) for seed in range(seeds)]
        tell(f"ViT, {arm}: {found[-1]['steps_taken']} of {steps} steps taken")
    return found


def verdict(row: Fp16Run, rows: Sequence[Fp16Run]) -> bool:
    """Whether a run diverged, by the demo's rule."""
    twin = next((each for each in rows if each.arm == FP32 and each.seed == row.seed), None)
    return row.status != "done" or not made_progress(row.ends, twin.ends if twin else None)


def scale_table(about: str, rows: Sequence[Fp16Run], steps: int, published: Mapping[str, str]) -> Table:
    made = []
    for arm in dict.fromkeys(row.arm for row in rows):
        here = [row for row in rows if row.arm == arm]
        sound = [row for row in here if not verdict(row, rows)]
        twins = {row.seed: row.end for row in rows if row.arm == FP32}
        gaps = [row.end / twins[row.seed] - 1 for row in sound]
        courses = [course(row.scales, warm_up_steps(steps)) for row in here if arm != FP32]
        scales = [(c.lowest, c.highest) for c in courses if c]
        ends = [power_text(f(c for each in scales for c in each)) for f in (min, max)] if scales else []
        made.append(
            (
                arm,
                f"{len(here) - len(sound)} of {len(here)}",
                with_spread([row.end for row in sound]),
                with_spread(gaps, "+.2%") if arm != FP32 else None,
                mean(float(row.skipped) for row in here),
                " to ".join(ends) or None,
                published.get(arm, NOT_FOUND),
            )
        )
    columns = (
        "loss scale",
        "diverged",
        "held-out loss",
        "gap to FP32",
        "skipped",
        "scale after warm-up",
        "published",
    )
    return Table(f"FP16 throughout: {about}", columns, tuple(made))


def rounding_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    made = []
    for arithmetic, update in ROUNDED:
        cells: list[str] = []
        for rate in RATES:
            here = [r for r in rows if (r["arithmetic"], r["update"], r["rate"]) == (arithmetic, update, rate)]
            cells += [with_spread([r["accuracy"] for r in here], ".1%"), with_spread([r["train_loss"] for r in here])]
        published = "accuracy lost" if update.endswith("nearest") else "restored" if "stoch" in update else NOT_FOUND
        made.append((arithmetic, update, *cells, published if arithmetic == "FP16" else NOT_FOUND))
    heads = (head for rate in RATES for head in (f"accuracy, rate {rate}", f"loss, rate {rate}"))
    return Table("ResNet-8 on digits, SGD, batch 4", ("arithmetic", "update", *heads, "published"), tuple(made))


def island_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    made = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        here = [row for row in rows if row["arm"] == arm]
        taken, widened = (mean(float(r[key]) for r in here) for key in ("steps_taken", "nodes_widened"))
        loss = mean(r["train_loss"] for r in here)
        published = "trains" if arm == vit_islands.ARMS[-1] else "unstable" if arm == "off" else NOT_FOUND
        made.append((arm, taken, loss, widened, published))
    columns = ("islands", "steps taken", "last loss", "nodes in FP32", "published")
    return Table("FP16 ViT whose first attention overflows", columns, tuple(made))


def scale_finding(about: str, rows: Sequence[Fp16Run]) -> str:
    bad = [arm for arm in FP16_ARMS if any(verdict(row, rows) for row in rows if row.arm == arm)]
    return f"{about}: {', '.join(bad) or 'nothing'} diverged; histogram {'too' if HISTOGRAM in bad else 'did not'}."


def rounding_finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much of FP32's training loss at the lowest rate each way to update FP16 weights adds."""
    losses = {
        update: mean(r["train_loss"] for r in rows if (r["update"], r["rate"]) == (update, RATES[-1]))
        for update in ("FP32", "FP16 nearest", "FP16 stochastic")
    }
    full = losses.pop("FP32") or 1.0
    said = ", ".join(f"{update} {(loss or full) / full - 1:+.1%}" for update, loss in losses.items())
    return f"Training loss at rate {RATES[-1]}, updates in FP16 against FP32: {said}."


def island_finding(rows: Sequence[Mapping[str, Any]]) -> str:
    trained = {row["arm"]: row["nodes_widened"] for row in rows if row["steps_taken"] and row["arm"] != "FP32"}
    said = ", ".join(f"{arm} ({nodes} nodes in FP32)" for arm, nodes in trained.items())
    return f"The FP16 ViT trains with {said or 'none of them'}."


def draw(rows: Mapping[str, Sequence[Fp16Run]], figures: Mapping[str, Any], path: Path) -> None:
    """The scales of each task, and accuracies by rounding."""
    made, grid = empty_figure(1, len(rows) + ("rounding" in figures), 5 * (len(rows) + 1), 4.4)
    for axes, (about, each) in zip(grid[0], rows.items(), strict=False):
        for arm in FP16_ARMS[1:]:
            here = [row for row in each if row.arm == arm]
            draw_scales(axes, {arm: [row.scales for row in here]}, [verdict(row, each) for row in here])
        axes.set(xlabel="optimizer step (cross: diverged)", title=about)
    grid[0, 0].legend(frameon=False, fontsize="x-small")
    if "rounding" in figures:
        _draw_rounding(grid[0, -1], figures["rounding"])
    made.savefig(path, dpi=110)


def _draw_rounding(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for i, (arithmetic, update) in enumerate(ROUNDED):
        for rate, colour in zip(RATES, ("#4477aa", "#cc4411"), strict=True):
            here = [r for r in rows if (r["arithmetic"], r["update"], r["rate"]) == (arithmetic, update, rate)]
            label = f"rate {rate}" if not i else None
            axes.scatter([100 * r["accuracy"] for r in here], [i] * len(here), 22, colour, label=label)
    axes.set_yticks(range(len(ROUNDED)), [f"{a} / {u}" for a, u in ROUNDED])
    axes.invert_yaxis()
    axes.set(xlabel="accuracy on held-out digits, %", title="arithmetic / update")
    axes.legend(frameon=False, fontsize="small")
