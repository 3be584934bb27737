"""Script, under ``TRITON_INTERPRET=1``: the tensorwise encoding of operands, generated, against eager. Prints JSON."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics import E4M3, E5M2, Tensorwise

from . import fake_h100, interpreter
from .measures import print_json
from .run_interpreted import run, sample

Tensors = tuple[Tensor, ...]


def cases() -> dict[str, Tensor]:
    inf, nan = sample(24, 80), sample(24, 80)
    inf[3, 7], nan[23, 79] = torch.inf, torch.nan
    magnitudes = torch.tensor([1e-38, 1e-30, 1.0, 1e30, 3e35, 1e-41]).repeat(4).bfloat16()[:, None]
    zeros = torch.zeros(24, 80, dtype=torch.bfloat16)
    wide = sample(24, 80) * magnitudes
    return {"normal": sample(24, 80), "zeros": zeros, "inf": inf, "NaN": nan, "extreme magnitudes": wide}


def both_layouts(codec: Tensorwise, x: Tensor) -> Tensors:
    """As in the graph: codes row-major and column-major, and the scale."""
    codes, inv_scale = codec.encode(x)
    return codes, codes.t().contiguous(), inv_scale


def report() -> dict[str, dict[str, int]]:
    """``{format: {case: bytes of codes in both layouts, and of the scale, that differ}}``."""
    fake_h100.install()
    interpreter.install()
    torch.set_num_threads(1)
    return {f.name: {case: differing(Tensorwise(f), x) for case, x in cases().items()} for f in (E4M3, E5M2)}


def differing(codec: Tensorwise, x: Tensor) -> int:
    ours = run(lambda x: both_layouts(codec, x), x)
    expected = both_layouts(codec, x)
    assert [t.stride() for t in ours] == [t.stride() for t in expected]
    scales_differ = int(ours[2].view(torch.int32) != expected[2].view(torch.int32))
    if expected[2].isnan():  # what the codes of NaN are does not matter: their scale is NaN
        return scales_differ
    pairs = zip(ours[:2], expected[:2], strict=True)
    return scales_differ + sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)


if __name__ == "__main__":
    print_json(report)
