"""Memory of a training step *predicted* for whole models on 1 to 8 GPUs, beside COAT's own figures.

    per GPU = (weights + gradients + states) / GPUs + 2 layers gathered + activations + logits
    activations = layers * (units kept per layer) * U,      U = batch * sequence * hidden * 2 bytes
    logits      = batch * sequence * vocabulary * (2 + 4)   bytes: BF16, and FP32 in the loss

FSDP shards weights, gradients and states evenly and gathers two layers' weights at a time (the running one, the next).
Units kept per layer are counted in the graphs of a layer of Llama-2-7B's shape (ffn / hidden is 2.69; 2.70 and 2.69 in the
others). Left out: the working memory inside a layer, the allocator's fragmentation, the CUDA context (about 0.5 GB).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GB = 1e9
SEQUENCE = 2048
GPUS = (1, 2, 4, 8)
GATHERED = 2  # bytes of a weight that products read


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    ffn: int
    vocabulary: int = 32000

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden + self.hidden


MODELS: Mapping[str, Model] = {
    "7B": Model(32, 4096, 11008),
    "13B": Model(40, 5120, 13824),
    "30B": Model(60, 6656, 17920),
}


@dataclass(frozen=True)
class Setup:
    """Bytes per parameter, and which pipeline's activations."""

    pipeline: str
    weights: float
    gradients: float
    states: float


def setups(plain: str) -> dict[str, Setup]:
    """Plain: BF16 beside FP32 master weights and moments. Ours: BF16 weights with 8 more bits, both moments 16.65 bits."""
    return {
        "plain Inductor, BF16, FP32 AdamW": Setup(plain, 2, 2, 12),
        "ours, default recipe, split weights": Setup("both", 3, 2, 16.65 / 8),
    }


# COAT's published figures for Llama-2-7B on H100s at sequence 2048: its own claims. Its batch on four is not known here.
CLAIMS = {
    ("7B", 1): "COAT's own claim: peak 79.3 GB at batch 1",
    ("7B", 4): "COAT's own claim, activations/peak GB: BF16 25.8/55.1, Transformer Engine 21.9/51.1, COAT 16.9/35.6",
}


def predicted(model: Model, setup: Setup, units: float, gpus: int, batch: int) -> dict[str, float]:
    """GB on each GPU."""
    tokens = batch * SEQUENCE
    gathered = 0.0 if gpus == 1 else 2 * model.layer_parameters * GATHERED
    parts = {
        "weights": model.parameters * setup.weights / gpus + gathered,
        "gradients": model.parameters * setup.gradients / gpus,
        "states": model.parameters * setup.states / gpus,
        "activations": model.layers * units * 2 * tokens * model.hidden,
        "logits": tokens * model.vocabulary * 6,
    }
    return {name: value / GB for name, value in parts.items()} | {"total": sum(parts.values()) / GB}


def report(units: Mapping[str, float], plain: str) -> list[dict[str, Any]]:
    """A row for each model, number of GPUs and setup; batch 1 on one GPU, else 2 on each."""
    rows = []
    for name, model in MODELS.items():
        for gpus in GPUS:
            batch = 1 if gpus == 1 else 2
            for setup_name, setup in setups(plain).items():
                kept = units[setup.pipeline]
                found = predicted(model, setup, kept, gpus, batch)
                rows.append({"model": name, "gpus": gpus, "batch": batch, "setup": setup_name, "units": kept} | found)
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, COAT's claims beneath those that they stand beside."""
    lines = ["", f"memory predicted per GPU, GB, sequence {SEQUENCE}, FSDP; 'peer' lines are the peer's own claims"]
    parts = ("weights", "gradients", "states", "activations", "logits", "total")
    lines.append(f"{'model GPUs batch':18}{'':40}" + "".join(f"{part:>13}" for part in parts))
    for i, row in enumerate(rows):
        where = f"{row['model']:>4} x{row['gpus']}, batch {row['batch']}"
        lines.append(f"{where:18}{row['setup']:40}" + "".join(f"{row[part]:>13.1f}" for part in parts))
        key = (row["model"], row["gpus"])
        last = i + 1 == len(rows) or (rows[i + 1]["model"], rows[i + 1]["gpus"]) != key
        if last and key in CLAIMS:
            lines.append(f"{'':18}peer: {CLAIMS[key]}")
    return "\n".join(lines)
