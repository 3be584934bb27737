"""Time and memory of one optimizer step: ours in several formats beside torch's fused AdamW and, where installed, peers.

Arms alternate, so that a machine whose speed drifts slows all; each figure is a median, and a ratio to torch's fused AdamW.

    python benchmarks/bench_optimizer_step.py [--million 64] [--rounds 20] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script's own folder is all that is there

from benchmarks.environment import environment
from fp8compile import optim

REFERENCE = "torch fused"
SHAPES = ((4096, 4096), (4096, 1024), (11008, 4096), (4096,))
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def arms() -> dict[str, Build]:
    """Name -> a constructor; peers that are not installed are left out."""
    ours = ("e4m3_expanded", "dynamic_tree", "int8_companded", ("dynamic_tree", "e4m3_expanded"), "fp32")
    found: dict[str, Build] = {REFERENCE: lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True)}
    for each in ours:
        name = each if isinstance(each, str) else " + ".join(each)
        found[f"ours {name}"] = lambda ps, each=each: optim.AdamW(ps, lr=1e-3, state_format=each)
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError:
        return found
    return found | {
        "torchao fp8": lambda ps: AdamWFp8(ps, lr=1e-3),
        "torchao 8bit": lambda ps: AdamW8bit(ps, lr=1e-3),
    }


def parameters(million: float, device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Shapes of a Llama in turn until there are ``million`` * 10**6 elements."""
    made: list[nn.Parameter] = []
    while sum(p.numel() for p in made) < million * 1e6:
        shape = SHAPES[len(made) % len(SHAPES)]
        p = nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)
        p.grad = torch.randn_like(p) * 1e-3
        made.append(p)
    return made


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    return sum(t.untyped_storage().nbytes() for t in tensors)


def measure(million: float, rounds: int, device: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """``{arm: {"seconds", "ratio", "state_bytes"}}``."""
    ps = parameters(million, device, dtype)
    optimizers = {name: build(ps) for name, build in arms().items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()  # compiles
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            times[name].append(seconds(optimizer.step, device))
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        name: {"seconds": m, "ratio": m / medians[REFERENCE], "state_bytes": state_bytes(optimizers[name])}
        for name, m in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=64, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        results[str(dtype).removeprefix("torch.")] = found = measure(args.million, args.rounds, device, dtype)
        for name, row in found.items():
            took, states = f"{row['seconds'] * 1e3:9.2f} ms", f"{row['state_bytes'] / 1e6:9.1f} MB"
            print(f"{dtype} {name:34s} {took}  {row['ratio']:6.2f} x  {states}")
    if args.json:
        args.json.write_text(
            json.dumps({**environment(), "gpu": gpu, "million": args.million, "steps": results}, indent=1)
        )


if __name__ == "__main__":
    main()
