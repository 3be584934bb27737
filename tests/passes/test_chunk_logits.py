"""chunk_logits: golden, contract, numbers of every form of a loss, declines."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import _torch as private
from fp8compile.fx.graph import numel
from fp8compile.passes import chunk_logits as module
from fp8compile.passes.chunk_logits import chunk_logits
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import LOGITS, Chunked
from tests.support import losses
from tests.support.graphs import joint_of, split_of, text_of
from tests.support.losses import FORMS, HIDDEN, WORDS, Head, Loss, bounds, case, gradients
from tests.support.measure import compiled

aten = torch.ops.aten
CHUNKS = 3
EXACT = {"linears": "off", "saved": "off", "fp32.observe": False}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def joint(loss: Loss = losses.mean, bias: bool = False, **options: Any) -> Graph:
    model, x, t = case(loss, bias=bias)
    return joint_of(model, x, t, **{**EXACT, "memory.chunk_logits": CHUNKS, **options})


def matmuls(graph: Graph) -> list[tuple[int, ...]]:
    found = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    return [tuple(n.meta["val"].shape) for n in found]


def notes(model: nn.Module, *args: Tensor, **options: Any) -> tuple[list[Chunked], list[str]]:
    """What is computed in chunks, and the reasons why logits were left."""
    fn = compiled(model, **{**EXACT, "memory.chunk_logits": CHUNKS, **options})
    fn(*args)
    report = fp8compile.report(fn)
    return list(report.chunked), [skip.reason for skip in report.notes.skipped(LOGITS)]


def test_golden() -> None:
    """What is put in; each chunk takes results of the one before."""
    lines = [
        line
        for line in text_of(joint(**{"memory.chunk_logits": 2})).splitlines()
        if "_in_" in line or "of_all" in line
    ]
    shown = [re.sub(r"where_2, .*, permute, .*permute_3", "..., permute_3", line) for line in lines]
    assert_expected_inline(
        "\n".join(shown),
        """\
as_strided: float32[6, 1] = logits_in_rows(view, permute, unsqueeze)
as_strided_1: float32[6, 1] = logits_in_rows(view, permute, unsqueeze)
as_strided_2: float32[6, 1] = logits_in_rows(view, permute, unsqueeze)
as_strided_3: float32[6, 1] = logits_in_rows(view, permute, unsqueeze, as_strided, as_strided_1, as_strided_2)
as_strided_4: float32[6, 1] = logits_in_rows(view, permute, unsqueeze, as_strided, as_strided_1, as_strided_2)
as_strided_5: float32[6, 1] = logits_in_rows(view, permute, unsqueeze, as_strided, as_strided_1, as_strided_2)
view_10: float32[12, 1] = of_all_rows(as_strided, as_strided_3)
view_11: float32[12, 1] = of_all_rows(as_strided_1, as_strided_4)
view_12: float32[12, 1] = of_all_rows(as_strided_2, as_strided_5)
mm_6: float32[25, 16] = logits_in_columns(..., permute_3, where_3)
as_strided_6: float32[12, 16] = logits_in_columns(..., permute_3, where_3)
mm_9: float32[25, 16] = logits_in_columns(..., permute_3, as_strided_6, as_strided_6, mm_6)
as_strided_7: float32[12, 16] = logits_in_columns(..., permute_3, as_strided_6, as_strided_6, mm_6)
cat_3: float32[50, 16] = of_all_columns(mm_6, mm_9)""",
    )


@pytest.mark.parametrize("bias", [False, True])
def test_matmuls_are_those_of_the_chunks_and_one_more_of_the_head(bias: bool) -> None:
    rows, columns = [4, 4, 4], [17, 17, 16]
    own = [(n, WORDS) for n in rows]
    for count in columns:
        own += [(12, count), *sorted([(12, HIDDEN), (count, HIDDEN)])]
    assert sorted(matmuls(joint(bias=bias))) == sorted(own)


@pytest.mark.parametrize("loss", [losses.smoothed, losses.z_loss, losses.soft_capped], ids=lambda form: form.__name__)
def test_no_matmul_gives_all_logits_and_nothing_is_made_of_them(loss: Loss) -> None:
    graph = joint(loss)
    whole = [n for n in graph.nodes if n.op == "call_function" and numel(n.meta["val"]) >= 12 * WORDS - 1]
    reads = {aten.exp.default, aten.mm.default, aten.tanh.default, aten.amax.default}
    assert not reads & {n.target for n in whole}


def test_it_is_idempotent() -> None:
    graph = joint()
    before = text_of(graph)
    assert chunk_logits(graph, Context(Recipe(memory={"chunk_logits": CHUNKS}))).chunked == ()
    assert text_of(graph) == before


WITH_BIAS = (losses.weighted, losses.shifted_logits)


@pytest.mark.parametrize(
    ("loss", "bias"), [(form, form in WITH_BIAS) for form in FORMS], ids=[form.__name__ for form in FORMS]
)
def test_loss_and_gradients_are_those_of_eager_in_another_order_of_sums(loss: Loss, bias: bool) -> None:
    model, x, t = case(loss, torch.float64, bias)
    fn = compiled(model, **EXACT, **{"memory.chunk_logits": CHUNKS})
    ours = gradients(model, fn, x, t)
    assert len(fp8compile.report(fn).chunked) == 1
    for got, exact, bound in zip(ours, gradients(model, model, x, t), bounds(model, x, t, 2.0**-53), strict=True):
        assert ((got - exact).abs() <= 2 * bound).all()  # eager rounds as well


ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize(
    ("dtype", "upstream"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 2.0**12)]
)
@pytest.mark.parametrize("loss", [losses.hugging_face, losses.soft_capped], ids=lambda form: form.__name__)
def test_in_each_dtype_the_error_is_that_of_the_dtype(loss: Loss, dtype: torch.dtype, upstream: float) -> None:
    model, x, t = case(loss, dtype)
    fn = compiled(model, **EXACT, fp32="off", **{"memory.chunk_logits": CHUNKS})
    ours = gradients(model, fn, x, t, upstream)
    assert len(fp8compile.report(fn).chunked) == 1
    exact = gradients(twin := copy.deepcopy(model).double(), twin, x.detach().double().requires_grad_(), t)
    scales = [1.0] + [upstream] * (len(ours) - 1)
    # soft_capped rounds cap, quotient, product and log-probabilities to the dtype too: 4 roundings for the one of a logit
    limits = bounds(model, x, t, 2.0**-24, 4 * ROUNDING[dtype])
    for got, reference, bound, scale in zip(ours, exact, limits, scales, strict=True):
        assert ((got.double() / scale - reference).abs() <= bound).all()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code_computes_the_same(dtype: torch.dtype) -> None:
    model, x, t = case(losses.shifted_logits, dtype, bias=True)
    ours = gradients(
        model, compiled(model, **EXACT, **{"debug.codegen": "inductor", "memory.chunk_logits": CHUNKS}), x, t
    )
    limits = bounds(model.double(), x, t, 2.0**-24, 4 * ROUNDING[dtype])
    exact = gradients(model, model, x.detach().double().requires_grad_(), t)
    for got, reference, bound in zip(ours, exact, limits, strict=True):
        assert ((got.double() - reference).abs() <= bound).all()


class Two(nn.Module):
    """Two heads that share a weight; the second, with its loss, is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        second = checkpoint(lambda h: losses.mean(self.lm_head(h), t.roll(1, 1)), x.sin(), use_reentrant=False)
        total: Tensor = losses.mean(self.lm_head(x), t) + 0.3 * second
        return total


def test_two_heads_of_one_weight() -> None:
    _, x, t = case(dtype=torch.float64)
    model = Two().double()
    fn = compiled(model, **EXACT, **{"memory.chunk_logits": CHUNKS})
    ours = gradients(model, fn, x, t)
    assert len(fp8compile.report(fn).chunked) == 2
    (one := Head()).lm_head = model.lm_head
    limits = bounds(one, x, t, 2.0**-53)  # of the first head; |sin x| <= |x| and 0.3 bound the second
    for got, exact, bound in zip(ours, gradients(model, model, x, t), limits, strict=True):
        assert ((got - exact).abs() <= 4 * bound.max()).all()


def test_under_autocast() -> None:
    model, x, t = case(losses.upcast)

    def run(fn: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = fn(x, t)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]

    fn = compiled(model, **EXACT, **{"memory.chunk_logits": CHUNKS})
    ours = run(fn)
    assert len(fp8compile.report(fn).chunked) == 1
    for got, plain, bound in zip(ours, run(model), bounds(model, x, t, 2.0**-24, 2.0**-8), strict=True):
        assert got.dtype == plain.dtype
        assert ((got.double() - plain.double()).abs() <= 2 * bound).all()


def test_hidden_states_and_statistics_are_saved_as_they_are() -> None:
    """Codes of them would give other logits than those that the sums of exponentials were made of."""

    class Normed(losses.Head):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return super().forward(F.gelu(F.layer_norm(x, (HIDDEN,))), t)

    _, x, t = case()
    split = split_of(Normed(), x, t, linears="off", **{"memory.chunk_logits": CHUNKS})
    kept = [n for e in split.edges for n in [e.forward] if e.is_tensor and n.meta["val"].dtype == torch.float32]
    assert aten.cat.default in {n.target for n in kept}
    hidden = [n for n in kept if numel(n.meta["val"]) == x.numel() and n.op != "placeholder"]
    assert any(user.op == "output" for n in hidden for user in n.users)
    assert (
        max(numel(e.forward.meta["val"]) for e in split.edges if e.is_tensor and e.forward.op != "placeholder") < 600
    )


# What is declined, and why.


def returned(z: Tensor, t: Tensor) -> Any:
    return losses.mean(z, t), z


def sorted_too(z: Tensor, t: Tensor) -> Tensor:
    return losses.mean(z, t) + z.sort(-1).values[..., 0].sum()


def rows_of_two_kinds(z: Tensor, t: Tensor) -> Tensor:
    return losses.shifted_logits(z, t) + torch.logsumexp(z, -1).square().mean()


def columns_in_the_middle(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), t)


def soft_targets(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), F.one_hot(t.clamp(min=0), WORDS).to(z.dtype).flatten(0, -2) * 0.9)


def masked(z: Tensor, t: Tensor) -> Tensor:
    return losses.mean(z.masked_fill(torch.arange(z.numel()).view(z.shape) % 7 == 0, -100.0), t)


def relative_to_all_rows(z: Tensor, t: Tensor) -> Tensor:
    return losses.mean(z - z.detach().amax(-1, keepdim=True).mean(), t)


def repeated_rows(z: Tensor, t: Tensor) -> Tensor:
    return losses.mean(z + torch.arange(2, dtype=z.dtype).view(2, 1, 1, 1), t.expand(2, -1, -1))


def some_rows(z: Tensor, t: Tensor) -> Tensor:
    p = F.log_softmax(z.flatten(0, -2), -1)
    return p.gather(1, t.flatten()[:4].clamp(min=0).unsqueeze(1)).mean()


def not_trained(z: Tensor, t: Tensor) -> Tensor:
    return losses.mean(z.detach(), t) + 0.0 * z.sum()


DECLINED: list[tuple[Any, str]] = [
    (returned, "the logits are returned by the graph: compute the loss in the compiled function"),
    (sorted_too, "sort reads them"),
    (rows_of_two_kinds, "the loss reads the logits' rows in two ways"),
    (columns_in_the_middle, "view moves their columns"),
    (soft_targets, "sum reads them"),
    (masked, "where reads a tensor of the logits' size beside them"),
    (relative_to_all_rows, "makes one value of all rows"),
    (repeated_rows, "add moves the logits' rows"),
    (some_rows, "gather reads some of the logits' rows"),
    (not_trained, "sum reads them"),
]


@pytest.mark.parametrize(("loss", "reason"), DECLINED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_declined_and_why(loss: Any, reason: str) -> None:
    model, x, t = case(loss)
    chunked, reasons = notes(model, x, t)
    assert chunked == [] and len(reasons) == 1 and reason in reasons[0], reasons


class Added(losses.Head):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        z = torch.addmm(self.lm_head.bias, x.flatten(0, 1), self.lm_head.weight.t(), beta=0.5)
        return losses.mean(z, t)


class AddedToAMatrix(losses.Head):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        z = torch.addmm(self.lm_head.bias.expand(12, WORDS) * x.mean(), x.flatten(0, 1), self.lm_head.weight.t())
        return losses.mean(z, t)


def test_addmm_that_is_no_bias() -> None:
    _, x, t = case()
    assert notes(Added(bias=True), x, t) == ([], ["addmm with alpha or beta"])
    assert notes(AddedToAMatrix(bias=True), x, t) == ([], ["addmm of something else than a bias"])


def test_without_rows() -> None:
    model, x, t = case()
    assert notes(model, x[:0].detach().requires_grad_(), t[:0]) == ([], ["there are no rows"])


def test_symbolic_sizes() -> None:
    model, x, t = case()
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(t, 1)
    assert notes(model, x, t) == ([], ["the logits' size is symbolic: torch.compile(dynamic=False)"])


@pytest.mark.parametrize(("linear", "emulate"), [("tensorwise", True), ("int8", True), ("int8", False)])
def test_a_head_in_fp8_or_int8(linear: str, emulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "cpu_has_vnni", lambda: True)
    torch.manual_seed(5)
    model = losses.Head()
    model.lm_head = nn.Linear(HIDDEN, 48, bias=False)  # with 64 and more it would be known for a head
    _, x, t = case()
    options: dict[str, Any] = {"linears": linear, "linears.emulate": emulate}
    chunked, reasons = notes(model, x, t, **options, **{"linears.skip": ()})
    assert chunked == [] and reasons[0].startswith("Recipe.linears.mode makes the head FP8 or INT8")
    torch._dynamo.reset()
    assert len(notes(model, x, t, **options)[0]) == 1


def test_where_statistics_are_taken() -> None:
    model, x, t = case()
    said = "statistics of the logits or of their gradient are taken: Recipe.fp32.observe=False takes none"
    assert notes(model, x, t, **{"fp32.observe": True}) == ([], [said])


def test_off_says_what_auto_would_do_for_large_logits_alone() -> None:
    model, x, t = case()
    assert (
        notes(model, x, t, **{"memory.chunk_logits": "off"})
        == ([], [])
        == notes(model, x, t, **{"memory.chunk_logits": "auto"})
    )
    with mock.patch.multiple(module, LEAST_BYTES=2000, CHUNK_BYTES=600):
        torch._dynamo.reset()
        said = "Recipe.memory.chunk_logits is off: with 'auto' they would be computed in 4 chunks"
        assert notes(model, x, t, **{"memory.chunk_logits": "off"}) == ([], [said])
        torch._dynamo.reset()
        (entry,), _ = notes(model, x, t, **{"memory.chunk_logits": "auto"})
    assert (entry.forward, entry.backward, entry.bytes_before, entry.bytes_after) == (4, 4, 2400, 624)


def test_by_module_and_not_in_inference() -> None:
    model, x, t = case()
    chunked, reasons = notes(model, x, t, modules={"lm_head": {"memory.chunk_logits": "off"}})
    assert (chunked, reasons) == ([], [])
    torch._dynamo.reset()
    with torch.no_grad():
        assert notes(model, x, t) == ([], [])


def test_a_linear_that_no_softmax_reads() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.up(x))).sum()

    assert notes(Layer(), torch.randn(4, HIDDEN)) == ([], [])
    torch._dynamo.reset()
    assert notes(Layer(), torch.randn(4, HIDDEN), linears="rowwise", **{"linears.emulate": True}) == (
        [],
        [],
    )  # amaxes, and silu's exp


def test_the_report_says_what_does_not_exist() -> None:
    model, x, t = case()
    fn = compiled(model, **EXACT, **{"memory.chunk_logits": CHUNKS})
    fn(x, t)
    report = fp8compile.report(fn)
    assert "logits: 2.3 KiB never exist, 3 + 3 chunks of at most 816 B" in str(report)
    assert "logits computed in chunks" in str(report) and "logits computed in chunks" in report.to_text()
    assert report.saved_bytes < report.saved_bytes_plain - 2400 + 200
    changes = report.saved_bytes_plain + sum(change.nbytes for change in report.waterfall.changes)
    assert changes == report.saved_bytes == sum(part.nbytes for part in report.waterfall.parts)
