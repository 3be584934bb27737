"""offload_codes: golden, contract, numbers, accounting; and the operations that a GPU gets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import _torch as private
from fp8compile.analysis.stored_values import step_of
from fp8compile.compiler.inductor import NO_CUDA_GRAPHS_ON_HOST, NOTHING_TO_OFFLOAD
from fp8compile.compiler.inline_regions import WHOLE
from fp8compile.cost.device_rates import RATES
from fp8compile.fx.graph import DEVICE, MOVED, is_on_host, storage_root
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.spec import verify
from fp8compile.memory.link import AT_ONCE, BUSY
from fp8compile.memory.moving import from_host, to_host
from fp8compile.passes import offload_codes as of_pass
from fp8compile.passes.offload_codes import NO_OPERATORS, NOT_STATIC, ORDER, OTHER_DEVICE, SMALL, offload_codes
from fp8compile.recipe import rates
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import OFFLOAD, Notes
from tests.support.budgets import Llama, Steps
from tests.support.graphs import backward_of, forward_of, split_of, traced
from tests.support.net import SwiGLU

STORAGE = {"linears": "off", "debug.codegen": "eager"}


@pytest.fixture(autouse=True)
def _toy_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(of_pass, "LEAST_BYTES", 0)
    yield


def step(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], Any]:
    """The result and all gradients of one step, and the report."""
    torch._dynamo.reset()
    model.zero_grad()
    compiled = torch.compile(model, backend="fp8compile", options={"saved.min_numel": 0, **options})
    x = x.detach().clone().requires_grad_()
    y = compiled(x)
    y.square().sum().backward()
    assert x.grad is not None
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients], fp8compile.report(compiled)


def encoded(**options: Any) -> PartitionedGraph:
    """The halves of six steps, their values stored as codes."""
    torch._dynamo.reset()
    return split_of(Steps(6), torch.randn(128, 64), **{**STORAGE, **options})


def told(split: PartitionedGraph, **options: Any) -> Notes:
    return offload_codes(split, Context(Recipe(linears="off", **{"memory.offload": "all", **options})))


def test_golden_forward_and_backward() -> None:
    split = split_of(Steps(1), torch.randn(128, 64), **STORAGE, **{"memory.offload": "all"})
    assert_expected_inline(
        forward_of(split) + backward_of(split),
        """\
primals_1: float32[64, 64]
primals_2: float32[128, 64]
permute: float32[64, 64] = permute(primals_1)
mm: float32[128, 64] = mm(primals_2, permute)
tanh: float32[128, 64] = tanh(mm)
convert_element_type: int8[128, 64] = encode(tanh)
clone_default: int8[128, 64] = to_host(convert_element_type)
convert_element_type_1: bfloat16[128, 1] = encode(tanh)
return tanh, primals_2, clone_default, convert_element_type_1
primals_2: float32[128, 64]
tanh_codes_on_host: int8[128, 64]
tanh_inv_scale: bfloat16[128, 1]
tangents_1: float32[128, 64]
view_4: int8[128, 64] = from_host(tanh_codes_on_host)
view_2: float32[128, 64] = decode(tanh_codes, tanh_inv_scale)
mul: float32[128, 64] = mul(view_2, view_2)
sub: float32[128, 64] = sub(mul)
mul_1: float32[128, 64] = mul(tangents_1, sub)
permute_1: float32[64, 128] = permute(mul_1)
mm_1: float32[64, 64] = mm(permute_1, primals_2)
return mm_1, None
""",
    )


@pytest.mark.parametrize("offload", ["auto", "all"])
@pytest.mark.parametrize("linear", ["off", "tensorwise"])
def test_no_number_changes(offload: str, linear: str) -> None:
    torch.manual_seed(0)
    model, x = Llama(2), torch.randn(2, 64, 64)
    options = {"debug.codegen": "eager", "linears": linear, "linears.emulate": True}
    plain, _ = step(model, x, **options)
    found, report = step(model, x, **options, **{"memory.offload": offload})
    assert report.offloaded and all(map(torch.equal, plain, found))


def test_no_number_changes_in_generated_code() -> None:
    model, x = Steps(3), torch.randn(128, 64)
    plain, _ = step(model, x, linears="off")
    found, report = step(model, x, linears="off", **{"memory.offload": "all"})
    assert report.offloaded and all(map(torch.equal, plain, found))


def test_delayed_scales_and_statistics_go_with_it() -> None:
    torch.manual_seed(0)
    model, x = Llama(1).half(), torch.randn(2, 64, 64).half()
    options = {"debug.codegen": "eager", "linears.scaling": "delayed", "linears.emulate": True, "fp32.observe": True}
    plain, _ = step(model, x, **options)
    found, report = step(model, x, **options, **{"memory.offload": "all"})
    assert report.offloaded and report.observed and all(map(torch.equal, plain, found))


def test_two_backwards_through_one_forward() -> None:
    model, x = Steps(2), torch.randn(128, 64)
    compiled = torch.compile(
        model, backend="fp8compile", options={**STORAGE, "saved.min_numel": 0, "memory.offload": "all"}
    )
    loss = compiled(x).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    assert all(torch.equal(2 * first, p.grad) for first, p in zip(once, model.parameters(), strict=True))


def test_checkpointed_layers_go_with_it() -> None:
    """The random state that a checkpoint around attention keeps has a symbolic size, and no code has."""

    class Checkpointed(Llama):
        def forward(self, x: Tensor) -> Tensor:
            plain, kept = self.layers
            return plain(checkpoint(kept, x, *self.tables, use_reentrant=False), *self.tables)

    torch.manual_seed(0)
    model, x = Checkpointed(2), torch.randn(2, 64, 64)
    plain, _ = step(model, x, **STORAGE)
    found, report = step(model, x, **STORAGE, **{"memory.offload": "all"})
    assert report.offloaded and all(map(torch.equal, plain, found))


def test_all_codes_go_and_scales_stay() -> None:
    split = encoded(**{"memory.offload": "all"})
    sizes = {is_on_host(storage_root(edge.forward)): edge.forward.meta["val"].dtype for edge in split.edges}
    codes = [e for e in split.edges if e.forward.meta["val"].dtype in (torch.int8, torch.float8_e4m3fn)]
    assert codes and all(is_on_host(e.forward) and is_on_host(e.backward) for e in codes)
    assert sizes[False] not in (torch.int8, torch.float8_e4m3fn)
    for half in (split.fw, split.bw):
        verify(half.graph, "offload_codes")


def test_it_is_idempotent() -> None:
    split = encoded(**{"memory.offload": "all"})
    nodes = [len(half.graph.nodes) for half in (split.fw, split.bw)]
    assert told(split) == Notes() and nodes == [len(half.graph.nodes) for half in (split.fw, split.bw)]


def test_views_of_one_storage_are_one_copy_and_are_made_again() -> None:
    split = encoded()
    (edge, *_) = (e for e in split.edges if e.forward.meta["val"].dtype == torch.int8)
    root = storage_root(edge.forward)
    assert root is not edge.forward, "codes are saved as a view of what the codec made"
    before = edge.backward.meta["val"].shape
    (reader,) = edge.backward.users
    told(split)
    (kept,) = (e for e in split.edges if e.forward.all_input_nodes == [root])
    view = reader.args[0]
    assert kept.backward.meta["val"].shape == root.meta["val"].shape and view.meta["val"].shape == before


def test_auto_takes_what_the_link_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 50 GB/s a copy takes a tenth of the gap between kernels: all go but the last two, which are read at once."""
    assert len(told(encoded(), **{"memory.offload": "auto"}).offloaded) == 6 - 2
    slow = {name: dataclasses.replace(each, link=1.0) for name, each in RATES.items()}
    monkeypatch.setattr(rates, "RATES", slow)
    found, every = told(encoded(), **{"memory.offload": "auto"}), told(encoded())
    assert {skip.reason for skip in found.skips} == {AT_ONCE, BUSY}
    assert not any(each.waits_us for each in found.offloaded)
    assert len(every.offloaded) == 6 and sum(each.waits_us for each in every.offloaded) > 0
    assert {each.device for each in every.offloaded} == {"H100"}


def test_a_copy_back_begins_before_an_operation_that_hides_it() -> None:
    """Each copy takes less than a matmul: at least one that does not need it stands between the copy and its reader."""
    nodes = list(encoded(**{"memory.offload": "auto"}).bw.graph.nodes)
    back = [node for node in nodes if node.meta.get(MOVED) == DEVICE]
    assert len(back) == 6 - 2
    for copied in back:
        first = min(map(nodes.index, copied.users))
        assert any(node.target is torch.ops.aten.mm.default for node in nodes[nodes.index(copied) : first])


def test_small_codes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_pass, "LEAST_BYTES", 128 * 64 + 1)
    found = told(encoded())
    assert {skip.reason for skip in found.skips} == {SMALL} and not found.offloaded


def test_a_module_may_be_left_out() -> None:
    model, modules = nn.Sequential(SwiGLU(), SwiGLU()), {"1": {"memory.offload": "off"}}
    _, report = step(model, torch.randn(128, 64), **STORAGE, modules=modules, **{"memory.offload": "all"})
    assert report.offloaded and not any(entry.origin.module.startswith("1") for entry in report.offloaded)
    left = report.notes.skipped(OFFLOAD)
    assert left and all("Recipe.memory.offload is off for module '1" in skip.reason for skip in left)


def test_other_orders_of_memory_and_other_devices_stay() -> None:
    for value, reason in (
        (lambda v: v.new_empty_strided(v.shape, (1, *v.stride()[:-1])), ORDER),
        (lambda v: torch.empty_like(v, device="meta"), OTHER_DEVICE.format("meta")),
    ):
        split = encoded()
        for edge in split.edges:
            root = storage_root(edge.forward)
            with private.detect_fake_mode([root.meta["val"]]):
                root.meta["val"] = (
                    value(root.meta["val"]) if root.meta["val"].dtype == torch.int8 else root.meta["val"]
                )
        assert {skip.reason for skip in told(split).skips} == {reason}


def test_a_torch_without_the_operators_keeps_codes_on_the_gpu() -> None:
    split = encoded()
    for root in {storage_root(edge.forward) for edge in split.edges}:
        with private.detect_fake_mode([root.meta["val"]]):
            root.meta["val"] = torch.empty_like(root.meta["val"], device="cuda")
    with mock.patch.object(private, "transfers", lambda: None):
        assert {skip.reason for skip in told(split).skips} == {NO_OPERATORS}


def test_symbolic_sizes_stay() -> None:
    model = Steps(2)
    options = {**STORAGE, "memory.offload": "all", "saved.min_numel": 0}
    compiled = torch.compile(model, backend="fp8compile", options=options, dynamic=True)
    compiled(torch.randn(128, 64)).sum().backward()
    skips = fp8compile.report(compiled).notes.skipped(OFFLOAD)
    assert skips and {skip.reason for skip in skips} == {NOT_STATIC}


def test_without_codes_and_under_cuda_graphs_it_has_no_effect() -> None:
    model, x = Steps(1), torch.randn(128, 64)
    _, report = step(model, x, preset="off", **{"debug.codegen": "eager", "memory.offload": "all"})
    assert report.remarks == (NOTHING_TO_OFFLOAD,) and not report.offloaded
    _, report = step(model, x, **STORAGE, **{"memory.offload": "all", "debug.inductor": {"triton.cudagraphs": True}})
    assert NO_CUDA_GRAPHS_ON_HOST in report.remarks and not report.offloaded


def test_nested_regions_are_inlined() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            region = torch.compiler.nested_compile_region(lambda x, w: torch.tanh(x @ w))
            return region(region(x, self.weight), self.weight)

    _, report = step(Regions(), torch.randn(128, 64), **STORAGE, **{"memory.offload": "all"})
    assert WHOLE in report.remarks and report.offloaded


def test_bytes_on_the_host_are_not_the_devices() -> None:
    model, x = Steps(6), torch.randn(1024, 64)  # so many rows that the optimizer's step is not the peak
    plain, away = (
        fp8compile.explain(model, (x,), recipe=Recipe(**{**STORAGE, "saved.min_numel": 0, "memory.offload": offload}))
        for offload in ("off", "all")
    )
    assert plain.saved_bytes - away.saved_bytes == away.host_bytes == sum(e.bytes for e in away.offloaded) > 0
    assert away.fits().host == away.host_bytes and "on the host" in str(away.fits()) + str(away)
    assert away.fits().peak < plain.fits().peak
    assert away.saved_bytes == sum(part.nbytes for part in away.waterfall.parts)
    assert away.saved_bytes_plain + sum(c.nbytes for c in away.waterfall.changes) == away.saved_bytes
    assert GraphReport.from_dict(json.loads(json.dumps(away.graphs[0].to_dict()))).notes == away.graphs[0].notes


def test_the_predicted_peak_falls_by_what_is_away() -> None:
    """At the forward's end all codes are away but the last two, whose copies wait for it. The backward ends where most
    gradients exist and no codes, so there it falls by less."""
    steps, tokens = 8, 1024
    plain, away = (
        fp8compile.explain(
            Steps(steps), (torch.randn(tokens, 64),), recipe=Recipe(**STORAGE, memory={"offload": offload})
        )
        for offload in ("off", "all")
    )
    fell = [peaks(plain)[half] - peaks(away)[half] for half in (0, 1)]
    assert fell[0] == (steps - 2) * tokens * 64 and 0 < fell[1] <= fell[0]


def peaks(report: Any) -> list[int]:
    """The most bytes that are alive in the forward and in the backward."""
    ours = report.graphs[0].picture.ours
    return [max(ours.alive[: ours.forward]), max(ours.alive[ours.forward :])]


def test_the_picture_and_the_page_tell_of_it(tmp_path: Any) -> None:
    recipe = Recipe(**{**STORAGE, "saved.min_numel": 0, "memory.offload": "all"})
    report = fp8compile.explain(Steps(3), (torch.randn(128, 64),), recipe=recipe)
    picture = report.graphs[0].picture
    assert picture is not None
    away = [kept for kept in picture.kept if kept.label == "waits on the host"]
    assert len(away) == len(report.offloaded) and not any(kept.nbytes for kept in away)
    assert max(picture.ours.alive) == report.graphs[0].saved_bytes + report.graphs[0].workspace_bytes


def on_fake_gpu(run: Callable[[Graph, Node], None]) -> list[str]:
    """The operations of ``sin(codes)`` on a GPU after ``run(graph, codes)``, as text."""
    gm = traced(torch.sin, [(128, 64)], dtype=torch.float32)
    run(gm.graph, gm.graph.find_nodes(op="placeholder")[0])
    gm.graph.lint()
    return [str(node.format_node()) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.skipif(private.transfers() is None, reason="torch 2.11 has no such operators")
def test_on_a_gpu_copies_begin_at_once_and_are_waited_for_late() -> None:
    def away(graph: Graph, codes: Node) -> None:
        host = to_host(graph, codes, codes.next, graph.output_node())
        assert host.meta["val"].device.type == "cpu" and is_on_host(host)

    begun, sin, awaited = on_fake_gpu(away)
    assert "ao.offload.default](args = (%" in begun and "sin" in sin
    assert "ao.wait_tensor.default](args = (%offload_default, None," in awaited


@pytest.mark.skipif(private.transfers() is None, reason="torch 2.11 has no such operators")
def test_on_a_gpu_copies_back_begin_early_and_are_waited_for_where_they_are_read() -> None:
    def back(graph: Graph, host: Node) -> None:
        output = graph.output_node()
        value = from_host(graph, host, torch.device("cuda", 0), host.next, output)
        output.args = (value,)
        assert value.meta["val"].device.type == "cuda" and step_of(value).kind == "view"
        assert step_of(value.args[0]).size == 128 * 64 * 4

    begun, sin, awaited = on_fake_gpu(back)
    assert (
        "ao.reload.default" in begun and "sin" in sin and "ao.wait_tensor.default](args = (%reload_default" in awaited
    )
