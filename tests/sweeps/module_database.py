"""PyTorch's module database against eager: every module of ``torch.nn``, judged as ``tests/sweeps/op_database.py`` judges
operations. A module has parameters of its own, whose gradients are compared too, and is in training mode.

    python -m tests.sweeps.module_database '^nn.(Batch|Group)Norm'
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from tests.sweeps.op_database import BAD, Record, cases
from tests.sweeps.op_programs import Sample, called, first_full

WRAPPERS = ("sum", "product")
SAMPLES = 6  # of a module, unlike in structure where it has such
SECONDS = 900  # for one module: a transformer takes long to compile
CAPTURES = {"allow_rnn": True}  # Dynamo's word for LSTM, GRU and RNN


@functools.cache
def modules() -> dict[str, Any]:
    """Every entry of the module database, by name."""
    return {info.name: info for info in module_db}


def records(name: str, samples: int = SAMPLES) -> list[Record]:
    """Every case of one module in float32."""
    info = modules()[name]
    with torch._dynamo.config.patch(CAPTURES):
        return cases(Record(name, "float32", 0, "", ""), lambda: samples_of(info), samples, WRAPPERS, SECONDS)


def samples_of(info: Any, seed: int = 0) -> list[Sample]:
    """The first samples of an entry that are not empty, deterministic: each a module in training and its arguments."""
    torch.manual_seed(seed)
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    return first_full(_sample(info, entry) for entry in found if entry.forward_input is not None)


def _sample(info: Any, entry: Any) -> Sample:
    made, given = entry.constructor_input, entry.forward_input
    module: nn.Module = info.module_cls(*made.args, **made.kwargs).train()
    with torch.no_grad():
        module(*given.args, **given.kwargs)  # a lazy one has its parameters from here on
    return called(module, tuple(given.args), dict(given.kwargs), lambda out: out)


if __name__ == "__main__":
    from fp8compile.fx import spec

    spec.enabled = True
    for asked in (name for name in modules() if re.search(sys.argv[1] if len(sys.argv) > 1 else "", name)):
        for record in records(asked):
            told = f"{record.key}: {record.outcome} {record.db} {record.worst} {record.detail}"
            print(told, f"[{record.about}]" if record.outcome in BAD else "", flush=True)
