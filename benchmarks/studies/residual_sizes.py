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
from benchmarks.studies.demo_runs import Demo
from fp8compile.extras.demo.data import train_batches
from fp8compile.extras.demo.model import SIZES

EVERY = 50  # steps


@torch.no_grad()
def ratios_of(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Of each block, the ratio of the sizes of what its first and its second norm read: the largest of all rows, and what one
    in a thousand exceeds."""
    sizes: list[Tensor] = []  # of each norm in turn

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes.append(args[0].norm(dim=-1))

    blocks: Any = model.model.layers  # type: ignore[union-attr]
    norms = [norm for block in blocks for norm in (block.input_layernorm, block.post_attention_layernorm)]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    model(tokens)
    for hook in hooks:
        hook.remove()
    ratios = torch.stack([first / second for first, second in zip(sizes[::2], sizes[1::2], strict=True)]).flatten()
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

    def watch(step: int, _: torch.optim.Optimizer, model: nn.Module) -> None:
        if step == 1 or step % EVERY == 0:
            rows[str(step)] = ratios_of(model, tokens)

    demo.run(lambda model, settings: torch.optim.AdamW(model.parameters(), **settings), seed, watch=watch)
    return rows


if __name__ == "__main__":
    main()
