"""How large residual sums are beside what they start from: the ratio that codes of a checkpointed block's input rest on.

    x1 = x + f(norm(x));   ratio = |x| / |x1| of a row      an error of x counts this many times in what norms x1

``fp8compile/analysis/sensitivity/residual.py`` argues that it is seldom large. Here it is read in the demo's Llama, in each
block, over all rows of a batch: at the start and while it trains, from several seeds.

    python -m benchmarks.studies.residual_sizes [--steps 300] [--seeds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.demo_runs import CPU, Demo
from fp8compile.demo.data import train_batches
from fp8compile.demo.model import SIZES

EVERY = 50  # steps


class Ratios:
    """Of each block, the ratio of the sizes of what its first and its second norm read, row by row."""

    def __init__(self, model: nn.Module) -> None:
        self.first: Tensor | None = None
        self.found: list[Tensor] = []
        for block in model.model.layers:  # type: ignore[union-attr]
            block.input_layernorm.register_forward_pre_hook(self._start)  # type: ignore[union-attr]
            block.post_attention_layernorm.register_forward_pre_hook(self._sum)  # type: ignore[union-attr]

    def _start(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.first = args[0].detach().norm(dim=-1)

    def _sum(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert self.first is not None
        self.found.append(self.first / args[0].detach().norm(dim=-1))

    def of(self, model: nn.Module, tokens: Tensor) -> dict[str, float]:
        """The largest, and what one row in a thousand exceeds."""
        self.found.clear()
        with torch.no_grad():
            model(tokens)
        ratios = torch.stack(self.found).flatten()
        return {"largest": float(ratios.max()), "in_1000": float(ratios.quantile(0.999))}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=SIZES["cpu"].steps)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    found: dict[str, Any] = {**environment(), "steps": arguments.steps, "seeds": {}}
    for seed in range(arguments.seeds):
        found["seeds"][str(seed)] = rows = _of_seed(seed, "tiny" if arguments.tiny else "cpu", arguments.steps)
        print(seed, rows, flush=True)
        if arguments.json:
            write_json(arguments.json, found)
    return found


def _of_seed(seed: int, size: str, steps: int) -> dict[str, Any]:
    demo = Demo(SIZES[size], steps, compiled=False)
    tokens = next(train_batches(demo.corpus.train, demo.size.batch, demo.size.length, 1000 + seed, 1))
    rows: dict[str, Any] = {}
    ratios: list[Ratios] = []

    def watch(step: int, _: torch.optim.Optimizer, model: nn.Module) -> None:
        if not ratios:
            ratios.append(Ratios(model))
        if step == 1 or step % EVERY == 0:
            rows[str(step)] = ratios[0].of(model, tokens.to(CPU))

    demo.run(lambda model, settings: torch.optim.AdamW(model.parameters(), **settings), seed, watch=watch)
    return rows


if __name__ == "__main__":
    main()
