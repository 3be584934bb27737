"""The papers whose ablations can be run, and how long by default; needs no torch.

A default takes at most ten minutes on two idle cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """One paper's ablation.

    Attributes:
        title: authors, name and number.
        about: what is compared, in a few words.
        home: the module whose ``reproduce(seeds, steps, tell)`` runs it.
        seeds: trainings that are averaged.
        steps: of each training.
    """

    title: str
    about: str
    home: str
    seeds: int
    steps: int


PAPERS: Mapping[str, Paper] = {
    "coat": Paper(
        "Xi et al. 2024, COAT, 2410.19313",
        "errors of optimizer states with and without range expansion, k, group sizes",
        "benchmarks.papers.coat",
        seeds=3,
        steps=1000,
    ),
    "8bit": Paper(
        "Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization, 2110.02861",
        "codes, blocks and embeddings: who is unstable, and how sensitive",
        "benchmarks.papers.eight_bit",
        seeds=1,
        steps=80,
    ),
    "als": Paper(
        "Graphcore, automatic loss scaling and stochastic rounding; a ViT that overflows under AMP",
        "loss scales in FP16, rounding of FP16 weights, FP32 islands",
        "benchmarks.papers.loss_scaling",
        seeds=2,
        steps=100,
    ),
    "fewbit": Paper(
        "Novikov et al. 2023, Few-Bit Backward, 2202.00441",
        "derivatives of activations in 1 to 4 bits: errors and losses",
        "benchmarks.papers.few_bit",
        seeds=3,
        steps=300,
    ),
    "gact": Paper(
        "Liu et al. 2022, GACT, 2206.11357",
        "activations in 2 to 8 bits, the same for all or adaptive at equal bytes",
        "benchmarks.papers.gact",
        seeds=3,
        steps=200,
    ),
    "jetfire": Paper(
        "Xi et al. 2024, Jetfire, 2403.12422",
        "INT8 operands of linears in 32 x 32 blocks, per row, per tensor; E4M3 beside them",
        "benchmarks.papers.jetfire",
        seeds=3,
        steps=200,
    ),
}
