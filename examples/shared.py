"""What the examples share: real text, a small Llama, and a run beside its twin.

The text is the source of Python's own standard library, as bytes. A twin has the same seed, data and optimizer, and is not
compiled. On a CPU matmuls in FP8 are emulated.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.demo.data import load_corpus, train_batches
from fp8compile.reporting.report import Report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Run:
    """One training run: the loss of each step, and the report of the compiled model (None: the twin)."""

    losses: Sequence[float]
    report: Report | None = None

    @property
    def loss(self) -> float:
        """The mean loss over the last quarter of the steps."""
        last = self.losses[-max(len(self.losses) // 4, 1) :]
        return sum(last) / len(last)


@dataclass(frozen=True)
class Outcome:
    """A run and its twin; ``str()`` is what the examples print."""

    ours: Run
    twin: Run | None

    @property
    def gap(self) -> float:
        """How much higher our loss is than the twin's, in per cent."""
        assert self.twin is not None, "run with --twin"
        return 100 * (self.ours.loss / self.twin.loss - 1)

    def __str__(self) -> str:
        report = self.ours.report
        assert report is not None
        left = len(report.notes.skipped("linear"))
        graphs = sum(graph.kind == "training" for graph in report.graphs)
        lines = [
            f"loss {self.ours.losses[0]:.4f} -> {self.ours.loss:.4f}",
            f"training graphs: {graphs}",
            f"linears: {len(report.linears)} of {len(report.linears) + left} matmuls in FP8",
            f"saved for backward: {report.saved_bytes_plain:,} bytes -> {report.saved_bytes:,}",
        ]
        if self.twin is not None:
            lines.append(f"twin: {self.twin.losses[0]:.4f} -> {self.twin.loss:.4f}; gap {self.gap:+.2f} %")
        return "\n".join(lines)


def arguments(argv: Sequence[str] | None, about: str, **more: Any) -> argparse.Namespace:
    """The command line; ``more`` are options of one example with their defaults. ``options`` is what torch.compile gets."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--twin", action="store_true", help="train the twin too, and print the gap")
    parser.add_argument("--codegen", default="inductor", help='"eager": no kernels are generated; starts sooner')
    parser.add_argument("--layers", type=int, default=2, help="of the small Llama")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    args = parser.parse_args(argv)
    args.options = {"debug.codegen": args.codegen, "linears.emulate": DEVICE == "cpu"}
    return args


def both(train: Callable[[argparse.Namespace, bool], Run], args: argparse.Namespace) -> Outcome:
    """Our run, and the twin's where it is asked for; prints what came of it."""
    outcome = Outcome(train(args, True), train(args, False) if args.twin else None)
    print(outcome)
    return outcome


def windows(steps: int, batch: int = 8, length: int = 128, seed: int = 0) -> list[Tensor]:
    """``steps`` batches of text as bytes: int64 [batch, length]."""
    return [tokens.to(DEVICE) for tokens in train_batches(source(), batch, length, seed, steps)]


@functools.cache
def source() -> Tensor:
    """The text, read once: uint8."""
    return load_corpus().train


def small_llama(layers: int = 2) -> Any:
    """A ``LlamaForCausalLM`` over bytes, of width 128; the same parameters at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    tokens = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).to(DEVICE)
