"""COAT's table on states of the demo's training, the range of groups before and after expansion, and bits per parameter.

    python benchmarks/studies/bench_optimizer_states.py

    error   MSE of m / (sqrt(v) + eps) for every pair of formats (``reproduce.state_errors``), on the encoded parameters of
            the demo trained in FP32 with torch.optim.AdamW, after several numbers of steps; relative to E4M3 for both.
            Paper: 1.63 times less with expansion, 2.69 times less with its best mix (dynamic exponent + expansion for m).
            Twice: v dithered, as it is stored, E4M3's too; and "error_nearest" as in the paper.
    range   max / min of the non-zero magnitudes of each group of 128, and k (COAT, figure 2).
    drift   of states encoded at every step, against FP32 states of the same gradients (``state_drift``).
    bits    counted from the storages in ``optimizer.state`` of a model of 10 million parameters; beside it what the
            elements alone come to, which is less where a tensor is a view of a larger storage.

A table, two pictures and the JSON go to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.papers import state_errors
from benchmarks.papers.state_errors import Errors, Moments
from benchmarks.studies.demo_runs import CPU, Demo
from benchmarks.studies.state_drift import Drift, watched
from fp8compile.extras.demo.model import SIZES, Size, build_model
from fp8compile.optim import AdamW
from fp8compile.optim.placement import MIN_NUMEL
from fp8compile.optim.plan import MASTERS
from fp8compile.reporting.figure import empty_figure

Row = dict[str, Any]
STEPS = (50, 150, 300)
TEN_MILLION = Size("10M", 512, 1376, 3, 8, 64, 1, 1, 1e-3, 1)
FORMATS: tuple[Any, ...] = (
    "e4m3_expanded",
    "e5m2_expanded",
    "dynamic_tree",
    ("dynamic_tree", "e4m3_expanded"),
    "int8_companded",
    "e4m3",
    "e5m2",
    "int8",
    "4bit",
    "4bit_log",
    ("int4_companded", "log2"),
    ("dynamic4", "rank1_linear4"),
    "bf16",
    "fp32",
)


def training_states(demo: Demo, seed: int, at: Sequence[int]) -> tuple[dict[int, list[Moments]], Drift]:
    """m and v of every parameter that would be encoded, after those numbers of steps; and how encoded states drift."""
    found: dict[int, list[Moments]] = {}
    drifts: list[Drift] = []

    def make(model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        drifts.append(Drift(watched(model), settings["betas"], at))
        drifts[0].watch(optimizer)
        return optimizer

    def take(step: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if step in at:
            embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
            each = {n: p for n, p in model.named_parameters() if p.numel() >= MIN_NUMEL and id(p) not in embeddings}
            states = {name: optimizer.state[p] for name, p in each.items()}
            found[step] = [Moments(n, s["exp_avg"].clone(), s["exp_avg_sq"].clone()) for n, s in states.items()]

    demo.run(make, seed, watch=take)
    return found, drifts[0]


def error_rows(by_step: dict[int, list[Moments]], rounding: str) -> dict[str, Any]:
    """The tables by step, and the ratios to plain E4M3 of each, v rounded alike."""
    rows: dict[str, Any] = {}
    for step, several in by_step.items():
        errors = Errors(rounding)
        for moments in several:
            errors.add(moments)
        rows[str(step)] = {
            "elements": errors.elements,
            "mean_square_of_m_over_root_v": errors.mean_square / errors.elements,
            "v_above_0_that_plain_e4m3_rounds_to_0": errors.flushed,
            "mse": errors.table(),
            "times_less_than_e4m3": state_errors.ratios(errors.table()),
            "mse_without_those": errors.table(kept=True),
            "times_less_than_e4m3_without_those": state_errors.ratios(errors.table(kept=True)),
        }
    return rows


def bits_row(size: Size, state_format: Any, dtype: torch.dtype = torch.float32, master: str = "none") -> Row:
    """Bits per parameter of the states of a model, by whether the optimizer knows which parameters are embeddings."""
    row: dict[str, Any] = {}
    for knows in ("parameters", "model"):
        model = build_model(size, 0, CPU).to(dtype)
        given = model if knows == "model" else model.parameters()
        optimizer = AdamW(given, state_format=state_format, master=master, compiled=False)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        numel = sum(p.numel() for p in model.parameters())
        states = stored(optimizer)
        weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
        nbytes = bytes_of(states)
        bits = {"state_bits": 8 * nbytes / numel, "bytes_with_weights": (nbytes + weights) / numel}
        bits["state_bits_of_elements"] = 8 * sum(t.numel() * t.element_size() for t in states) / numel
        encoded = sum(p.numel() for g in optimizer.param_groups for p in g["params"] if _encoded(optimizer, p, g))
        row[knows] = bits | {"parameters": numel, "share_encoded": encoded / numel}
    return row


def stored(optimizer: AdamW) -> list[torch.Tensor]:
    """What ``optimizer.state`` holds, the step counters left out (4 bytes a tensor, as in torch)."""
    return [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Of their distinct storages."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def _encoded(optimizer: AdamW, p: torch.Tensor, group: dict[str, Any]) -> bool:
    return optimizer.placement(p, group).reason is None


# ------------------------------------------------------------------------------------------------- pictures


def plot_errors(rows: dict[str, Any], path: Path) -> None:
    """How many times smaller than E4M3's the error of each pair is, after the last of the steps."""
    step, last = list(rows.items())[-1]
    made, grid = empty_figure(1, 1, 11, 7.5)
    axes, table = grid[0, 0], last["mse"]
    names, columns = list(table), list(table["e4m3"])
    plain = table["e4m3"]["e4m3"]
    times = [[plain / max(table[a][b], 1e-30) for b in columns] for a in names]
    axes.imshow([[max(-2.0, min(2.0, float(torch.tensor(t).log2()))) for t in row] for row in times], cmap="RdYlGn")
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
    axes.set_yticks(range(len(names)), names)
    for i, row in enumerate(times):
        for j, t in enumerate(row):
            text = "exact" if t > 1e6 else f"{t:.2g}" if t < 0.1 or t >= 100 else f"{t:.2f}"
            axes.text(j, i, text, ha="center", va="center", fontsize="small")
    axes.set(xlabel="format of v", ylabel="format of m", title=f"error of m / √v, times less than E4M3; {step} steps")
    made.savefig(path, dpi=110)


def plot_ranges(found: dict[str, dict[str, Any]], path: Path) -> None:
    """COAT's figure 2: dynamic range of the groups before and after, and k."""
    made, grid = empty_figure(2, 2, 10, 6.4)
    full = float(torch.tensor(448 * 512.0).log10())
    for row, state in zip(grid, ("m", "v"), strict=True):
        here = found[state]
        row[0].hist(here["log10_range"].tolist(), bins=60, color="#bbbbbb", label="before")
        for target, colour in (("code", "#4477aa"), ("paper", "#cc4411")):
            after, k = here[f"log10_range_after {target}"], here[f"k {target}"]
            row[0].hist(after.tolist(), bins=20, color=colour, histtype="step", label=f"after, {target}'s target")
            edges = [(n - 0.5) / 8 for n in range(round(float(k.min()) * 8) - 1, round(float(k.max()) * 8) + 3)]
            row[1].hist(k.tolist(), edges, color=colour, histtype="step", label=f"{target}'s target")
        row[0].axvline(full, color="black", linestyle=":", label="E4M3's whole range")
        row[0].set(xlabel=f"log10 of max / min in a group of {state}", ylabel="groups")
        row[1].set(xlabel=f"k of {state}", ylabel="groups")
        for axes in row:
            axes.legend(frameon=False, fontsize="small", loc="upper center" if axes is row[0] else "upper right")
    made.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------ all


def tables(found: dict[str, Any]) -> list[Table]:
    """The pairs that matter and the bits, as people read them."""
    errors = [_errors(found[key], how) for key, how in (("error", "dithered"), ("error_nearest", "to nearest"))]
    drift = Table("steps", "parameter", "format", "v / v in FP32", "geometric", "length of the step", title="drift")
    for step, by_name in found["drift"].items():
        for name, by_format in by_name.items():
            for fmt, row in by_format.items():
                drift.add_row(step, name, fmt, *(f"{row[key]:.4f}" for key in ("v", "v_geometric", "step")))
    columns = "state_format", "bits", "elements alone", "embeddings FP32", "weights + states, bytes"
    bits = Table(*columns, title="10M parameters")
    for name, row in found["bits"].items():
        plain, knowing = row["parameters"], row["model"]
        each = [plain[key] for key in ("state_bits", "state_bits_of_elements")]
        each += [knowing["state_bits"], plain["bytes_with_weights"]]
        bits.add_row(name, *(f"{x:.3f}" for x in each))
    return [*errors, drift, bits]


def _errors(by_step: dict[str, Any], rounding: str) -> Table:
    made = Table(title=f"MSE of m / (√v + eps), times less than E4M3 for both, v {rounding}")
    made.add_column("m / v")
    last = list(by_step.values())[-1]["times_less_than_e4m3"]
    for step in by_step:
        made.add_column(f"{step} steps", justify="right")
    for pair in sorted(last, key=lambda pair: -last[pair]):
        if "fp32" not in pair and "bf16" not in pair:
            made.add_row(pair, *(f"{each['times_less_than_e4m3'][pair]:.3g}" for each in by_step.values()))
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Errors, ranges and bits of encoded optimizer states.")
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "optimizer-states-cpu.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model: does it run?")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(words)
    at = (1, 3) if arguments.quick else STEPS
    size = replace(SIZES["tiny"], rate=1e-3) if arguments.quick else SIZES["cpu"]
    demo = Demo(size, at[-1], compiled=not arguments.quick)
    by_step, drift = training_states(demo, arguments.seed, at)
    groups = state_errors.ranges(by_step[at[-1]])
    formats, counted = (FORMATS[:1], SIZES["tiny"]) if arguments.quick else (FORMATS, TEN_MILLION)
    found = {
        **demo.about(),
        **environment(),
        "error": error_rows(by_step, "dithered"),
        "error_nearest": error_rows(by_step, "nearest"),
        "range": {state: {n: state_errors.spread(x) for n, x in here.items()} for state, here in groups.items()},
        "drift": drift.rows,
        "bits": {f if isinstance(f, str) else " / ".join(f): bits_row(counted, f) for f in formats},
    }
    for master in MASTERS:
        name = f"e4m3_expanded, BF16 weights, master {master}"
        found["bits"][name] = bits_row(counted, "e4m3_expanded", torch.bfloat16, master)
    write_json(arguments.json, found)
    plot_errors(found["error"], arguments.json.with_name(f"{arguments.json.stem}-error.png"))
    plot_ranges(groups, arguments.json.with_name(f"{arguments.json.stem}-range.png"))
    for table in tables(found):
        Console(width=120).print(table, "")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
