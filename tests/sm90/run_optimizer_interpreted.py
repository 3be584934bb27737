"""Script, under ``TRITON_INTERPRET=1``: generated optimizer steps against the same plan run eagerly. Prints JSON.

Three steps with v rounded to nearest, each from the same state: what a step did otherwise is not handed on. Dithered, an ulp
of v decides anew, and decode and update are fused otherwise in generated code: so it is the first step that is compared,
where v is (1 - b2) g**2, the same bits either way.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile.numerics.rounding import GRIDS
from fp8compile.numerics.states.registry import state_codec
from fp8compile.numerics.states.split_weights import joined
from fp8compile.optim import placement

from . import fake_h100, interpreter
from .measures import print_json
from .optimizers import Case, chunks_of, lowered_chunk

BETAS = (0.75, 0.5)  # 1 - 0.999**t would make a thousand ulps of one that two libraries' powers differ by
STEPS = 3
_CASES = {
    "FP32": Case((32, 128)),
    "BF16, rounded stochastically": Case((32, 128), torch.bfloat16),
    "BF16, split": Case((32, 128), torch.bfloat16, master="split"),
    "COAT's mix": Case((32, 128), state_format=("dynamic_tree", "e4m3_expanded")),
    "companded": Case((32, 128), state_format="int8_companded"),
    "short groups": Case((20, 208)),
}
CASES = {name: dataclasses.replace(case, betas=BETAS) for name, case in _CASES.items()}
FIRST_STEP = {f"{name}, dithered": case for name, case in CASES.items() if "BF16" not in name}
ALL = (*CASES, *FIRST_STEP)


def values(shape: tuple[int, ...]) -> Tensor:
    """Rows over ten decades, with zeros among them."""
    x = torch.randn(shape) * 10.0 ** torch.linspace(-8, 2, shape[0])[:, None]
    x[::3, ::7] = 0
    return x


Compared = dict[str, float]


def compared(case: Case, steps: int) -> dict[str, Compared]:
    """Of every tensor, over all steps: ``apart``, the largest difference, relative to the largest value of its row, or in
    steps of codes and of 16-bit values; ``moved``, the share of the codes that differ."""
    ours, eager = (_seeded(case) for _ in range(2))
    chunks, _ = chunks_of(ours)
    runs = [lowered_chunk(chunk, execute=True)[1] for chunk in chunks]
    (p,), (q,) = ours.param_groups[0]["params"], eager.param_groups[0]["params"]
    found: dict[str, list[tuple[float, float]]] = {}
    for step in range(1, steps + 1):
        for _, several in chunks:
            for views, _ in several:
                views["step"].fill_(step)
        ours.state[p]["step"].fill_(step - 1)
        ours.step_function(p)  # the numbers of this step
        for run in runs:
            run()
        eager.step()
        tensors = {"param": (p, q)} | {n: (t, eager.state[q][n]) for n, t in ours.state[p].items() if n != "step"}
        for name, seen in differences(tensors).items():
            found.setdefault(name, []).append(seen)
        for mine, theirs in tensors.values():
            mine.detach().copy_(theirs.detach())
    return {
        name: {"apart": max(each[0] for each in seen), "moved": max(each[1] for each in seen)}
        for name, seen in found.items()
    }


Pair = tuple[Tensor, Tensor]


def differences(tensors: dict[str, Pair]) -> dict[str, tuple[float, float]]:
    """Of each tensor of two results how far they are apart and which share is; weight and correction as the master."""
    pairs = dict(tensors)
    found = {}
    if "correction" in pairs:
        weights, corrections = pairs.pop("param"), pairs.pop("correction")
        masters = [joined(w.detach(), c) for w, c in zip(weights, corrections, strict=True)]
        found["master"] = _beyond_a_step(*masters, bits=GRIDS[weights[0].dtype].mantissa), 0.0
    for name, (a, b) in pairs.items():
        if a.dtype == torch.float32:
            found[name] = _difference(a, b), 0.0
        else:
            same = _same_curve(pairs, name)
            apart = (ordinal(name, a) - ordinal(name, b)).abs().reshape(len(a), -1)[same]
            found[name] = float(apart.max()), float((apart > 0).double().mean())
    return found


def ordinal(name: str, codes: Tensor) -> Tensor:
    """The place of each code, or 16-bit value, in the ascending order of all there are."""
    codes = codes.detach()
    if codes.dtype == torch.int8 or (
        codes.dtype == torch.uint8 and not name.startswith("exp_avg.dynamic_tree.codes")
    ):
        return codes.int()
    size = 8 * codes.element_size()  # a sign and a magnitude
    bits = codes.view(torch.uint8 if size == 8 else torch.int16).int()
    magnitude = bits & (2 ** (size - 1) - 1)
    return torch.where(bits & 2 ** (size - 1) != 0, -magnitude, magnitude)


def _same_curve(pairs: dict[str, Pair], name: str) -> Tensor:
    """The rows whose k agrees: another k is another curve, whose codes are not to be compared."""
    k = pairs.get(name.removesuffix("codes") + "k") if name.endswith("codes") else None
    rows = len(pairs[name][0])
    return (k[0] == k[1]).reshape(rows, -1).all(1) if k else torch.ones(rows, dtype=torch.bool)


def _beyond_a_step(a: Tensor, b: Tensor, bits: int) -> float:
    """As ``_difference``, of what is left of each difference beyond one step of the joined format, 8 bits finer."""
    a, b = a.double(), b.double()
    step = torch.maximum(a.abs(), b.abs()).log2().floor().clamp_min(-126).exp2() * 2.0 ** -(bits + 8)
    largest = b.abs().reshape(len(b), -1).amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return float((((a - b).abs() - step).clamp_min(0).reshape(len(b), -1) / largest).max())


def _seeded(case: Case) -> Any:
    torch.manual_seed(0)
    return case.build(values)


def _difference(a: Tensor, b: Tensor) -> float:
    x, y = (t.detach().double().reshape(len(t), -1) for t in (a, b))
    largest = y.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((x - y).abs().amax(1) / largest).max())


def report(names: Sequence[str]) -> dict[str, dict[str, Compared]]:
    fake_h100.install()
    interpreter.install()
    found = {name: compared(case, 1) for name, case in FIRST_STEP.items() if name in names}
    with mock.patch.object(placement, "state_codec", functools.partial(state_codec, rounding="nearest")):
        return found | {name: compared(case, STEPS) for name, case in CASES.items() if name in names}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or ALL))
