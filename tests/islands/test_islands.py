"""FP32 islands end to end: code that overflows or vanishes in FP16 runs as it is written; a healthy model is left alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from benchmarks.studies.overflowing import (
    CASES,
    SNIPPETS,
    Cameras,
    Function,
    LinearAttention,
    LinearAttentionLayer,
    in_float64,
    trained_once,
)
from fp8compile.fx.graph import WIDENED
from fp8compile.islands.search import computes
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Island
from tests.support.graphs import joint_of, split_of
from tests.support.measure import compiled, matmul_entries, why
from tests.support.reference import sqnr_db
from tests.support.vit import ViT

SNIPPETS_LOG_SUM_EXP = Function(lambda x: x.exp().sum(-1).log())
PLAIN = {"linears": "off", "saved": "off"}


# ------------------------------------------------------------------------------------------------- what overflows


@pytest.mark.parametrize("name", SNIPPETS)
def test_fourteen_snippets(name: str) -> None:
    """Eager FP16 fails each: below 40 dB, or not finite. Run node by node, every value rounded to its dtype."""
    torch.manual_seed(0)
    case = SNIPPETS[name]
    args = case.make()
    reference = case.fn(*in_float64(args))
    assert not sqnr_db(reference, case.fn(*args)) >= 40
    for options in ({"fp32": "auto"}, {"fp32": "policy"}):
        out, gradients = trained_once(compiled(Function(case.fn), **options, **{"debug.codegen": "eager"}), args)
        assert sqnr_db(reference, out) >= 40
        assert all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize("batched", [False, True], ids=["2-D", "batched"])
@pytest.mark.parametrize("name", CASES)
def test_in_every_form(name: str, batched: bool) -> None:
    """2-D (an mm) and batched (a bmm), as a function and as a module, with gradients and without."""
    torch.manual_seed(0)
    case = CASES[name]
    args = case.inputs(batched)
    reference = case.fn(*in_float64(args))
    fits = reference.abs() <= 65504
    expected = trained_once(case.fn, in_float64(args))[1]
    assert not sqnr_db(reference[fits], case.fn(*args)[fits]) >= 40
    for fn in (case.fn, Function(case.fn)):
        torch._dynamo.reset()
        run = torch.compile(fn, backend="fp8compile", options={"debug.codegen": "eager"})
        out, gradients = trained_once(run, args)
        assert sqnr_db(reference[fits], out[fits]) >= 40
        for e, g in zip(expected, gradients, strict=True):
            assert bool(g[e.abs() <= 65504].isfinite().all())
        with torch.no_grad():
            assert sqnr_db(reference[fits], run(*args)[fits]) >= 40


@pytest.mark.parametrize("grad", [True, False])
def test_the_products_of_the_report(grad: bool) -> None:
    """As they were reported, word for word."""
    torch.manual_seed(0)
    K, E, f = (
        (torch.randn(4, 4) * 3000).half(),
        (torch.randn(4, 4) * 3000).half(),
        (torch.randn(8, 65536) * 10).half(),
    )
    for fn, args in (
        (lambda intrinsic, extrinsic: torch.matmul(intrinsic, extrinsic) / 1e4, (K, E)),
        (lambda f: f @ f.t() / f.shape[1], (f,)),
    ):
        given = [a.clone().requires_grad_(grad) for a in args]
        out = torch.compile(fn, backend="fp8compile", options={"debug.codegen": "eager"})(*given)
        assert sqnr_db(fn(*in_float64(args)), out) >= 60, "FP16 rounds to 2^-12: 74 dB"


def test_the_gradient_of_an_island_keeps_its_range() -> None:
    """Of (x / 1e-8) * 1e-7 the gradient passes through 1e-7, which FP16 holds to one bit: 15 dB if it is rounded there."""
    torch.manual_seed(0)
    case = CASES["division"]
    args = case.make()
    (expected,) = trained_once(case.fn, in_float64(args))[1]
    (gradient,) = trained_once(compiled(Function(case.fn)), args)[1]
    assert sqnr_db(expected, gradient) >= 60


def test_the_maximum_of_an_island_is_found_again() -> None:
    """Its gradient goes where y equals it. In FP32 nothing equals a maximum that was rounded: 0 / 0."""
    x = torch.rand(2, 3, 4, 5).half()
    model = Function(lambda x: F.normalize(x, dim=1).amax(-1))
    out, gradients = trained_once(compiled(model, **PLAIN, **{"debug.codegen": "eager"}), (x,))
    assert bool(out.isfinite().all()) and all(bool(g.isfinite().all()) for g in gradients)


def test_generated_code_and_inference() -> None:
    torch.manual_seed(0)
    case = SNIPPETS["attention"]
    args = case.make()
    reference = case.fn(*in_float64(args))
    model = compiled(Function(case.fn))
    assert sqnr_db(reference, model(*(a.requires_grad_() for a in args))) >= 40
    with torch.no_grad():
        assert sqnr_db(reference, model(*args)) >= 40


@functools.cache
def attention_case() -> tuple[tuple[Tensor, ...], Tensor, list[Tensor]]:
    torch.manual_seed(0)
    args = LinearAttention.inputs()
    reference, gradients = trained_once(LinearAttention(), in_float64(args))
    return args, reference, gradients


def test_linear_attention() -> None:
    """1 / inf = 0: eager gives zeros everywhere, finite and wrong. With islands each result is at FP16's precision."""
    args, reference, expected = attention_case()
    eager, _ = trained_once(LinearAttention(), args)
    assert bool((eager == 0).all())
    out, gradients = trained_once(compiled(LinearAttention(), **PLAIN), args)
    assert sqnr_db(reference, out) >= 60
    assert [sqnr_db(e, g) >= 30 for e, g in zip(expected, gradients, strict=True)] == [True] * 3
    stored, _ = trained_once(compiled(LinearAttention()), args)
    assert sqnr_db(reference, stored) >= 60, "what is stored changes gradients alone"


def test_the_report_says_which_line_overflows_in_linear_attention() -> None:
    args, _, _ = attention_case()
    first = fp8compile.tools.debug_step(
        LinearAttention(), tuple(a.requires_grad_() for a in args), recipe={"fp32": "off"}
    )
    assert first is not None and first.op == "bmm.default" and "z = 1 / (torch.einsum" in first.source


def widened_share(model: nn.Module, *args: Tensor) -> float:
    """Computing nodes that islands widen, over all computing nodes of the joint graph."""
    args = tuple(a.clone().requires_grad_() for a in args)
    graph = joint_of(model, *args, **PLAIN, fp32="off", **{"fp32.observe": False})
    return sum(i.nodes for i in islands_of(model, *args)) / sum(computes(n) for n in graph.nodes)


def test_at_most_a_quarter_of_a_linear_attention_layer_is_widened() -> None:
    assert 0 < widened_share(LinearAttentionLayer().half(), torch.randn(1, 4096, 128).half()) <= 0.25


def test_cameras() -> None:
    """Entries to 5,000: products to 2.5e7. Where the pixel fits, it is the float64 pixel rounded to FP16."""
    torch.manual_seed(0)
    args = Cameras.inputs()
    reference, eager = Cameras()(*in_float64(args)), Cameras()(*args)
    assert not eager.isfinite().any()
    out, _ = trained_once(compiled(Cameras(), **PLAIN), args)
    fits = reference.abs() <= 65504
    rounded = torch.maximum(reference.abs() * 2**-11, torch.tensor(2.0**-25)) * (
        1 + 2**-10
    )  # half an ulp; FP32's error
    assert bool(fits.float().mean() > 0.9) and bool(((out.double() - reference).abs() <= rounded)[fits].all())


# ------------------------------------------------------------------------------------------------ unstable modules


def losses(model: nn.Module, steps: int = 5, **options: Any) -> list[float]:
    torch.manual_seed(0)
    images, classes = torch.randn(8, 3, 16, 16).half(), torch.arange(8) % 10
    fn = compiled(model, **options, **{"debug.codegen": "eager"})
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(fn(images).float(), classes)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 1e-2 * gradient.float().nan_to_num(nan=torch.nan).clamp(-1, 1).to(parameter.dtype)
        found.append(loss.item())
    return found


def unstable() -> ViT:
    torch.manual_seed(0)
    model = ViT().half()
    model.blocks[1].make_unstable()
    return model


def test_an_unstable_block_trains_with_keep_fp32() -> None:
    assert not all(map(torch.isfinite, map(torch.tensor, losses(unstable(), **PLAIN))))
    kept = losses(unstable(), **PLAIN, **{"fp32.keep": ("blocks.1",)})
    assert all(map(torch.isfinite, map(torch.tensor, kept)))


def islands_of(model: nn.Module, *args: Tensor, **options: Any) -> tuple[Island, ...]:
    return fp8compile.explain(model, args, recipe={**PLAIN, **options}).islands


def test_the_report_lists_islands_with_reason_size_and_place() -> None:
    report = fp8compile.explain(unstable(), (torch.randn(2, 3, 16, 16).half(),), recipe={"fp32.keep": ("blocks.1",)})
    island = max(report.islands, key=lambda i: i.nodes)
    assert island.origin.module.startswith("blocks.1") and "fp32.keep: blocks.1" in island.reason
    assert island.nodes == len(island.members) > 10 and island.matmuls > 0 and island.bytes_added > 0
    assert f"{len(report.islands)} FP32 islands of " in str(report)
    assert "blocks.1" in str(report.islands) and "fp32.keep: blocks.1" in str(report.islands)
    assert '"islands"' in report.to_json()


def test_a_dump_shows_which_operations_an_island_holds() -> None:
    report = fp8compile.explain(SNIPPETS_LOG_SUM_EXP, (torch.randn(4, 8).half().requires_grad_(),), recipe=PLAIN)
    step = next(s for s in report.graphs[0].steps if s.name == "widen_unsafe_ops")
    lines = step.after.full_text.splitlines()
    assert "exp_f32: f32[4, 8] = aten.exp.default(primals_1_f32)  # fp8compile: FP32 island" in lines
    assert "# fp8compile: FP32 island" not in step.before.text


def test_under_autocast() -> None:
    """FP32 parameters, FP16 products: the scores of two projections leave FP16, their softmax does not care."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ x

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 32, 64)
    with torch.no_grad():
        model.q.weight.mul_(300)
        model.k.weight.mul_(300)
    reference = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()
        out = compiled(model, **PLAIN, **{"debug.codegen": "eager"})(x)
    out.float().sum().backward()
    assert out.isfinite().all() and all(
        bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
    )
    assert sqnr_db(reference, out) > 20, "logits of up to 1e5: a rounding of q moves them by 50"


def test_operations_by_name() -> None:
    model = Function(lambda x, w: torch.tanh(torch.sigmoid(x) * w) * w)
    x, w = torch.randn(8, 8).half().requires_grad_(), torch.randn(8, 8).half()
    assert not islands_of(model, x, w)
    (island,) = islands_of(model, x, w, **{"fp32.keep": ("aten.tanh",)})
    assert all(name.startswith(("tanh", "mul", "sub")) for name in island.members), island.members


# ------------------------------------------------------------------------------------------------ what stays


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_only_fp16_is_widened(dtype: torch.dtype) -> None:
    model = Function(lambda x: torch.softmax(x.exp().sum(-1, keepdim=True) * x, -1))
    assert not islands_of(model, torch.randn(4, 2048, dtype=dtype, requires_grad=True))


def test_policy_widens_bf16_as_amp_does() -> None:
    model = Function(lambda x: x.exp().sum(-1).log())
    (island,) = islands_of(model, torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), fp32="policy")
    assert {"exp", "sum_1", "log"} <= set(island.members)


def test_healthy_models_are_left_alone() -> None:
    assert not islands_of(ViT().half(), torch.randn(2, 3, 16, 16).half())
    assert not islands_of(ViT().bfloat16(), torch.randn(2, 3, 16, 16).bfloat16())


def test_a_product_in_an_island_is_no_fp8_linear_and_what_it_saves_keeps_its_range() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 64)).half()
    x = torch.randn(128, 64).half()
    options = {"fp32.keep": ("2",), "linears.emulate": True, "saved.min_numel": 0, "linears.skip": ()}
    report = fp8compile.explain(model, (x,), recipe=options)
    reasons = {entry.origin.module: why(entry) for entry in matmul_entries(report)}
    assert reasons == {"0": "", "2": "in an FP32 island", "3": ""}
    split = split_of(model, x, **options)
    for edge in split.edges:
        assert WIDENED not in edge.forward.meta or edge.forward.meta["val"].dtype == torch.float32


def test_a_saved_value_of_an_island_is_kept_as_it_is() -> None:
    model = Function(lambda x, w: (torch.exp(x @ w) ** 2).sum(-1).log())
    x, w = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    report = fp8compile.explain(model, (x.requires_grad_(), w.requires_grad_()), recipe={"saved.min_numel": 0})
    assert any(i.nodes for i in report.islands)
    assert all(s.dtype != "f32" for s in report.saved)


# ------------------------------------------------------------------------------------------------ bad input


def cause(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(getattr(error.value, "inner_exception", error.value))


@pytest.mark.parametrize(
    ("pattern", "near"), [("block.1", "blocks.1"), ("aten.softmax", "_softmax"), ("head.linear", "head")]
)
def test_a_pattern_that_matches_nothing(pattern: str, near: str) -> None:
    with pytest.raises(Exception, match=r"fp32\.keep") as error:
        compiled(ViT().half(), **{"fp32.keep": (pattern,)})(torch.randn(2, 3, 16, 16).half())
    assert pattern in cause(error) and near in cause(error)


@pytest.mark.parametrize("value", ["policies", True, 3])
def test_a_value_that_islands_cannot_have(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Recipe\.fp32\.islands cannot be"):
        Recipe(fp32=value)
