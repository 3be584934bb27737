"""A whole decoder layer, forward and backward: time, bytes kept, peak memory, gradients against FP32.

flops      forward: 2 per weight and token, and causal attention's; backward: twice that. Their share of a rate is of
           BF16's product for every arm: what FP8 gains shows as more than BF16 reaches
kept       distinct storages that autograd holds between forward and backward; U = batch * length * hidden * 2 bytes
peak       above what is there before the forward: activations, gradients and working memory of one step (CUDA only)
gradient   the worst parameter's 20 log10(|g| / |g - g_fp32|), dB, against the eager layer in FP32

python benchmarks/layers/bench_layers.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.metrics import sqnr

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness import peers
from benchmarks.harness.kernel_rows import counted, kernel_row
from benchmarks.harness.llama import LLAMA2_7B, LLAMA3_8B, TE_LAYER, TINY, Layer, Shape, initialised, rotary_tables
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import Lap, warmed_up
from benchmarks.registry import Arms, Benchmark, Case, Row, Setting
from fp8compile.tools.step_memory import saved_bytes

Compiler = Callable[[Layer, torch.device], Callable[..., Tensor]]
ARMS: dict[str, Compiler] = {
    "ours": lambda layer, device: peers.ours(layer, device),
    "ours, storage only": lambda layer, device: peers.ours(layer, device, linears="off"),
    "ours, linears only": lambda layer, device: peers.ours(layer, device, linears="tensorwise", saved="off"),
    "ours, scales delayed, weights cached": lambda layer, device: peers.ours(
        layer, device, **{"linears.scaling": "delayed", "linears.cache_weights": True}
    ),
    "ours, linears only, scales delayed, weights cached": lambda layer, device: peers.ours(
        layer,
        device,
        linears="tensorwise",
        saved="off",
        **{"linears.scaling": "delayed", "linears.cache_weights": True},
    ),
    "inductor": lambda layer, device: peers.inductor(layer),
    "eager": lambda layer, device: layer,
    "act-quant": lambda layer, device: peers.act_quant(layer),
    "torchao float8": lambda layer, device: peers.torchao_float8(layer),
}
TINY_ARMS = ("ours", "inductor", "eager", "act-quant", "torchao float8")
ATTENTION_ARMS: dict[str, Compiler] = {
    "ours": ARMS["ours, storage only"],
    "ours, attention as it is": lambda layer, device: peers.ours(
        layer, device, linears="off", **{"saved.attention": False}
    ),
    "inductor": ARMS["inductor"],
}


@dataclass
class Built:
    """One arm: its own copy of the layer, and the step."""

    layer: Layer
    call: Callable[..., Tensor]
    x: Tensor
    tables: tuple[Tensor, Tensor]
    dy: Tensor

    def forward(self) -> Tensor:
        return self.call(self.x, *self.tables)

    def step(self, lap: Lap) -> None:
        y = self.forward()
        lap("forward")
        y.backward(self.dy)
        lap("backward")
        self.clear()

    def clear(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """Of every parameter and of the input, in FP32."""
        self.forward().backward(self.dy)
        found = {name: p.grad.float() for name, p in [*self.layer.named_parameters(), ("x", self.x)]}  # type: ignore[union-attr]
        self.clear()
        return found


def measure(case: Case, setting: Setting) -> Row:
    """The layer in every arm; at toy sizes in fewer, since compiling is all that takes time there."""
    return measured_layer(case, setting, {n: ARMS[n] for n in TINY_ARMS} if setting.tiny else ARMS)


def measure_attention(case: Case, setting: Setting) -> Row:
    """Operands and result of attention stored as codes, or kept as they are."""
    return measured_layer(case, setting, ATTENTION_ARMS)


def measured_layer(case: Case, setting: Setting, compilers: Mapping[str, Compiler]) -> Row:
    """Time and memory of every arm; each has a copy of the layer, with the same weights, input and gradient."""
    shape, batch, length = case.shape["layer"], case.shape["batch"], case.shape["length"]
    shape = Shape(**shape)
    with setting.device:
        layer = initialised(Layer(shape)).to(torch.bfloat16)
        x, dy = (torch.randn(batch, length, shape.hidden, dtype=torch.bfloat16) for _ in range(2))
    exact = _built(copy.deepcopy(layer).float(), lambda layer, device: layer, x.float(), dy.float(), setting)
    reference = exact.gradients()
    del exact
    factories = {
        name: lambda compiler=compiler: _built(copy.deepcopy(layer), compiler, x, dy, setting)
        for name, compiler in compilers.items()
    }
    arms, left_out = peers.built(factories, setting.device)
    warm, failed = warmed_up({name: arm.step for name, arm in arms.items()})
    memory = {name: memory_of(arms[name], reference, batch * length * shape.hidden * 2) for name in warm}
    del reference
    row = kernel_row(Arms(warm, {**left_out, **failed}, _work(shape.layer_flops(batch, length))), setting)
    return {**row, "memory": memory}


def memory_of(arm: Built, reference: Mapping[str, Tensor], unit: int) -> dict[str, float]:
    """What one step keeps and, on a GPU, its peak; how good its gradients are."""
    constant = [*arm.layer.parameters(), *arm.layer.buffers(), *arm.tables]
    kept = saved_bytes(arm.forward, constant)
    found = {"kept_bytes": kept, "kept_units": kept / unit}
    if arm.x.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        arm.step(lambda name: None)
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found | {"worst_gradient_db": min(sqnr(reference[n], g) for n, g in arm.gradients().items())}


def _built(layer: Layer, compiler: Compiler, x: Tensor, dy: Tensor, setting: Setting) -> Built:
    tables = rotary_tables(layer.shape, x.shape[1], x.device, x.dtype)
    return Built(layer, compiler(layer, setting.device), x.detach().clone().requires_grad_(), tables, dy)


def _work(flops: float) -> dict[str, Any]:
    return {"forward": counted(0, flops), "backward": counted(0, 2 * flops)}


def _case(name: str, shape: Shape, batch: int, length: int) -> Case:
    return Case(name, {"layer": asdict(shape), "batch": batch, "length": length})


TINY_CASE = _case("llama tiny 1x64", TINY, 1, 64)
BENCHMARKS = (
    Benchmark(
        "layer",
        "layers",
        "a decoder layer, forward and backward; bytes kept, peak, gradients against FP32",
        ("inductor", "eager", "act-quant", "torchao float8"),
        (
            _case("llama2-7b 8x2048", LLAMA2_7B, 8, 2048),
            _case("llama3-8b 1x8192", LLAMA3_8B, 1, 8192),
            _case("gpt 4096/16384 8x2048", TE_LAYER, 8, 2048),
        ),
        (TINY_CASE,),
        measure,
        limit=300,
    ),
    Benchmark(
        "attention_storage",
        "layers",
        "the same layer with attention's operands and result stored as codes or kept as they are",
        ("ours, attention as it is", "inductor"),
        (
            _case("llama2-7b 8x2048", LLAMA2_7B, 8, 2048),
            _case("llama2-7b 1x16384", LLAMA2_7B, 1, 16384),
            _case("llama3-8b 1x8192", LLAMA3_8B, 1, 8192),
        ),
        (TINY_CASE,),
        measure_attention,
        limit=240,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
