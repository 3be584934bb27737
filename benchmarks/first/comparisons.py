"""What facts say side by side: each way of a model beside plain Inductor's, by its fastest step.

The fastest, not the median: on a host that is disturbed a median says more of the host than of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.first.facts import Fact

MODELS = {
    "setup-resnet50": "ResNet-50, 128 × 224²",
    "setup-vit": "ViT-B/16, 64 × 224²",
    "setup-bert": "BERT-base, 32×512",
    "setup-gpt2": "GPT-2, 16×1024",
    "setup-llama": "Llama of 6 layers, 4×2048",
    "setup-ckpt": "the same with gradient checkpointing",
    "setup-lora": "the same with LoRA",
    "setup-mixtral": "Mixtral of 4 layers, 4×2048",
    "layer-7b": "Llama-2-7B layer, 8×2048",
    "layer-8b": "Llama-3-8B layer, 2×4096",
    "layer-8b1": "Llama-3-8B layer, 1×8192",
    "train": "whole step, 6 layers of 2048, 4×2048",
    "big": "whole step, Llama-2-7B by blocks, 2×2048",
}
PLAIN, DEFAULT = "inductor", "default"
WAYS = {
    PLAIN: "plain Inductor",
    DEFAULT: "ours",
    "storage": "ours, storage only",
    "codes": "ours, all codes",
    "speed": "ours, `speed`",
    "linears": "ours, linears only",
    "delayed": "ours, delayed scales",
    "merged": "ours, delayed scales, merged dgrads",
    "torchao": "torchao float8",
}
STEPS = ("setup", "layer", "train", "train7b")


@dataclass(frozen=True)
class Timed:
    """A model in a way.

    Attributes:
        model, way: which; ``optimizer`` of a whole step.
        fact: what was measured.
        profile: the same by kernel, or nothing.
        first: seconds of its first step, many side by side; None where none is told.
    """

    model: str
    way: str
    optimizer: str
    fact: Fact
    profile: Fact
    first: float | None

    @property
    def fastest(self) -> float:
        """Milliseconds."""
        return float(self.fact["min_ms"])

    @property
    def kept(self) -> str:
        """What waits for the backward."""
        if "kept_units" in self.fact:
            return f"{self.fact['kept_units']:.2f} U"
        return f"{self.fact['kept_gib']:.2f} GiB" if "kept_gib" in self.fact else ""

    @property
    def peak(self) -> str:
        """Of a whole step all that is allocated; else above weights."""
        if "mem_peak" in self.fact:
            return f"{self.fact['mem_peak']:.1f} GiB"
        if "peak_units" in self.fact:
            return f"{self.fact['peak_units']:.2f} U"
        return f"{self.fact['above_gib']:.2f} GiB" if "above_gib" in self.fact else ""


def timed(found: Sequence[Fact]) -> list[Timed]:
    """All models in all ways, by model, plain first; the last fact of each counts."""
    profiles = {(fact["job"], fact["what"]): fact for fact in found if "kernels" in fact}
    first: dict[str, float] = {}
    rows: dict[str, Timed] = {}
    for fact in found:
        job, what = fact["job"], fact["what"]
        if "first_s" in fact:
            first[job] = fact["first_s"]  # of the run that timed it, where a later one compiled it again
        if what in STEPS and "min_ms" in fact and (said := _words(job)) is not None:
            rows[job] = Timed(*said, fact, profiles.get((job, f"{what} profile"), {}), first.get(job))
    models, ways = list(MODELS), list(WAYS)
    return sorted(rows.values(), key=lambda row: (models.index(row.model), ways.index(row.way), row.optimizer))


def _words(job: str) -> tuple[str, str, str] | None:
    """Model, way and optimizer of an arm; None of one that is not compared, of fewer layers for instance."""
    kind, *rest = job.split("-")
    if kind == "setup" and rest[2:] in ([], ["short1"]):
        model, way, optimizer = f"setup-{rest[0]}", rest[1], ""
    elif kind == "layer" and len(rest) == 2:
        model, way, optimizer = f"layer-{rest[1]}", rest[0], ""
    elif kind in ("train", "big") and len(rest) == 2:
        model, way, optimizer = kind, *rest
    else:
        return None
    return (model, way, optimizer) if model in MODELS and way in WAYS else None


def pairs(rows: Sequence[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Each row beside plain Inductor's of its model; of whole steps, that with torch's fused optimizer."""
    plain = {row.model: row for row in rows if row.way == PLAIN and row.optimizer in ("", "fused")}
    for row in rows:
        if row.model in plain:
            yield plain[row.model], row


def ours_beside_plain(found: Sequence[Fact]) -> list[tuple[Timed, Timed]]:
    """The default recipe, as a user gets it; whole steps with our optimizer."""
    return [pair for pair in pairs(timed(found)) if pair[1].way == DEFAULT and pair[1].optimizer in ("", "ours")]
