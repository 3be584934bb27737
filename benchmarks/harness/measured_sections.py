"""The sections of docs/results.md about what was measured on CPUs: each a title and a function from the folder of results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DEMOS = (
    ('storage, `saved="auto"` (default)', "demo-cpu.json"),
    ('storage, `saved="e4m3"`', "demo-e4m3-cpu.json"),
    ("and FP8 linears, emulated, `hybrid`", "demo-linears-hybrid-cpu.json"),
    ("and FP8 linears, emulated, `e4m3`", "demo-linears-e4m3-cpu.json"),
)
STATES_SHOWN = (
    "e4m3_expanded / e4m3_expanded",
    "dynamic_tree / e4m3_expanded",
    "dynamic_tree / dynamic_tree",
    "int8_companded / int8_companded",
)
MODES = ("fp32", "histogram", "dynamic", "static 1", "static 2^7", "static 2^15", "static 2^22")


def load(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def source(name: str, found: Mapping[str, Any] | None = None) -> str:
    """The file that a section is made of, and where its figures are from."""
    head = found or {}
    torch = head.get("versions", head.get("environment", {})).get("torch")
    facts = [head.get("device"), torch and f"torch {torch}", head.get("date")]
    if head.get("threads"):
        facts.insert(1, f"{head['threads']} thread{'s' if head['threads'] > 1 else ''}")
    told = ", ".join(str(fact) for fact in facts if fact)
    return f"[`{name}`](../benchmarks/results/{name}){': ' + told if told else ''}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown; ``5%`` is written ``5 %``."""
    lines = (f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))
    return [re.sub(r"(\d)%", r"\1 %", line) for line in lines]


def pictures(*names: str) -> str:
    """Links to plots of the same figures."""
    return f"Plots: {', '.join(f'[{name}](../benchmarks/results/{name})' for name in names)}."


def gap(mean: float, error: float | None) -> str:
    return f"{mean:+.2%}" + ("" if error is None else f" ± {error:.2%}")


def demo(folder: Path) -> list[str]:
    """The demo's losses and bytes, each way beside plain Inductor."""
    rows, eager = [], 0
    for label, name in DEMOS:
        found = load(folder, name)
        eager = found["eager_saved_bytes"]
        plain, ours = (_mean_of(found["runs"], arm) for arm in ("inductor", "fp8compile"))
        each = ", ".join(f"{g:+.2%}" for g in found["gap"]["per_seed"])
        losses = (
            f"{plain[0]:.4f}",
            f"{ours[0]:.4f}",
            gap(found["gap"]["mean"], found["gap"]["standard_error"]),
            each,
        )
        rows.append(
            (f"[{label}](../benchmarks/results/{name})", f"{plain[1] / 2**20:.1f}", f"{ours[1] / 2**20:.1f}", *losses)
        )
    size = load(folder, DEMOS[0][1])["size"]
    return [
        f"A Llama ({size['layers']} layers, hidden {size['hidden']}) on Python's own source, {size['steps']} steps, FP32.",
        f"Eager PyTorch saves {eager / 2**20:.1f} MiB for the backward. Gaps are means over seeds ± standard error.",
        "",
        *table(("way", "plain, MiB", "ours, MiB", "loss, plain", "loss, ours", "gap", "each seed"), rows),
    ]


def _mean_of(runs: Iterable[Mapping[str, Any]], arm: str) -> tuple[float, float]:
    own = [run for run in runs if run["arm"] == arm]
    losses = [run["validation_loss"] for run in own]
    return sum(losses) / len(losses), own[0]["saved_bytes"]


def models(folder: Path) -> list[str]:
    found = load(folder, "models-cpu.json")
    ways = ("plain", "auto", "e4m3", "int8")
    rows = []
    for key, row in found.items():
        amp = row["precisions"]["amp"]
        sizes = [
            f"{amp[way]['saved_bytes'] / 1e6:.2f}" for way in ("eager", "plain", "auto" if "auto" in amp else "e4m3")
        ]
        quality = [_decibels(amp.get(way)) for way in ways]
        rate = row["training"]["optimizer"].split("rate ")[1].split(" ")[0]
        trained = row["training"]["gap_last5"]["auto"]
        rows.append((key.split("/")[0], *sizes, *quality, gap(trained["mean"], trained["standard_error"]), rate))
    return [
        source("models-cpu.json", next(iter(found.values()))["training"]),
        "BF16 autocast, no kernels generated. Saved bytes are in MB.",
        "dB is the worst (median) gradient over parameters, against float64.",
        "The loss gap is that of the last 5 of 20 steps to a twin with nothing encoded, 3 seeds.",
        "The rate is the learning rate.",
        "",
        *table(("model", "eager", "plain", "ours", *(f"dB {way}" for way in ways), "loss gap", "rate"), rows),
    ]


def _decibels(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['sqnr']['worst_db']:.1f} ({row['sqnr']['median_db']:.1f})"


def linears(folder: Path) -> list[str]:
    found = load(folder, "linears-models-cpu.json")
    rows = []
    for key, row in found.items():
        amp = row["precisions"]["amp"]
        told, trained = amp["linears"]["linears"], row["training"]["gap_last5"]["linears"]
        counts = f"{told['linears_in_fp8']} of {told['linears_of_the_model']}"
        saved = f"{amp['linears']['saved_bytes'] / 1e6:.2f}"
        quality = _decibels(amp["plain"]), _decibels(amp["linears"])
        rows.append((key.split("/")[0], counts, saved, *quality, gap(trained["mean"], trained["standard_error"])))
    return [
        source("linears-models-cpu.json", next(iter(found.values()))["training"]),
        "BF16 autocast, FP8 emulated, `hybrid`, saved tensors in E4M3. The linear that is left is the output head.",
        "Where the head is the only linear, the gap is that of the saved tensors alone.",
        "",
        *table(("model", "linears in FP8", "saved, MB", "dB plain", "dB ours", "loss gap"), rows),
    ]


def states(folder: Path) -> list[str]:
    """Bits of optimizer states, their errors, and the demo's loss with them."""
    found, trained = load(folder, "optimizer-states-cpu.json"), load(folder, "optimizer-training-cpu.json")
    bits = [
        (
            name,
            *(f"{row[of]['state_bits']:.2f}" for of in ("parameters", "model")),
            f"{row['parameters']['bytes_with_weights']:.2f}",
        )
        for name, row in found["bits"].items()
    ]
    last = max(found["error"], key=int)
    errors = [
        (pair, *(f"{found[which][last]['times_less_than_e4m3'][pair]:.2f}" for which in ("error_nearest", "error")))
        for pair in STATES_SHOWN
    ]
    losses = [(name, gap(row["gap"], row["error"]), str(row["seeds"])) for name, row in trained["summary"].items()]
    return [
        source("optimizer-states-cpu.json", found),
        pictures("optimizer-states-cpu-error.png", "optimizer-states-cpu-range.png", "optimizer-training-cpu.png"),
        "A Llama of 10M parameters. Bits are those of both moments, bytes those of weights and states together.",
        "An optimizer that is given the model knows its embeddings, which keep FP32.",
        "",
        *table(("format", "bits, of parameters", "bits, of the model", "bytes with weights"), bits),
        "",
        f"Error of m / (√v + ε) on the demo's moments at step {last}: how many times less than with plain E4M3.",
        "",
        *table(("first / second moment", "rounded to nearest", "v dithered"), errors),
        "",
        source("optimizer-training-cpu.json", trained),
        "The demo's validation loss against torch's AdamW, mean over seeds ± standard error.",
        "`mix` is dynamic tree for first moments and E4M3 expanded for second.",
        "",
        *table(("states", "gap", "seeds"), losses),
    ]


def stability(folder: Path) -> list[str]:
    found = load(folder, "stability-cpu.json")
    rows = [
        (
            name,
            f"{row['diverged']:.0%}",
            "" if row["median_gap"] is None else f"{row['median_gap']:+.2%}",
            str(row["runs"]),
        )
        for name, row in found["summary"].items()
    ]
    return [
        source("stability-cpu.json", found),
        pictures("stability-cpu.png"),
        "The ablation of Dettmers et al. in small: one layer, 80 steps. `v to 0` lets small second moments round to 0.",
        "",
        *table(("states", "diverged", "median gap to FP32", "runs"), rows),
    ]


def stochastic_rounding(folder: Path) -> list[str]:
    found = load(folder, "stochastic-rounding-cpu.json")
    rates = list(next(iter(found["summary"].values())))
    rows = [(name, *(f"{row[rate]['accuracy']:.1%}" for rate in rates)) for name, row in found["summary"].items()]
    return [
        source("stochastic-rounding-cpu.json", found),
        pictures("stochastic-rounding-cpu.png"),
        f"{found['model']['about']}, batch {found['model']['batch']}: accuracy by learning rate.",
        "",
        *table(("arithmetic / weights and their update", *rates), rows),
    ]


def loss_scaling(folder: Path) -> list[str]:
    found = load(folder, "loss-scaling-cpu.json")
    lines = [
        source("loss-scaling-cpu.json", found),
        pictures("loss-scaling-cpu.png"),
        "Pure FP16 against FP32. ± is the standard deviation over seeds. A mode that takes no step has no loss.",
    ]
    for task in found["tasks"].values():
        rows = [_scaled(mode, task["summary"][mode]) for mode in MODES if mode in task["summary"]]
        lines += ["", f"{task['about']}, {task['steps']} steps:", ""]
        lines += table(
            ("mode", "loss", "against FP32's", "accuracy", "steps skipped", "scale", "seeds", "diverged"), rows
        )
    return lines


def _scaled(mode: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    trained = row["diverged"] < row["seeds"]
    gap_to_fp32 = f"{row['gap'][0]:+.2%} ± {row['gap'][1]:.2%}" if trained and row["gap"] else "-"
    loss = "{:.3f} ± {:.3f}".format(*row["validation_loss"]) if trained and row["validation_loss"] else "-"
    accuracy = f"{row['accuracy'][0]:.1%}" if trained and row["accuracy"] else "-"
    skipped = f"{row['skipped'][0]:.1f}" if row["skipped"] else "-"
    scale = "-" if not row["scale"] else f"{row['scale']['lowest']:g} to {row['scale']['highest']:g}"
    return mode, loss, gap_to_fp32, accuracy, skipped, scale, str(row["seeds"]), str(row["diverged"])


def islands(folder: Path) -> list[str]:
    found = load(folder, "islands-cpu.json")
    rows = [
        (s["name"], s["what"], *(_sqnr(s[way]) for way in ("eager", "autocast", "ours"))) for s in found["snippets"]
    ]
    return [
        source("islands-cpu.json", found),
        "SQNR in dB against float64, in FP16. `-` is inf or NaN; 0 is all zeros.",
        "",
        *table(("", "", "eager", "autocast", "fp8compile"), rows),
    ]


def _sqnr(value: float | str) -> str:
    return ("-" if value == "not finite" else value) if isinstance(value, str) else f"{value:.0f}"


def group_size(folder: Path) -> list[str]:
    found = load(folder, "group-size-cpu.json")
    sizes = list(next(iter(found["sqnr_db"].values())))
    rows = [(case, *(f"{row[size]['worst_db']:.1f}" for size in sizes)) for case, row in found["sqnr_db"].items()]
    head = ("worst gradient, dB", *(f"group of {size}" for size in sizes))
    return [source("group-size-cpu.json", found), f"{found['about']}.", "", *table(head, rows)]


def operators(folder: Path) -> list[str]:
    found = load(folder, "op-database-cpu.json")
    kinds = ("encoded", "declined", "exact", "undefined", "unsupported", "eager fails", "wrong")
    rows = [(dtype, *(str(counts.get(kind, 0)) for kind in kinds)) for dtype, counts in found["summary"].items()]
    bad = [(f"`{each['op']}`", each["dtype"], each["detail"], f"{each['bar']:.1f} dB") for each in found["bad"]]
    return [
        source("op-database-cpu.json", found["environment"]),
        "Every operator of PyTorch's database against eager, by outcome. Groups of 16 and FP8 linears, emulated.",
        "",
        *table(("dtype", *kinds), rows),
        "",
        "Below the bar of the sweep, which is 20 dB or what the operator's own rounding leaves:",
        "",
        *table(("operator", "dtype", "worst gradient", "bar"), bad),
    ]


def checked(folder: Path) -> list[str]:
    found = load(folder, "check-cpu.json")
    rows = []
    for name, row in found.items():
        worst = min(float(each["db"]) for each in row["rows"] if each["verdict"] != "rounding")
        after = "" if row["worst_after_db"] is None else f"{row['worst_after_db']:.1f}"
        rows.append(
            (name, row["about"], row["precision"], f"{worst:.1f}", after, str(row["steps"]), f"{row['seconds']:.0f}")
        )
    return [
        source("check-cpu.json", next(iter(found.values()))),
        "`fp8compile.check` on whole models: the worst gradient as the recipe stands, and with the repair that was found.",
        "",
        *table(("model", "", "precision", "worst, dB", "repaired, dB", "steps", "seconds"), rows),
    ]
