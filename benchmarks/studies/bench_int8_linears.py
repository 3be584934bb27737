"""Linears in INT8 on a CPU: products, layers, and what products are off by, beside FP32 and BF16.

    python benchmarks/studies/bench_int8_linears.py --json benchmarks/results/int8-linears-cpu.json

units     the vector units that the CPU has, by torch.cpu
products  x [M, K] by W' [K, N] in FP32, BF16 and INT8: codes alone; with their scales, one a row; with a scale per 128
          of K, which is a product for each and a sum of them
layers    forward and backward of a Llama layer, compiled: plain Inductor in FP32 and BF16, and ``linears="int8"`` in either
errors    of a product of two operands that are encoded and decoded, SQNR in dB against float64, by what the left one is
          like; the right one is Gaussian

Arms run in turn. A ratio is the median of the ratios of laps that ran one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.llama import Layer, Shape
from benchmarks.harness.output import write_json
from fp8compile.numerics import E4M3, E5M2, INT8, Blocks, Codec, Rowwise, Tensorwise
from fp8compile.numerics.integer_products import int8_product
from fp8compile.numerics.metrics import sqnr

UNITS = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
FP32, BF16 = "FP32", "BF16"
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}
SIZES = ((256, 512, 512), (512, 1024, 2816), (2048, 1024, 1024), (2048, 2048, 2048))  # M, K, N
LAYERS = {
    "512 tokens, hidden 1,024": (512, Shape(1024, 2816, 16, 16)),
    "512 tokens, hidden 2,048": (512, Shape(2048, 5632, 32, 32)),
}
ALONE = {"linears": "int8", "saved": "off"}
ARMS: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    FP32: (FP32, None),
    BF16: (BF16, None),
    "INT8 in FP32": (FP32, ALONE),
    "INT8 in BF16": (BF16, ALONE),
}
PART = 128
Lap = Callable[[], object]


def laps(arms: Mapping[str, Lap], rounds: int) -> dict[str, Any]:
    """By arm: the median and the least of its seconds, and the median ratio of the first arms' laps to its own."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm(), arm()
    for _ in range(rounds):
        for name, arm in arms.items():
            begin = time.perf_counter()
            arm()
            times[name].append(time.perf_counter() - begin)
    return {name: {**_summary(each), "faster_than": _faster(times, name)} for name, each in times.items()}


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"seconds": statistics.median(seconds), "least": min(seconds)}


def _faster(times: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """The median of how many times as long FP32 and BF16 took as this arm, in the same round."""
    rounds = {of: zip(times[of], times[name], strict=True) for of in DTYPES}
    return {of: statistics.median(theirs / ours for theirs, ours in pairs) for of, pairs in rounds.items()}


def products(size: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """One product, the right operand transposed as a linear's weight is."""
    M, K, N = size
    x, w = torch.randn(M, K), torch.randn(N, K)
    (a, inv_a), (b, inv_b) = Rowwise(INT8).encode(x), Rowwise(INT8).encode(w)
    x_16, w_16 = x.bfloat16(), w.bfloat16()

    def in_parts() -> Tensor:
        y = torch.zeros(M, N)
        for left, right in zip(a.split(PART, 1), b.split(PART, 1), strict=True):
            y += torch._int_mm(left, right.t()).float() * inv_a * inv_b.t()
        return y

    arms = {
        FP32: lambda: x @ w.t(),
        BF16: lambda: x_16 @ w_16.t(),
        "INT8, codes alone": lambda: torch._int_mm(a, b.t()),
        "INT8, a scale a row": lambda: int8_product(a, b.t(), inv_a, inv_b.t(), torch.float32),
        f"INT8, a scale per {PART}": in_parts,
    }
    return laps(arms, rounds)


def layers(tokens: int, shape: Shape, rounds: int) -> dict[str, Any]:
    """Forward and backward of one layer, every arm with a layer of its own."""
    return laps({name: _layer(tokens, shape, *arm) for name, arm in ARMS.items()}, rounds)


def _layer(tokens: int, shape: Shape, dtype: str, options: Mapping[str, Any] | None) -> Lap:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = Layer(shape).to(DTYPES[dtype])
    x = torch.randn(1, tokens, shape.hidden, dtype=DTYPES[dtype], requires_grad=True)
    cos, sin = (torch.randn(tokens, shape.hidden // shape.heads, dtype=DTYPES[dtype]) for _ in range(2))
    given = {} if options is None else {"backend": "fp8compile", "options": dict(options)}
    fn: Callable[..., Tensor] = torch.compile(layer, **given)  # type: ignore[assignment,call-overload]
    gradient = torch.randn_like(x)

    def step() -> None:
        layer.zero_grad()
        fn(x, cos, sin).backward(gradient)  # type: ignore[no-untyped-call]

    step(), step()
    return step


def heavy(*shape: int) -> Tensor:
    return torch.distributions.StudentT(3.0).sample(torch.Size(shape))


LIKE: Mapping[str, Callable[[int, int], Tensor]] = {
    "Gaussian": torch.randn,
    "SiLU of Gaussian": lambda *shape: F.silu(2 * torch.randn(shape)),
    "heavy tails (Student's t, 3)": heavy,
    "4 of 1,024 contracted 100 times as large": lambda m, k: (
        torch.randn(m, k) * (1 + 99.0 * (torch.arange(k) % 256 == 7))
    ),
    "1 row in 100 100 times as large": lambda m, k: (
        torch.randn(m, k) * (1 + 99.0 * (torch.arange(m) % 100 == 7))[:, None]
    ),
    "rows of e^2 times a Gaussian's e-folds": lambda m, k: torch.randn(m, k) * (2 * torch.randn(m, 1)).exp(),
}
FORMATS: Mapping[str, Codec] = {
    "INT8, a row": Rowwise(INT8),
    "INT8, 32 x 32": Blocks(INT8, 32, 32),
    "INT8, 1 x 128": Blocks(INT8, 1, 128),
    "INT8, a tensor": Tensorwise(INT8),
    "E4M3, a row": Rowwise(E4M3),
    "E5M2, a row": Rowwise(E5M2),
}
STOCHASTIC = "INT8, a row, left one rounded stochastically"


def errors(like: str, rows: int = 1024, contracted: int = 1024, columns: int = 512) -> dict[str, float]:
    """SQNR of a product by format; both operands in the same one."""
    torch.manual_seed(0)
    x, w = LIKE[like](rows, contracted), torch.randn(columns, contracted)
    exact = x.double() @ w.double().t()

    def of(left: Tensor, right: Tensor) -> float:
        return sqnr(exact, left.double() @ right.double().t())

    found = {name: of(*(_through(codec, t) for t in (x, w))) for name, codec in FORMATS.items()}
    row = FORMATS["INT8, a row"]
    found[STOCHASTIC] = of(_stochastic(x), _through(row, w))
    return found


def _through(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x), torch.float32)


def _stochastic(x: Tensor) -> Tensor:
    """``x`` in INT8 by rows, each code one of its two neighbours, unbiased."""
    _, inv_scale = Rowwise(INT8).encode(x)
    return (x / inv_scale + torch.rand_like(x)).floor().clamp(-INT8.max, INT8.max) * inv_scale


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the machinery")
    arguments = parser.parse_args(words)
    rounds = 2 if arguments.tiny else arguments.rounds
    sizes = ((32, 256, 64),) if arguments.tiny else SIZES
    shapes = {"tiny": (32, Shape(64, 128, 2, 2))} if arguments.tiny else LAYERS
    has = torch.cpu.get_capabilities()
    found: dict[str, Any] = {**environment(), "units": [unit for unit in UNITS if has.get(unit)], "rounds": rounds}
    found["errors"] = {like: errors(like) for like in LIKE}
    found["products"] = {" × ".join(f"{n:,}" for n in size): products(size, rounds) for size in sizes}
    found["layers"] = {}
    for name, (tokens, shape) in shapes.items():
        found["layers"][name] = layers(tokens, shape, rounds)
        print(name, {arm: row["faster_than"] for arm, row in found["layers"][name].items()}, flush=True)
        if arguments.json:
            write_json(arguments.json, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
