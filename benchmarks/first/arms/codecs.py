"""Codecs, casts and products alone: GB/s of the bytes they must move, TFLOP/s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.first.measuring import Measure
from benchmarks.first.speaking import Told
from fp8compile.numerics import E4M3, INT8
from fp8compile.numerics.codecs import Groupwise
from fp8compile.numerics.scaling import amax_tensorwise, quantize

MATMULS = (
    *((8192, 4096, 14336), (8192, 14336, 4096), (16384, 4096, 4096)),
    *((16384, 4096, 11008), (8192, 2048, 8192), (8192, 4096, 1024)),
)
Calls = dict[str, tuple[Callable[[], Any], int]]


def run(told: Told) -> None:
    measure = Measure(told)
    x = torch.randn((128, 256) if measure.tiny else (16384, 4096), device=measure.device).bfloat16()
    calls = {**_codecs(x), **_casts(x)}

    def all_of_them() -> None:
        for call, _ in calls.values():
            call()

    measure.compiled(all_of_them, 1)
    for name, (call, moved) in calls.items():
        measure.tried(f"kernel {name}", lambda call=call, moved=moved: _timed(measure, x, call, moved))
    for shape in ((128, 128, 128),) if measure.tiny else MATMULS:
        _matmuls(measure, *shape)


def _timed(measure: Measure, x: Tensor, call: Callable[[], Any], moved: int) -> dict[str, Any]:
    row = measure.times(call, 30)
    return {"shape": list(x.shape), "gb_s": round(moved / row["min_ms"] / 1e6), **row}


def _codecs(x: Tensor) -> Calls:
    found: Calls = {}
    for name, codec in (("int8", Groupwise(INT8)), ("e4m3", Groupwise(E4M3))):
        encode = torch.compile(codec.encode, dynamic=False)
        codes, scales = encode(x)
        decode = torch.compile(lambda c, s, codec=codec: codec.decode(c, s, torch.bfloat16), dynamic=False)
        found[f"encode {name}"] = (lambda encode=encode: encode(x), x.numel() * 3)
        found[f"decode {name}"] = (lambda d=decode, c=codes, s=scales: d(c, s), x.numel() * 3)
    return found


def _casts(x: Tensor) -> Calls:
    scale = torch.tensor(2.0**-5, device=x.device)

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        return quantize(x, scale, E4M3)

    def both(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        codes = quantize(x, scale, E4M3)
        return codes, codes.t().contiguous()

    def with_amax(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return *both(x, scale), amax_tensorwise(x)

    def amax(x: Tensor, scale: Tensor) -> Tensor:
        return amax_tensorwise(x)

    found: Calls = {}
    named = (("cast", cast, 3), ("cast transpose", both, 4), ("cast transpose amax", with_amax, 4), ("amax", amax, 2))
    for name, function, width in named:
        call = torch.compile(function, dynamic=False)
        found[name] = (lambda call=call: call(x, scale), x.numel() * width)
    return found


def _matmuls(measure: Measure, m: int, k: int, n: int) -> None:
    a, b = (torch.randn(shape, device=measure.device).bfloat16() for shape in ((m, k), (n, k)))
    qa, qb, ga = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), a.to(torch.float8_e5m2)
    one = torch.ones((), device=measure.device)

    def scaled(x: Tensor, fast: bool) -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(x, qb.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    calls = {"bf16": lambda: a @ b.t(), "fp8 fast": scaled(qa, True), "fp8 slow": scaled(qa, False)}
    calls["fp8 e5m2 slow"] = scaled(ga, False)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = round(2 * m * k * n / measure.times(call, 20)["ms"] / 1e9)
        except RuntimeError as error:
            found[name] = str(error)[:80]
    measure.told.say(f"matmul {m}x{k}x{n} TFLOP/s", shape=[m, k, n], **found)
