"""Coded links of a pipeline: changes of a sample's activation (AQ-SGD) against the activation itself, at the same bits.

    python benchmarks/studies/bench_links.py --json benchmarks/results/links-cpu.json

A transformer of bytes in four stages of one block (``link_runs``), trained on the same windows in each epoch, in another
order: fine-tuned after a training on other text, as AQ-SGD is meant for; with dropout before each link; and from new weights.
Gradients go back in twice the bits, as in the paper's fw2 bw4, fw3 bw6 and fw4 bw8. First visits are in 16 bits, or in as
many as the others: then all epochs together take as many bytes as direct codes.

For each arm and seed: the loss on the windows trained on and on held-out text, both without codes; by epoch the SQNR of what
links received; bits for each element that they sent in the last epoch, scales included.

What the JSON already has is not run again; it is written after every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.link_runs import Arm, pretrained, run

SAMPLES, EPOCHS, SEEDS, DROPOUT = 256, 6, 3, 0.1
BITS = {2: 4, 3: 6, 4: 8}  # backward bits of each


def arms(bits: Sequence[int], dropout: float = 0.0) -> dict[str, Arm]:
    """By name: plain links, and both ways of coding them."""
    found = {"plain": Arm(dropout=dropout)}
    for each in bits:
        for changes, name in ((True, "changes"), (False, "direct")):
            found[f"{each} bit, {name}"] = Arm(each, BITS[each], changes, dropout)
    return found


def alike(bits: Sequence[int]) -> dict[str, Arm]:
    """Changes whose first visits take no more bits than the others: in all epochs together as many bytes as direct codes."""
    return {f"{each} bit, changes, {each} first": Arm(each, BITS[each], changes=True, first=each) for each in bits}


# By name: steps of training before, the learning rate, the arms
REGIMES: Mapping[str, tuple[int, float, Mapping[str, Arm]]] = {
    "fine-tuned": (600, 1e-3, arms((2, 3, 4)) | alike((2, 3, 4))),
    f"fine-tuned, dropout {DROPOUT:g}": (600, 1e-3, arms((4,), DROPOUT)),
    "from new weights": (0, 3e-3, arms((2, 4))),
}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Changes against direct codes on the links of a pipeline.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="a few samples, hardly trained: does it run?")
    arguments = parser.parse_args(words)
    count, epochs = (16, 2) if arguments.quick else (SAMPLES, EPOCHS)
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    found = {**environment(), "samples": count, "epochs": epochs, "regimes": before.get("regimes", {})}
    for name, (steps, rate, its_arms) in REGIMES.items():
        regime = found["regimes"].setdefault(name, {"steps_before": steps, "rate": rate, "arms": {}})
        for seed in range(1 if arguments.quick else arguments.seeds):
            for arm_name, arm in its_arms.items():
                rows = regime["arms"].setdefault(arm_name, {})
                if str(seed) in rows:
                    continue
                torch.manual_seed(seed)  # of the dropout
                weights = pretrained(seed, min(steps, 2) if arguments.quick else steps)
                rows[str(seed)] = run(arm, seed, weights, count, epochs, rate, lambda text: print(text, flush=True))
                if arguments.json:
                    write_json(arguments.json, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
