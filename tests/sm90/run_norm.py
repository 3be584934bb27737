"""Script: lower a norm whose result is encoded, and assemble it. Prints JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8compile.numerics import E4M3, Groupwise

from . import fake_h100
from .lowering import lower
from .measures import measured, print_json

ROWS, COLUMNS = 16_384, 768
CODEC = Groupwise(E4M3)
BF16_BYTES = 2 * ROWS * COLUMNS
CODE_AND_SCALE_BYTES = ROWS * COLUMNS + 2 * ROWS * COLUMNS // CODEC.group_size


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = F.rms_norm(x, (COLUMNS,), weight)
    return y, *CODEC.encode(y)


def layer_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, (COLUMNS,), weight)
    return y, *CODEC.encode(y)


NORMS = (rms_norm, layer_norm)


def report() -> dict[str, dict[str, Any]]:
    fake_h100.install()
    x, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((ROWS, COLUMNS), (COLUMNS,)))
    return {norm.__name__: measured(lower(norm, x, weight).only) for norm in NORMS}


if __name__ == "__main__":
    print_json(report)
