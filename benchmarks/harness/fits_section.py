"""The section of docs/results.md about the peak that ``fits`` tells."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.measured_sections import load, source, table

NAME = "fits-cpu.json"
WITHIN = 0.03


def fits(folder: Path) -> list[str]:
    found = load(folder, NAME)
    models = found["models"]
    right = sum(abs(m["generated"] / m["measured"] - 1) <= WITHIN for m in models.values())
    rows = [
        (
            name,
            str(m["convolutions"] or "-"),
            f"{m['measured'] / 1e6:.2f}",
            _share(m, "explained"),
            _share(m, "generated"),
        )
        for name, m in models.items()
    ]
    return [
        source(NAME, found),
        "One step of forward and backward, in MB: the most that the allocator has given, and what `fits` tells over it.",
        "Explained is `fp8compile.explain`, an estimate before any code is generated.",
        "Generated is `fp8compile.report` afterwards.",
        f"Generated is within {WITHIN * 100:.0f} % for {right} of {len(models)} models.",
        "What it leaves out is what libraries take while they compute, convolutions most of all.",
        "",
        *table(("model", "convolutions", "measured", "explained", "generated"), rows),
    ]


def _share(model: dict[str, int], figure: str) -> str:
    return f"{model[figure] / model['measured']:.3f}"
