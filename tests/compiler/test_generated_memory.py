"""The peak read off the generated code, against what the allocator is asked for in a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import _torch as private
from fp8compile.compiler import generated_memory
from fp8compile.compiler.generated_memory import noting_peaks, peak_bytes, stored_peaks
from fp8compile.reporting.running import GeneratedPeaks
from fp8compile.tools.step_memory import measured_peak

SCALAR = 64  # bytes: a loss and its gradient, which the caller makes


def test_lifetimes_are_read_from_the_text() -> None:
    text = """
        buf0 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
        buf1 = empty_strided_cpu((8, 4), (1, 8), torch.bfloat16)
        del buf0
        buf2 = reinterpret_tensor(buf1, (32, ), (1, ), 0); del buf1  # reuse
        buf3 = empty_strided_cuda((20, ), (1, ), torch.int64)
        del buf2
    """
    assert peak_bytes(text) == 64 + 160


def test_results_of_libraries_and_saved_inputs_count_until_they_are_dropped() -> None:
    text = """
        buf0 = torch.ops.aten._fused.default(add, primals_1)
        buf1 = buf0[0]
        buf2 = buf0[1]
        del add
        buf3 = torch.ops.aten.embedding_dense_backward.default(buf1, primals_1, 4, -1, False)
        del buf1
        buf4 = empty_strided_cpu((4, ), (1, ), torch.float32)
    """
    sizes = {"buf1": 10, "buf2": 20, "buf3": 30, "add": 100, "primals_1": 1000}
    assert peak_bytes(text, sizes, ["add"]) == 130
    assert peak_bytes(text, sizes) == 66, "buf2, buf3 and the 16 bytes of buf4"
    assert peak_bytes(text) == 16


class Mixed(nn.Module):
    """Results written over what they read, matmuls into memory of their own, an embedding's gradient, which a library makes.

    No attention: a CPU's takes memory of its own while it computes, which no text says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.gated, self.norm = nn.Linear(64, 128), nn.LayerNorm(64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        gate, up = self.gated(self.norm(x)).chunk(2, dim=-1)
        return torch.tanh(self.head(x + nn.functional.silu(gate) * up))


class Loss(nn.Module):
    """So that all that a step allocates is in the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args).square().mean()


def mixed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mixed(), (torch.randint(0, 64, (4, 128)),)


def layers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    parts = (m for _ in range(3) for m in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)))
    return nn.Sequential(*parts), (torch.randn(512, 64),)


@pytest.mark.parametrize("case", [layers, mixed])
def test_it_is_what_the_allocator_gives(case: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an emptied cache, and again with a warm one, whose code is not generated again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    inside, args = case()
    model = Loss(inside)
    for run in ("cold", "warm"):
        torch._dynamo.reset()
        fn = torch.compile(model, backend="fp8compile", options={"linears": "off"})

        def step(fn: Any = fn) -> None:
            fn(*args).backward()

        if run == "cold":
            explained = fp8compile.explain(model, args, recipe={"linears": "off"}).fits()
            assert not explained.is_generated and "estimated from the graph" in str(explained)
        step()
        model.zero_grad(set_to_none=True)
        measured = measured_peak(step)
        fit = fp8compile.report(fn).fits()
        assert fit.is_generated and "from the generated code" in str(fit)
        assert abs(measured - fit.running) <= SCALAR, run


def test_code_from_inductors_own_cache_has_the_peak_of_its_text(tmp_path: Path) -> None:
    """Another graph key, the same text: nothing is lowered, and nothing is known but what was kept with the text."""
    graph = torch.fx.symbolic_trace(lambda add: add + 1)
    text = "def call(args):\n    buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)\n"
    code = SimpleNamespace(source_code=text)
    lowered = SimpleNamespace(graph_inputs={}, name_to_buffer={})

    def lowering(gm: Any, *, is_backward: bool) -> Any:
        with private.inductor_virtualized.set_graph_handler(lowered):
            private.inductor_virtualized.choices.can_fuse(None, None, None, 0)
        return code

    def found(key: str, inner: Any) -> dict[str, int]:
        peaks = GeneratedPeaks()
        with private.inductor_virtualized.set_choices_handler(SimpleNamespace(can_fuse=lambda *_: True)):
            noting_peaks(inner, peaks, key, lambda key: tmp_path / key)(graph, is_backward=False)
        return peaks.halves

    assert found("first", lambda gm, *, is_backward: code) == {}, "neither lowered nor kept"
    assert found("second", lowering) == {"forward": 32}
    assert found("third", lambda gm, *, is_backward: code) == {"forward": 32}
    assert stored_peaks(lambda: tmp_path / "third").halves == {"forward": 32}


class Views(nn.Module):
    """Its backward keeps three views of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(64), nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.tanh(self.norm(x))).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def test_where_saved_tensors_are_views_of_one_storage_the_estimate_stands() -> None:
    torch._dynamo.reset()
    fn = torch.compile(Views(), backend="fp8compile", options={"preset": "off", "memory": 10**12})
    fn(torch.randn(4, 128, 64)).backward()
    report = fp8compile.report(fn)
    (graph,) = report.graphs
    assert graph.generated is not None and graph.generated.halves["kept"] > graph.saved_bytes
    fit = report.fits()
    assert not fit.is_generated and fit.running == max(graph.peaks.forward, graph.peaks.backward)


def test_a_size_that_only_a_run_knows_is_no_figure() -> None:
    layout = SimpleNamespace(size=[sympy.Symbol("s0"), sympy.Integer(4)], stride=[4, 1], dtype=torch.float32)
    buffer = SimpleNamespace(get_layout=lambda: layout, maybe_get_layout=lambda: layout)
    graph = SimpleNamespace(graph_inputs={}, name_to_buffer={"buf0": buffer})
    assert generated_memory._peak_of("forward", "buf0 = torch.ops.aten.mm(a)", [graph], ()) == {}
    layout.size[0] = sympy.Integer(8)
    assert generated_memory._peak_of("forward", "buf0 = torch.ops.aten.mm(a)", [graph], ()) == {"forward": 128}


def test_what_is_generated_in_parts_is_left_to_the_estimate() -> None:
    whole = "class Runner:\n    def call(self, args):\n        buf0 = 1\n"
    assert generated_memory._is_one_list_of_calls(whole)
    for other in ("", whole + "    def partition_0(args):\n", "def repeated_subgraph_0(args):\n" + whole):
        assert not generated_memory._is_one_list_of_calls(other)
    with private.inductor_config.patch(cpp_wrapper=True):
        assert not generated_memory._is_one_list_of_calls(whole)


@pytest.mark.parametrize("content", [None, "", "[1]", '{"forward": "many"}'])
def test_a_lost_or_damaged_file_is_no_file(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "peaks.json"
    if content is not None:
        file.write_text(content)
    assert stored_peaks(lambda: file).halves == {}
