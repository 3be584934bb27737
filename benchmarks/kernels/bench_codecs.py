"""Group encode and decode: what storage costs where no other kernel takes it along.

encode   reads x (2 bytes an element), writes a code an element and a scale per 128
decode   reads those, writes x again

python benchmarks/kernels/bench_codecs.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness.kernel_rows import counted, kernel_row
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import Arm, Lap
from benchmarks.registry import Arms, Benchmark, Case, Row, Setting
from fp8compile.numerics import E4M3, INT8
from fp8compile.numerics.codecs import Codec, Groupwise

CODECS: dict[str, Codec] = {"int8": Groupwise(INT8), "e4m3": Groupwise(E4M3)}
SHAPES = ((16384, 4096), (16384, 11008))


def _arm(codec: Codec, x: torch.Tensor, compiled: bool) -> Arm:
    def decode(codes: torch.Tensor, inv_scale: torch.Tensor) -> torch.Tensor:
        return codec.decode(codes, inv_scale, torch.bfloat16)

    encode_fn = torch.compile(codec.encode, dynamic=False) if compiled else codec.encode
    decode_fn = torch.compile(decode, dynamic=False) if compiled else decode

    def arm(lap: Lap) -> None:
        codes, inv_scale = encode_fn(x)
        lap("encode")
        decode_fn(codes, inv_scale)
        lap("decode")

    return arm


def _copy(x: torch.Tensor) -> Arm:
    target = torch.empty_like(x)

    def arm(lap: Lap) -> None:
        target.copy_(x)
        lap("copy")

    return arm


def arms(case: Case, setting: Setting) -> Arms:
    """Ours, the same arithmetic uncompiled, and a copy of the tensor."""
    rows, columns, name = case.shape["rows"], case.shape["columns"], case.shape["codec"]
    x = torch.randn(rows, columns, device=setting.device, dtype=torch.bfloat16)
    codec = CODECS[name]
    least = x.numel() * 3 + x.numel() // 128 * 2
    calls = {"ours": _arm(codec, x, True), "eager": _arm(codec, x, False), "copy": _copy(x)}
    work = {"encode": counted(least), "decode": counted(least), "copy": counted(4 * x.numel())}
    return Arms(calls, work=work)


def measure(case: Case, setting: Setting) -> Row:
    """Encode and decode, timed."""
    return kernel_row(arms(case, setting), setting)


def _case(rows: int, columns: int, codec: str) -> Case:
    shape = {"rows": rows, "columns": columns, "codec": codec}
    return Case(f"{rows}x{columns} {codec}", shape, (rows, columns) == SHAPES[0])


BENCHMARKS = (
    Benchmark(
        "group_codecs",
        "kernels",
        "encode and decode of a BF16 tensor, a scale per 128",
        ("eager", "copy"),
        tuple(_case(*shape, codec) for shape in SHAPES for codec in CODECS),
        (_case(16, 256, "int8"),),
        measure,
        arms=arms,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
