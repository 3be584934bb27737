"""The section of docs/results.md about coded links of a pipeline: changes of activations against activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.measured_sections import load, source, table
from benchmarks.papers.outcome import with_spread

NAME = "links-cpu.json"
PLAIN, LOSSES = "plain", ("fitted", "held_out")
HEAD = ("links", "bits", "loss on the windows", "held-out loss", "dB, 2nd epoch", "last epoch")


def links(folder: Path) -> list[str]:
    found = load(folder, NAME)
    parts = [
        source(NAME, found),
        f"A transformer of bytes in four stages, trained on {found['samples']} windows for {found['epochs']} epochs.",
        "Gaps to plain links are means over seeds ± standard error.",
        "Losses are taken without codes. The SQNR is that of what links received in an epoch.",
        'Gradients take twice the bits of activations. "Bits" are those of the last epoch, scales included.',
        "First visits take 16 bits unless the row says otherwise: in 2, 3 and 4 bits all epochs together take "
        f"{in_all(found['epochs'])}.",
        "The windows are learned by heart, so held-out losses say little.",
    ]
    for name, regime in found["regimes"].items():
        steps = regime["steps_before"]
        before = f" after {steps} steps on other text" if steps else ""
        parts += ["", f"*{name.capitalize()}*{before}:", "", *table(HEAD, rows(regime["arms"]))]
    return [
        *parts,
        "",
        "Published, from AQ-SGD's abstract: fine-tuned with 2 to 4 bits, models of up to 1.5 B lose no "
        "quality. Its tables were not found, so no figure of theirs stands beside ours.",
    ]


def in_all(epochs: int) -> str:
    """Bits for each element over all epochs with a first one in 16."""
    return ", ".join(f"{(16 + (epochs - 1) * (bits + 0.25)) / epochs:.2f}" for bits in (2, 3, 4))


def rows(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Sequence[str]]:
    """One for each arm; plain links have losses, the others gaps to them, seed by seed."""
    found: list[Sequence[str]] = []
    for name, seeds in arms.items():
        bits = f"{fmean(row['bits_sent'] for row in seeds.values()):.2f}"
        if name == PLAIN:
            losses = [f"{fmean(row[key] for row in seeds.values()):.4f}" for key in LOSSES]
            found.append((name, bits, *losses, "", ""))
            continue
        gaps = [
            with_spread([row[key] / arms[PLAIN][seed][key] - 1 for seed, row in seeds.items()], "+.2%")
            for key in LOSSES
        ]
        db = [f"{fmean(row['received_db'][i] for row in seeds.values()):.1f}" for i in (1, -1)]
        found.append((name, bits, *gaps, *db))
    return found
