"""The sections of docs/results.md about what a compilation takes: on a CPU, and for an H100 without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

LOWERED = "compile-sm90-lowered.json"
PLAIN = "inductor"


def compile_time(folder: Path) -> list[str]:
    found = load(folder, "compile-time-cpu.json")
    facts = source("compile-time-cpu.json", {**found, "versions": {"torch": found["torch"]}})
    lines = [facts, f"{found['what'][:1].upper()}{found['what'][1:]}: the least of the runs."]
    for title, about in (("without kernels", "Without kernel generation"), ("whole", "Whole")):
        part = found[title]
        depths = list(next(iter(part["seconds"].values())))
        gaps = [f"a layer, {less} to {more}: of plain Inductor" for less, more in pairwise(depths)]
        rows = [
            (name, *(f"{min(runs):.1f}" for runs in part["seconds"][name].values()), *(f"{r:.2f}" for r in ratios))
            for name, ratios in part["over_plain"].items()
        ]
        lines += ["", f"{about}:", "", *table(("", *(f"{depth} layers, s" for depth in depths), *gaps), rows)]
    kernels = [(name, *map(str, by_depth.values())) for name, by_depth in found["whole"]["kernels"].items()]
    depths = list(next(iter(found["whole"]["kernels"].values())))
    return [*lines, "", "Different kernels compiled:", "", *table(("", *(f"{d} layers" for d in depths)), kernels)]


def compile_lowered(folder: Path) -> list[str]:
    found = load(folder, LOWERED)
    rows = [
        (name, depth, pipeline, *_least(runs), f"{_total(runs) / _total(by_pipeline[PLAIN]):.2f}")
        for name, by_depth in found["seconds"].items()
        for depth, by_pipeline in by_depth.items()
        for pipeline, runs in by_pipeline.items()
    ]
    head = (
        "model",
        "layers",
        "recipe",
        "to text, s",
        "to cubins, s",
        "kernels",
        "configurations",
        "of plain Inductor",
    )
    return [
        source(LOWERED, found),
        "A Llama and a ViT of hidden size 512, and ResNet-50 of 8 images: forward and backward, compiled for an H100.",
        "Nothing is cached. A model of one layer takes what `fp8compile.compile_blocks` takes for blocks that are alike.",
        "CPU seconds: from the model to the text of kernels and wrapper, and from there to cubins.",
        "A configuration is one way to block a kernel; the tuner compiles all.",
        "",
        *table(head, rows),
    ]


def _least(runs: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    seconds = (f"{min(run[part] for run in runs):.1f}" for part in ("to_text", "to_cubins"))
    return *seconds, str(int(runs[0]["kernels"])), str(int(runs[0]["configurations"]))


def _total(runs: Sequence[Mapping[str, float]]) -> float:
    return min(run["to_text"] for run in runs) + min(run["to_cubins"] for run in runs)


def compile_depth(folder: Path) -> list[str]:
    found = load(folder, "compile-depth-cpu.json")
    facts = source("compile-depth-cpu.json", {**found, "versions": {"torch": found["torch"]}})
    rows = [
        (layers, way, arm, *_cold_and_warm(arms[arm], arms[PLAIN]))
        for way, by_depth in found["seconds"].items()
        for layers, arms in by_depth.items()
        for arm in arms
    ]
    return [
        facts,
        f"{found['what'][:1].upper()}{found['what'][1:]}. Warm: another process finds what the first left in the cache.",
        "*Whole* is `torch.compile(model)`, *blocks* is `fp8compile.compile_blocks(model)`, *regions* are layers under",
        "`torch.compiler.nested_compile_region`.",
        "",
        *table(("layers", "way", "recipe", "cold, s", "of plain", "warm, s", "of plain"), rows),
    ]


def _cold_and_warm(runs: Sequence[Any], plain: Sequence[Any]) -> tuple[str, ...]:
    least = [(min(run[i] for run in runs), min(run[i] for run in plain)) for i in range(2)]
    return tuple(text for ours, theirs in least for text in (f"{ours:.1f}", f"{ours / theirs:.2f}"))
