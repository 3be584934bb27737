"""The demo trained with encoded optimizer states, against torch.optim.AdamW in FP32: validation loss after 300 steps.

    python benchmarks/studies/bench_optimizer_training.py --seeds 3

Every arm sees the same initial weights, batches, rates and clipping; only the optimizer differs (``demo_runs``). The gap is
(arm - torch) / torch of the validation loss from the same seed, positive where the arm is worse; mean +- standard error
over seeds. Arm "fp32" is our optimizer with whole states: its gap is what another order of roundings does. Arms "torch rate
+ ..." are yardsticks: 3 %, what updates that are longer do (``state_drift``); 0.1 %, how far a seed's outcome moves with
anything at all. Arms "bf16 ..." hold the parameters in BF16, with stochastic rounding (none), 8 more bits (split) or an FP32
copy; "torch bf16" is torch.optim.AdamW on BF16 parameters, all rounded to nearest. Claim: at most 0.3 % either way for
e4m3_expanded, dynamic_tree, int8_companded.

Runs that the JSON already has are not run again; it is written after every run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.demo_arms import gaps_to, parse, row_of, shown, train
from benchmarks.studies.demo_runs import Demo
from fp8compile.extras.demo.results import LIMIT, mean_of
from fp8compile.optim import AdamW
from fp8compile.reporting.figure import empty_figure

REFERENCE = "torch"
RATES = {"torch rate + 0.1 %": 1.001, "torch rate + 3 %": 1.03}
MIX = ("dynamic_tree", "e4m3_expanded")
FORMATS: Mapping[str, Any] = {
    "e4m3_expanded": "e4m3_expanded",
    "dynamic_tree": "dynamic_tree",
    "int8_companded": "int8_companded",
    "mix": MIX,
    "e4m3": "e4m3",
    "4bit": "4bit",
    "4bit_log": "4bit_log",
    "2bit v": ("int4_companded", "log2"),
    "4bit_log m": ("int4_companded", "fp32"),
    "4bit_log v": ("fp32", "log4"),
    "bf16": "bf16",
    "fp32": "fp32",
}
MASTERS = {f"bf16 {master}": master for master in ("none", "split", "fp32")}
ARMS = (REFERENCE, *RATES, *FORMATS, "torch bf16", *MASTERS)
MOST_SEEDS = {"torch bf16": 1} | dict.fromkeys(MASTERS, 1)  # a comparison, not the claim


def make(arm: str, model: nn.Module, settings: dict[str, Any], compiled: bool) -> torch.optim.Optimizer:
    """The optimizer of an arm."""
    settings = settings | {"lr": RATES.get(arm, 1.0) * settings["lr"]}
    if arm in (REFERENCE, *RATES, "torch bf16"):
        return torch.optim.AdamW(model.parameters(), **settings)
    fmt, master = FORMATS.get(arm, "e4m3_expanded"), MASTERS.get(arm, "none")
    return AdamW(model, state_format=fmt, master=master, compiled=compiled, **settings)


def run_arm(arm: str, seed: int, demo: Demo) -> dict[str, Any]:
    """One run, ready for JSON."""
    last: list[tuple[torch.optim.Optimizer, nn.Module]] = []

    def keep(step: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        last[:] = [(optimizer, model)]

    dtype = torch.bfloat16 if "bf16 " in arm or arm == "torch bf16" else torch.float32
    run = demo.run(lambda model, settings: make(arm, model, settings, demo.compiled), seed, dtype, keep)
    row = row_of(run)
    optimizer, model = last[0]
    if isinstance(optimizer, AdamW):
        report = optimizer.report()
        moments = {p.name: {s.format for s in p.states if s.name.startswith("exp_avg")} for p in report.parameters}
        whole = {name for name, formats in moments.items() if formats == {"fp32"}}
        numel = sum(p.numel() for p in model.parameters())
        encoded = sum(p.numel() for name, p in model.named_parameters() if name not in whole)
        row |= {"state_bits_per_parameter": report.bits_per_parameter, "share_encoded": encoded / numel}
    return row


def gaps(runs: Mapping[str, Mapping[str, Any]], arm: str) -> list[float]:
    """The arm's gap to the reference for each seed that both finished."""
    return gaps_to(REFERENCE, runs, arm)


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean gap, its error and the verdict for each arm."""
    found = {}
    for arm in runs:
        mean = mean_of(gaps(runs, arm))
        if mean is not None and arm != REFERENCE:
            found[arm] = {"gap": mean.mean, "error": mean.error, "seeds": mean.n, "within": abs(mean.mean) <= LIMIT}
    return found


def table(found: dict[str, Any]) -> Table:
    """The gaps as people read them."""
    title = f"{found['training']['steps']} steps"
    made = Table("arm", "state bits", "encoded", "validation loss", "gap to torch", title=title)
    for arm, rows in found["runs"].items():
        here, first = found["summary"].get(arm), next(iter(rows.values()))
        loss = statistics.fmean(row["validation_loss"] for row in rows.values())
        error = f" ± {here['error']:.2%}" if here and here["error"] is not None else ""
        bits = f"{first['state_bits_per_parameter']:.2f}" if "state_bits_per_parameter" in first else "64"
        share = f"{first['share_encoded']:.1%}" if "share_encoded" in first else "-"
        made.add_row(arm, bits, share, f"{loss:.4f}", f"{here['gap']:+.2%}{error} ({here['seeds']})" if here else "")
    return made


def plot(found: dict[str, Any], path: Path) -> None:
    """Every seed's gap, the mean, and the limit."""
    made, grid = empty_figure(1, 1, 8, 4.2)
    axes, arms = grid[0, 0], [arm for arm in found["runs"] if arm in found["summary"]]
    for i, arm in enumerate(arms):
        each = [100 * g for g in gaps(found["runs"], arm)]
        axes.scatter(each, [i] * len(each), s=22, color="#4477aa", zorder=3)
        here = found["summary"][arm]
        error = 100 * (here["error"] or 0)
        axes.errorbar(100 * here["gap"], i, xerr=error, fmt="|", ms=14, color="#cc4411", capsize=3)
    axes.axvline(0, color="#777777", linewidth=1)
    for limit in (-LIMIT, LIMIT):
        label = f"limit, ±{LIMIT:.1%}" if limit > 0 else None
        axes.axvline(100 * limit, color="black", linestyle=":", linewidth=0.8, label=label)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set(xlabel=f"validation loss, % above torch.optim.AdamW in FP32, {found['training']['steps']} steps")
    axes.legend(frameon=False, fontsize="small")
    made.savefig(path, dpi=120)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    about = "Training with encoded optimizer states, against torch in FP32."
    arguments = parse(words, about, "optimizer-training-cpu.json", ARMS, REFERENCE, ",")
    found = train(arguments, not arguments.quick, run_arm, summary, MOST_SEEDS)
    plot(found, arguments.json.with_suffix(".png"))
    return shown(found, table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
