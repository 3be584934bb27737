"""The section of docs/results.md about the peak of a whole training step with its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.measured_sections import load, source, table

NAME = "whole-step-cpu.json"
ONE_GRAPH = "train-step-cpu.json"
PLAIN = "plain"
CARDS = (60, 24)  # GB
PARTS = ("weights", "gradients", "states", "activations", "workspace", "running", "peak")


def predicted_step(folder: Path) -> list[str]:
    found = load(folder, NAME)
    lines = [
        source(NAME, found),
        "`explain` of the whole model on the meta device, BF16, GB (10^9 bytes).",
        "Plain is BF16 weights with FP32 masters and moments.",
        "Ours is AdamW with `e4m3_expanded` moments and split masters, linears in 16 bit.",
        "The workspace is what lives at the peak beside what is saved, logits among it.",
        "Running is what forward and backward have alive at their most: gradients come while activations go.",
        "The peak is running, weights and states. Where all gradients are the most, no memory budget makes it less.",
    ]
    for name, rows in found["predicted"].items():
        least = min(row["peak"] for row in rows.values()) / 1e9
        cells = [
            (recipe, *(f"{row[part] / 1e9:.2f}" for part in PARTS), _ratio(row, rows[PLAIN]))
            for recipe, row in rows.items()
        ]
        verdicts = " ".join(f"A card of {card} GB {_holds(card, least)}." for card in CARDS)
        lines += ["", f"{name}. {verdicts}", "", *table(("", *PARTS, "of plain"), cells)]
    return lines


def measured_step(folder: Path) -> list[str]:
    found = load(folder, NAME)
    plain, *_ = found["measured"].values()
    rows = [
        (name, *(f"{row[part] / 1e6:.0f}" for part in ("weights", "states", "peak")), _ratio(row, plain))
        for name, row in found["measured"].items()
    ]
    return [
        source(NAME, found),
        "A Llama of the 1B model's proportions, hidden size 512, 4 layers, 32,064 words, 1 x 2048 tokens, on a CPU.",
        "In MB: all that is allocated at the peak of forward, backward and step, with weights and states.",
        "",
        *table(("", "weights", "states", "peak", "of plain"), rows),
    ]


def one_graph(folder: Path) -> list[str]:
    found = load(folder, ONE_GRAPH)
    (one, graph), (three, calls), (reordered, other) = found["losses"].items()
    off = _differences(graph["losses"], calls["losses"])
    bound = _differences(other["losses"], calls["losses"])
    memory = found["memory"]
    rows = [(name, f"{row['gradients'] / 1e6:.2f}", f"{row['peak'] / 1e6:.2f}") for name, row in memory.items()]
    alive = memory[one]["gradient_peak"] / memory[one]["gradients"]
    return [
        source(ONE_GRAPH, found),
        f"The demo, {found['steps']} steps with clipping and a schedule. The difference of a loss to that of the {three}, "
        f"mean and largest: {off} as {one}, {bound} of {reordered}.",
        f"The last loss is {graph['losses'][-1]:.5f} as {one}, {calls['losses'][-1]:.5f} by {three}.",
        f"Graphs compiled: {graph['compilations']}. The JSON's times were taken beside other work and show nothing.",
        "",
        "A Llama of 12 layers, hidden size 128, 1 x 64 tokens, no clipping. In MB: all gradients.",
        "The peak is what a step allocates beyond what was there before.",
        f"By the order of the graph {alive:.0%} of the gradients' bytes are alive at one time.",
        "",
        *table(("", "gradients", "peak"), rows),
    ]


def _differences(found: Sequence[float], expected: Sequence[float]) -> str:
    off = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return f"{sum(off) / len(off):.1e} and {max(off):.1e}"


def _ratio(row: Mapping[str, int], plain: Mapping[str, int]) -> str:
    return f"{row['peak'] / plain['peak']:.2f}"


def _holds(card: int, needed: float) -> str:
    return f"holds the least of it, {needed:.2f} GB" if needed <= card else f"lacks {needed - card:.2f} GB for it"
