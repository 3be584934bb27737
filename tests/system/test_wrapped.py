"""What clients do to a model: blocks compiled each by itself, wrappers, sharded parameters, parametrizations."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import fp8compile
from fp8compile.reporting.entries import LINEAR
from fp8compile.reporting.report import Report
from tests.support.ranks import on_ranks

OPTIONS: dict[str, Any] = {"debug.codegen": "eager", "linears.emulate": True, "saved.min_numel": 0}
WIDTH = 64


class Layer(nn.Module):
    """Its ``output`` and ``fc`` are no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.output = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.output(self.attn(x)))


class Stack(nn.Module):
    def __init__(self, layers: int = 3, classes: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.output = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Wrapper(nn.Module):
    """A wrapper as PEFT's: what it has not itself it takes from what it wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.base_model(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def step(model: nn.Module, rows: int = 256) -> Report:
    torch._dynamo.reset()
    model(torch.randn(rows, WIDTH)).square().mean().backward()
    return fp8compile.report(model)


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="fp8compile", options={**OPTIONS, **options})
    return model


def in_blocks(model: Stack, **options: Any) -> Stack:
    """Every layer and the head compiled by itself; Dynamo compiles no ``nn.Linear`` in place."""
    for module in model.layers:
        in_place(module, **options)
    model.output = torch.compile(model.output, backend="fp8compile", options={**OPTIONS, **options})  # type: ignore[assignment]
    return model


def matmuls(report: Report) -> list[tuple[str, str]]:
    return sorted((each.origin.module, each.direction) for each in report.linears)


def heads(report: Report) -> dict[str, str]:
    return {each.origin.module: each.reason for each in report.skips if each.kind == LINEAR}


def test_blocks_compiled_by_themselves_are_treated_as_in_the_whole() -> None:
    whole, blocks = step(in_place(Stack(8))), step(in_blocks(Stack(8)))
    assert len(matmuls(whole)) == 8 * 4 * 3 - 1 and matmuls(blocks) == matmuls(whole)
    assert heads(blocks) == heads(whole) == {"output": "Recipe.linears.skip: module 'output' matches 'output'"}
    # what a block returns and the next one reads is saved by both as codes in the whole, by neither twice
    assert blocks.saved_bytes == pytest.approx(whole.saved_bytes, rel=0.02)
    assert blocks.fits().activations == blocks.saved_bytes


def test_explain_compiles_what_is_compiled_in_blocks_in_the_same_blocks() -> None:
    model = in_blocks(Stack())
    before = [m._compiled_call_impl for m in model.modules()]
    explained, x = fp8compile.explain(model, torch.randn(256, WIDTH)), torch.randn(256, WIDTH)
    assert [m._compiled_call_impl for m in model.modules()] == before
    model(x).square().mean().backward()
    ran = fp8compile.report(model)
    assert matmuls(explained) == matmuls(ran) and explained.saved_bytes == ran.saved_bytes
    assert len(explained.graphs) == len(ran.graphs) == 3


def test_a_module_is_found_by_its_path_in_the_model() -> None:
    report = step(in_blocks(Stack()))
    assert {e.direction for e in report.why("layers.2.attn").notes.linears} == {"forward", "dgrad", "wgrad"}
    assert "layers.0-2.attn" in str(report)


def test_a_recipe_names_modules_by_their_path_in_the_model() -> None:
    off = step(in_blocks(Stack(1), modules={"layers.0": {"linears": "off"}}))
    assert not off.linears and not off.remarks
    inner = step(in_blocks(Stack(1), **{"linears.skip": ["fc"]}))
    assert set(heads(inner)) == {"layers.0.fc"}, "a path from the top of the block works too"


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (Wrapper, "base_model."),
        (lambda model: checkpoint_wrapper(model), ""),
        (lambda model: nn.Sequential(model), "0."),
    ],
    ids=["getattr", "checkpoint", "sequential"],
)
def test_paths_are_those_of_the_model_without_wrappers(wrap: Callable[[nn.Module], nn.Module], prefix: str) -> None:
    recipe = {"modules": {f"{prefix}layers.0": {"linears": "off"}}, "skip": [f"{prefix}layers.1.fc"]}
    report = step(torch.compile(wrap(Stack(2)), backend="fp8compile", options={**OPTIONS, **recipe}))  # type: ignore[arg-type]
    left = heads(report)
    assert {f"{prefix}layers.0.attn", f"{prefix}layers.1.fc"} <= set(left) and not report.remarks
    assert {m for m, _ in matmuls(report)} == {f"{prefix}layers.1.{m}" for m in ("attn", "output.0", "output.2")}


class Holder(nn.Module):
    """Holds nothing but a model, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_paths_are_those_of_a_model_whose_forward_was_replaced() -> None:
    """As accelerate does for mixed precision: Dynamo then takes the model for an argument, ``L['args'][0]``."""
    model = Stack(1)
    forward = model.forward.__func__  # type: ignore[attr-defined]

    def converted(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = types.MethodType(converted, model)  # type: ignore[method-assign]
    report = step(in_place(model, skip=["layers.0.attn"]))
    inner = {f"layers.0.{name}" for name in ("fc", "output.0", "output.2")}
    assert {linear.origin.module for linear in report.linears} == inner
    assert not report.remarks


def test_a_head_is_found_in_what_holds_nothing_but_the_model() -> None:
    assert set(heads(step(in_place(Holder(Stack(1)))))) == {"model.output"}
    two = Holder(Stack(1))
    two.other = nn.Linear(WIDTH, WIDTH)
    assert not heads(step(in_place(two))), "the path of a part of a larger model: not a head's"


def test_a_vocabulary_is_a_head_whatever_its_name() -> None:
    class Renamed(Stack):
        def __init__(self) -> None:
            super().__init__(1)
            self.to_logits = nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.to_logits(x)

    whole = step(in_place(Renamed()))
    assert heads(whole) == {"to_logits": "output head: the last linear, N=256 from K=64"}
    block = Renamed()
    block.to_logits = torch.compile(block.to_logits, backend="fp8compile", options=OPTIONS)  # type: ignore[assignment]
    assert not heads(step(block)), "not known to be the last: the graph is not the whole model"


def test_the_user_marks_a_head() -> None:
    model = Stack(2)
    fp8compile.mark_head(model.layers[1].attn)
    assert heads(step(in_place(model)))["layers.1.attn"] == "output head: fp8compile.mark_head"
    with pytest.raises(
        ValueError, match=r"mark_head takes a module with parameters, such as model.lm_head, not 'fc'"
    ):
        fp8compile.mark_head("fc")  # type: ignore[arg-type]


@pytest.mark.parametrize("parametrized", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_a_parametrized_weight_is_that_of_a_linear(parametrized: Callable[[nn.Module], nn.Module]) -> None:
    model: nn.Module = Holder(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), parametrized(nn.Linear(WIDTH, WIDTH)))
    )
    found = {d for m, d in matmuls(step(in_place(model))) if m == "model.2"}
    assert found == {"forward", "dgrad", "wgrad"}
    marked = Holder(nn.Sequential(nn.Linear(WIDTH, WIDTH), parametrized(nn.Linear(WIDTH, WIDTH))))
    fp8compile.mark_head(marked.model[1])
    assert heads(step(in_place(marked))) == {"model.1": "output head: fp8compile.mark_head"}


def test_a_position_table_added_to_one_sample_is_no_weight() -> None:
    """The matmul of scores is no linear's, though one operand is made from a parameter of its size."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(32, WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return (self.table + x) @ self.linear(x).t()

    model = in_place(Positions())
    torch._dynamo.reset()
    model(torch.randn(32, WIDTH)).sum().backward()
    assert matmuls(fp8compile.report(model)) == [("linear", "forward"), ("linear", "wgrad")]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def sharded(mode: str) -> tuple[list[tuple[str, str]], int, tuple[str, ...]]:
    """On a rank: the matmuls, the saved bytes and the remarks of a report, for a model that is sharded and compiled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model: nn.Module = Mlp()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if mode == "fsdp2":
        fully_shard(in_place(model), mesh=mesh)
    elif mode == "fsdp2 bf16":
        fully_shard(in_place(model), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif mode == "tp":
        in_place(parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}))
    elif mode == "ddp":
        model = in_place(nn.parallel.DistributedDataParallel(model))
    elif mode == "ddp around":
        model = nn.parallel.DistributedDataParallel(in_place(model))
    report = step(model)
    assert report.fits(80).model is not None
    return matmuls(report), report.saved_bytes, report.remarks


@pytest.mark.parametrize("mode", ["fsdp2", "fsdp2 bf16", "tp", "ddp", "ddp around"])
def test_sharded_parameters_are_parameters(mode: str) -> None:
    five = [("down", "dgrad"), ("down", "forward"), ("down", "wgrad"), ("up", "forward"), ("up", "wgrad")]
    alone = step(in_place(copy.deepcopy(Mlp())))
    for found, saved, remarks in on_ranks(2, sharded, mode):
        assert found == five == matmuls(alone) and not remarks
        assert mode == "fsdp2 bf16" or saved <= alone.saved_bytes
