"""Script, under ``TRITON_INTERPRET=1``: generated optimizer steps against the same plan run eagerly. Prints JSON.

Three steps with v rounded to nearest. Dithered, an ulp of v decides anew, and decode and update are fused otherwise in
generated code: so it is the first step that is compared, where v is (1 - b2) g**2, the same bits either way.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile.numerics.state_codecs import state_codec
from fp8compile.optim import placing

from . import fake_h100, interpreter
from .measures import print_json
from .optimizers import Case, chunks_of, lowered_chunk

CASES = {
    "FP32": Case((32, 128)),
    "BF16, rounded stochastically": Case((32, 128), torch.bfloat16),
    "BF16, split": Case((32, 128), torch.bfloat16, master="split"),
    "COAT's mix": Case((32, 128), state_format=("dynamic_tree", "e4m3_expanded")),
    "companded": Case((32, 128), state_format="int8_companded"),
    "short groups": Case((20, 208)),
}
FIRST_STEP = {f"{name}, dithered": case for name, case in CASES.items() if "BF16" not in name}


def values(shape: tuple[int, ...]) -> Tensor:
    """Rows over ten decades, with zeros among them."""
    x = torch.randn(shape) * 10.0 ** torch.linspace(-8, 2, shape[0])[:, None]
    x[::3, ::7] = 0
    return x


def compared(case: Case, steps: int) -> dict[str, float]:
    """Of every tensor the largest difference in any step, relative to the largest value of its row."""
    ours, eager = (_seeded(case) for _ in range(2))
    chunks, _ = chunks_of(ours)
    runs = [lowered_chunk(chunk, execute=True)[1] for chunk in chunks]
    (p,), (q,) = ours.param_groups[0]["params"], eager.param_groups[0]["params"]
    worst: dict[str, float] = {}
    for step in range(1, steps + 1):
        for _, several in chunks:
            for views in several:
                views["step"].fill_(step)
        for run in runs:
            run()
        eager.step()
        tensors = {"param": (p, q)} | {n: (t, eager.state[q][n]) for n, t in ours.state[p].items() if n != "step"}
        for name, pair in tensors.items():
            worst[name] = max(worst.get(name, 0.0), _difference(*pair))
    return worst


def _seeded(case: Case) -> Any:
    torch.manual_seed(0)
    return case.build(values)


def _difference(a: Tensor, b: Tensor) -> float:
    x, y = (t.detach().double().reshape(len(t), -1) for t in (a, b))
    largest = y.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((x - y).abs().amax(1) / largest).max())


def report() -> dict[str, dict[str, float]]:
    fake_h100.install()
    interpreter.install()
    found = {name: compared(case, 1) for name, case in FIRST_STEP.items()}
    with mock.patch.object(placing, "state_codec", functools.partial(state_codec, rounding="nearest")):
        return found | {name: compared(case, 3) for name, case in CASES.items()}


if __name__ == "__main__":
    print_json(report)
