"""Rows of q's gradients that an assembler made wrong: ``check scaled|same|off``.

Delayed scales, no optimizer: the third step's gradients equal the first's, whose scales are dynamic, up to FP8's error.
ptxas 12.8 stored bytes of other iterations (docs of ``compiler/ptxas.py``). ``scaled``: as it is. ``same``: the parent
assembles as its workers do. ``off``: no reduction is compiled in the parent.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from benchmarks.first.speaking import Told

HOWS = ("scaled", "same", "off")


def run(told: Told, how: str) -> None:
    if how not in HOWS:
        raise ValueError(f"{how!r} is no check. Fix: one of {', '.join(HOWS)}.")
    if how == "off":
        os.environ["TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK"] = "0"
    from benchmarks.first.measuring import Measure  # torch reads what was set above

    measure = Measure(told)
    if how == "same" and measure.cuda:
        from torch._inductor.runtime import compile_tasks

        compile_tasks._set_triton_ptxas_path()
    for name, row in _rows(measure).items():
        told.say(f"rows {name}", how=how, ptxas=_assembler(), **row)


def _assembler() -> str | None:
    try:
        from triton import knobs

        return str(knobs.nvidia.ptxas.version)
    except Exception as error:  # a CPU build has none
        return type(error).__name__


def _rows(measure: Any) -> dict[str, dict[str, Any]]:
    from benchmarks.first.arms.training import SIX_LAYERS, Training
    from benchmarks.first.ways import compiled

    training = Training(measure, dataclasses.replace(SIX_LAYERS, layers=2), 4, "fused", None)
    training.call = compiled("delayed", training.model, measure.device)
    steps = []
    for _ in range(3):
        training.model.zero_grad()
        training.forward().backward()
        named = training.model.named_parameters()
        steps.append({name: p.grad.float() for name, p in named if name.endswith("q.weight")})
    return {name: _compared(first, steps[2][name]) for name, first in steps[0].items()}


def _compared(first: Any, third: Any) -> dict[str, Any]:
    apart = ((first - third).norm(dim=1) / first.norm(dim=1)).nan_to_num(9)
    bad = (apart > 0.5).nonzero()[:, 0]
    return {
        "bad_rows": len(bad),
        "of": len(apart),
        "by_n_mod_4": bad.remainder(4).bincount(minlength=4).tolist(),
        "rows_with_nan": int(third.isnan().any(1).sum()),
        "first": bad[:6].tolist(),
    }
