"""Script: the set-ups that an H200 was timed on, lowered for an H100 and priced: plain Inductor, and ours. Prints JSON.

They are those of ``bash benchmarks/gpu.sh`` (benchmarks/first/models.py) at their sizes, of two layers and of three: what one
more adds is what each of the rest takes. Generated kernels are disassembled (kernel_cost.py); matmuls, convolutions and
attention are priced by a roofline with an H200's rates (fp8compile/cost/op_cost.py).

The graph is captured on a CPU, and made as an H200's was in three ways: what CUDA's autocast casts to FP32 and the CPU's does
not is cast; attention is matmuls and a softmax where it was there; where it was one kernel with dropout, it is one without.

``python -m tests.sm90.run_table > benchmarks/results/table-sm90-lowered.json``; ``vit default`` is one combination.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.first.models import SetUp, built
from fp8compile.cost.device_rates import RATES
from fp8compile.cost.op_cost import is_priced, microseconds
from fp8compile.fx.ops import contracts

from . import fake_h100
from .layers import ALL_CODES, DEFAULT, PLAIN, STORAGE_WORTH
from .lowering import LoweredGraph, lower
from .measures import given, print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers import backend_of
from .run_linears import LABEL
from .run_setups import totals
from .scattered import scattered_stores
from .subprocesses import result_of

DEPTHS = (2, 3)
LAYERS = {"resnet50": 0, "vit": 12, "bert": 12, "gpt2": 12, "llama": 6, "ckpt": 6, "lora": 6}  # 0: lowered whole
ARMS = (PLAIN, STORAGE_WORTH, DEFAULT, ALL_CODES)
IN_FP32 = ((F, "layer_norm"), (F, "cross_entropy"), (torch, "pow"))  # by CUDA's autocast, and not by the CPU's
BY_MATMULS = ("vit", "bert")  # attention
H200 = RATES["h200"]
ATTENTION = F.scaled_dot_product_attention


class Step(nn.Module):
    """A set-up's loss, of a batch that is given to it."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**dict(zip(self.names, batch, strict=True))).loss
        return loss


class _Batch(Exception):
    """What a loss calls its model with."""


def batch_of(made: SetUp) -> dict[str, Tensor]:
    """The batch that a set-up's loss hands to its model, by name."""

    def called(**batch: Tensor) -> None:
        raise _Batch(batch)

    try:
        made.loss(called)
    except _Batch as found:
        batch: dict[str, Tensor] = found.args[0]
        return batch
    raise AssertionError("the loss calls no model")


@contextmanager
def as_on_cuda(autocast: bool, attention: Callable[..., Tensor]) -> Iterator[None]:
    """BF16 autocast for CPU tensors, with CUDA's choice of what is FP32, and attention as it is there."""

    def in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return function(x.float(), *args, **kwargs)

        return called

    with ExitStack() as patched:
        for home, name in IN_FP32 if autocast else ():
            patched.enter_context(mock.patch.object(home, name, in_fp32(getattr(home, name))))
        patched.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        patched.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
        yield


def by_matmuls(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Attention as PyTorch computes it where no kernel takes it, of BF16 values."""
    given, scale, causal = (each.bfloat16() for each in (query, key, value)), options["scale"], options["is_causal"]
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        *given, attn_mask, dropout_p, causal, None, scale=scale
    )[0]
    return result


def in_one_kernel(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
    """Attention, without dropout."""
    return ATTENTION(*args, **options)


def resnet50() -> SetUp:
    """The same network from another library: torchvision's operators are compiled for a GPU or not there."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 4, 6, 3], num_labels=1000)  # type: ignore[call-arg]
    model = ResNetForImageClassification(config).train().to(memory_format=torch.channels_last)
    x = torch.empty(128, 3, 224, 224).to(memory_format=torch.channels_last)
    y = torch.zeros(len(x), dtype=torch.int64)
    return SetUp(model, lambda call: call(pixel_values=x, labels=y).loss, True, True, list(x.shape))


def lowered(name: str, layers: int, pipeline: str) -> list[LoweredGraph]:
    """Forward and backward of a set-up with so many layers."""
    made = resnet50() if name == "resnet50" else built(name, torch.device("cpu"), False, layers)
    with as_on_cuda(made.autocast, by_matmuls if name in BY_MATMULS else in_one_kernel):
        backend = backend_of(pipeline)
        batch = batch_of(made)
        if name == "gpt2":
            made.model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # what it finds, with a warning: a graph break
        step, patches = Step(made.model, list(batch)), {JOINT_PASS: to_cuda}
        return lower(step, *batch.values(), backward=True, backend=backend, config_patches=patches).graphs


def priced(graphs: list[LoweredGraph]) -> dict[str, Any]:
    """What counts of both halves together, with microseconds of calls, scattered stores of codes, and bytes kept."""
    calls = [n for graph in graphs if graph.graph for n in graph.graph.nodes if is_call(n)]
    return {
        **totals(graphs, priced=True),
        "calls_us": sum(microseconds(node, H200) for node in calls),
        "scattered": sum(len(scattered_stores(kernel)) for graph in graphs for kernel in graph.kernels.values()),
        "kept": sum(value.numel() * value.element_size() for value in given(graphs[-1])),
    }


def is_call(node: torch.fx.Node) -> bool:
    """Whether a library computes it, and its time is predicted."""
    return node.op == "call_function" and contracts(node) and is_priced(node)


def measured(name: str, pipeline: str) -> dict[str, dict[str, Any]]:
    """By number of layers."""
    fake_h100.install()
    return {str(layers): priced(lowered(name, layers, pipeline)) for layers in (DEPTHS if LAYERS[name] else (0,))}


def report() -> dict[str, Any]:
    """``{"rows": [{setup, layers, arm, lowered: {depth: ...}}]}``, and what lowered it."""
    rows = []
    for name, layers in LAYERS.items():
        for arm in ARMS:
            found = result_of("run_table", name, arm)
            rows.append({"setup": name, "layers": layers, "arm": arm, "lowered": found})
            print(name, arm, found, file=sys.stderr, flush=True)
    versions = {**fake_h100.installed(), "target": "sm_90 (mocked)"}
    return {"label": LABEL, "versions": versions, "rows": rows}


if __name__ == "__main__":
    one = sys.argv[1:3]
    print_json(lambda: measured(*one) if one else report())
