"""widen_unsafe_ops: what it widens and why, what it leaves and why; the numbers are in tests/islands/test_islands.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from benchmarks.studies.overflowing import Function
from fp8compile._version import release_of
from fp8compile.fx.graph import WIDENED, copy_graph
from fp8compile.islands.policy import LEFT, POLES, WIDEN
from fp8compile.islands.search import decide
from fp8compile.islands.upcast import can_widen
from fp8compile.passes.widen_unsafe_ops import widen_unsafe_ops
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import ISLAND, Island
from tests.support.graphs import joint_of, text_of

PLAIN = {"linears": "off", "saved": "off", "fp32.observe": False}


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half().requires_grad_()


def test_golden_log_sum_exp_and_its_backward() -> None:
    """From exp to log, which fits again; the gradient from log back to exp."""
    graph = joint_of(Function(lambda x: x.exp().sum(-1).log()), half(4, 8), **PLAIN)
    assert_expected_inline(
        text_of(graph),
        """\
primals_1: float16[4, 8]
tangents_1: float16[4]
tangents_1_f32: float32[4] = convert_element_type(tangents_1, torch.float32)
primals_1_f32: float32[4, 8] = convert_element_type(primals_1, torch.float32)
exp_f32: float32[4, 8] = exp(primals_1_f32)
sum_1_f32: float32[4] = sum.dim_IntList(exp_f32)
log_f32: float32[4] = log(sum_1_f32)
log_cast: float16[4] = convert_element_type(log_f32, torch.float16)
div_f32: float32[4] = div(tangents_1_f32, sum_1_f32)
unsqueeze_f32: float32[4, 1] = unsqueeze(div_f32)
expand_f32: float32[4, 8] = expand(unsqueeze_f32)
mul_f32: float32[4, 8] = mul(expand_f32, exp_f32)
mul_cast: float16[4, 8] = convert_element_type(mul_f32, torch.float16)
return log_cast, mul_cast
""",
    )


def test_golden_product_of_two_matrices_and_its_backward() -> None:
    """A factor behind a product comes too late for it. The backward of the division reads nothing of the forward."""
    graph = joint_of(Function(lambda k, e: torch.matmul(k, e) / 1e4), half(4, 4), half(4, 4), **PLAIN)
    assert_expected_inline(
        text_of(graph),
        """\
primals_1: float16[4, 4]
primals_2: float16[4, 4]
tangents_1: float16[4, 4]
tangents_1_f32: float32[4, 4] = convert_element_type(tangents_1, torch.float32)
primals_2_f32: float32[4, 4] = convert_element_type(primals_2, torch.float32)
primals_1_f32: float32[4, 4] = convert_element_type(primals_1, torch.float32)
mm_f32: float32[4, 4] = mm(primals_1_f32, primals_2_f32)
div_f32: float32[4, 4] = div(mm_f32, 10000.0)
div_cast: float16[4, 4] = convert_element_type(div_f32, torch.float16)
div_1_f32: float32[4, 4] = div(tangents_1_f32, 10000.0)
permute: float16[4, 4] = permute(primals_1)
permute_f32: float32[4, 4] = convert_element_type(permute, torch.float32)
mm_1_f32: float32[4, 4] = mm(permute_f32, div_1_f32)
mm_1_cast: float16[4, 4] = convert_element_type(mm_1_f32, torch.float16)
permute_1: float16[4, 4] = permute(primals_2)
permute_1_f32: float32[4, 4] = convert_element_type(permute_1, torch.float32)
mm_2_f32: float32[4, 4] = mm(div_1_f32, permute_1_f32)
mm_2_cast: float16[4, 4] = convert_element_type(mm_2_f32, torch.float16)
return div_cast, mm_2_cast, mm_1_cast
""",
    )


def islands(fn: Callable[..., Tensor], *args: Tensor, **options: object) -> tuple[Island, ...]:
    return fp8compile.explain(Function(fn), args, recipe={**PLAIN, **options}).islands


# Each with a consumer, to which the value is handed on in FP32: without one there is no island.
UNSAFE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "exp": (lambda x: (x.exp() * x).tanh(), "exp: FP16 ends at exp(11.09)"),
    "pow": (lambda x: (x**3 * x).tanh(), "pow: a square leaves FP16 at 256"),
    "square": (lambda x: (x * x + x).tanh(), "a square: leaves FP16 at 256"),
    "sum": (lambda x: (x.sum(0) * x).tanh(), "sum of 2048 elements"),
    "cumsum": (lambda x: (x.cumsum(0) * x).tanh(), "cumsum of 2048 elements"),
    "variance": (lambda x: (x.var(0) * x).tanh(), "var: sums squares"),
    "norm": (lambda x: (x.norm() * x).tanh(), "norm: sums squares"),
    "reciprocal": (lambda x: (x.reciprocal() * x).tanh(), "reciprocal: an input below 2**-16 gives inf"),
    "quotient": (lambda x: (x / (x + 1) * x).tanh(), "a quotient: a divisor below 2**-16 gives inf"),
    "far factor": (lambda x: (x * 1e6 * x).tanh(), "a factor of 1e+06"),
    "sharp softmax": (
        lambda x: (x * 100).softmax(0),
        "logits times 100",
    ),  # but for torch 2.11, which scales them in FP32
    "product": (lambda x: (x @ x.t()).sum(-1).tanh(), "a matmul of two activations over 4, unscaled"),
    "product of two matrices": (lambda x: x.t() @ x / 1e4, "a matmul of two activations over 2048, unscaled"),
    "Gram matrix": (lambda x: x.t() @ x / x.shape[0], "a matmul of two activations over 2048, unscaled"),
    "scaled hardly": (lambda x: (x.t() * 0.999) @ x / 2048, "a matmul of two activations over 2048, unscaled"),
    "scores scaled hardly": (lambda x: (x.t() @ x * 0.9).softmax(-1), "a matmul of two activations over 2048"),
    "scores scaled far": (
        lambda x: (x @ x.t() * 2.0**-9).softmax(-1),
        "a matmul of two activations over 4, unscaled",
    ),
    "scores that nothing exponentiates": (lambda x: (x @ x.t() * 0.125).tanh() * 8, "a matmul of two activations"),
    "product with a table": (
        lambda x: (x.t() @ torch.ones(2048, 8, dtype=x.dtype)) / 2048,
        "a matmul of two activations",
    ),
    "log of a probability": (lambda x: x.softmax(0).log(), "read by log, which has a pole"),
    "log softmax": (
        lambda x: (x.log_softmax(0) * x).tanh(),
        "_log_softmax: reaches down as far as the logits spread",
    ),
    "rsqrt": (lambda x: (x.abs().rsqrt() * x).tanh(), "rsqrt: an input that flushed to zero gives inf"),
    "loss": (lambda x: (F.mse_loss(x, x + 1) * x).tanh(), "squares"),
}


@pytest.mark.parametrize(
    "name", [n for n in UNSAFE if n != "sharp softmax" or release_of(torch.__version__) > (2, 11)]
)
def test_every_reason_to_begin(name: str) -> None:
    fn, reason = UNSAFE[name]
    found = islands(fn, half(2048, 4))
    assert found and all(i.nodes == len(i.members) > 0 and i.bytes_added > 0 for i in found)
    assert any(reason in i.reason for i in found), [i.reason for i in found]
    assert not islands(fn, torch.randn(2048, 4).bfloat16().requires_grad_())


LEFT_ALONE: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x: x.softmax(-1) * 2,
    "layer norm": lambda x: F.layer_norm(x, (4,)) + 1,
    "mean": lambda x: x.mean(0) + x,
    "short sum": lambda x: x[:512].sum(0) * x,
    "scaled scores": lambda x: ((x @ x.t()) * 0.125).softmax(-1) @ x,
    "scores scaled before": lambda x: ((x * 0.5) @ x.t()).softmax(-1) @ x,
    "scores scaled on both sides": lambda x: ((x * 0.7) @ (x * 0.7).t()).softmax(-1) @ x,
    "scores scaled by 1 / d": lambda x: (x @ x.t() / 4.0).softmax(-1) @ x,
    "capped scores": lambda x: (torch.tanh(x @ x.t() * 0.5 / 50) * 50).softmax(-1) @ x,
    "masked scores": lambda x: torch.where(x[:, 0] > 0, x @ x.t() * 0.5, -6e4).softmax(-1) @ x,
    "a mean of products": lambda x: (x / 1024).t() @ x,
    "silu": lambda x: F.silu(x) * x.relu(),
    "gelu": lambda x: F.gelu(x) * 2,
    "elu": lambda x: F.elu(x) + 1,
    "small factor": lambda x: x * 0.01 + x / 64,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_the_neighbours_left_out(name: str) -> None:
    assert not islands(LEFT_ALONE[name], half(1024, 4))


PROVEN: dict[str, Callable[..., Tensor]] = {
    "exp of a difference to the largest": lambda x: ((x - x.amax(-1, keepdim=True)).exp() * x).tanh(),
    "exp of what is clamped": lambda x: (x.clamp(-5, 5).exp() + 1) * 2,
    "square of a sigmoid": lambda x: (x.sigmoid() * 4 + 1) ** 2,
    "long sum of a mask": lambda x: (x.sigmoid() + 1)[:2000].sum(0),
}


@pytest.mark.parametrize("name", PROVEN)
def test_what_is_proven_to_fit_is_left_and_reported(name: str) -> None:
    report = fp8compile.explain(Function(PROVEN[name]), (half(2048, 4),), recipe=PLAIN)
    assert [s for s in report.notes.skipped(ISLAND) if s.reason.startswith("proven to fit: ")], report.skips
    assert not report.islands
    assert islands(PROVEN[name], half(2048, 4), **{"fp32.keep": ("aten.*",)})


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("closed_over", [True, False])
def test_a_product_with_a_parameter_is_a_linear_in_functions_too(grad: bool, closed_over: bool) -> None:
    """A closed-over parameter and one that is given are inputs of the graph like any other; they are known by kind."""
    weight, other = nn.Parameter(torch.randn(2048, 8).half()), torch.randn(2048, 8).half()
    x = torch.randn(4, 2048).half()

    def widened(w: Tensor) -> int:
        torch._dynamo.reset()
        fn = (lambda x: x @ w / 1e4) if closed_over else (lambda x, w: x @ w / 1e4)
        with torch.set_grad_enabled(grad):
            graph = joint_of(fn, x, *(() if closed_over else (w,)), **PLAIN)  # type: ignore[arg-type]
        return sum(WIDENED in n.meta for n in graph.nodes)

    assert widened(weight) == 0 < widened(other.requires_grad_()) and widened(weight * 2 if grad else other) > 0


def test_gradients_that_read_nothing_of_their_forward_are_in_its_island() -> None:
    """(x / 1e-8) * 1e-7: a gradient times 1e-7 is 0 in FP16."""
    graph = joint_of(Function(lambda x: (x / 1e-8) * 1e-7), half(8, 8), **PLAIN)
    assert [n.meta[WIDENED] for n in graph.nodes if WIDENED in n.meta] == ["div", "mul", "mul_1", "div_1"]
    alone = joint_of(Function(lambda x: (x / 1e-8).tanh()), half(8, 8), **PLAIN)
    assert {"div", "tanh"} <= {n.meta[WIDENED] for n in alone.nodes if WIDENED in n.meta}
    assert not any(WIDENED in n.meta for n in joint_of(Function(lambda x: x * 1e-8), half(8, 8), **PLAIN).nodes)


def test_an_island_without_effect_is_none() -> None:
    """The sum of one kernel is FP32 inside; rounding it to FP16 afterwards is what the user asked for."""
    assert not islands(lambda x: x.sum(0), half(2048, 4))
    assert not islands(lambda x: x.exp(), half(2048, 4))
    assert not islands(lambda x: x.var(0), half(2048, 4)), "nor are its gradients, which hand on among themselves"


def test_a_mask_made_from_an_island_is_its_end() -> None:
    for mode in ("policy", "auto"):
        found = islands(lambda x: torch.where(x.exp() > 1, x, x.relu()), half(4, 8), fp32=mode)
        assert [i.members for i in found] == [("exp",)], found


def test_idempotent_and_the_recipe_decides() -> None:
    fn = Function(lambda x: x.exp().sum(-1).log())
    graph = joint_of(fn, half(4, 8), **PLAIN)
    before = text_of(graph)
    assert not widen_unsafe_ops(graph, Context(Recipe())).islands and text_of(graph) == before
    plain = joint_of(fn, half(4, 8), **PLAIN, fp32="off")
    assert not any(WIDENED in n.meta for n in plain.nodes) and plain.owning_module is not None
    assert not decide(copy_graph(plain.owning_module).graph, Context(Recipe(fp32="off"))).islands
    assert widen_unsafe_ops(plain, Context(Recipe())).islands


def test_one_module_can_differ() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (Function(lambda x: x.exp().sum(-1, keepdim=True).log() + x) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    report = fp8compile.explain(Model(), (half(4, 8),), recipe={**PLAIN, "modules": {"first": {"fp32": "off"}}})
    assert {i.origin.module for i in report.islands} == {"second"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_a_model_where_it_declines(dtype: torch.dtype) -> None:
    gain = torch.ones((), requires_grad=True)
    assert not islands(lambda x, g: (x.abs() * 2).sum(0) * g, torch.ones(2048, 4).to(dtype), gain)


def test_attention_that_takes_no_fp32_is_left_with_the_cure() -> None:
    """Flash and cuDNN attention exist on a GPU only: the node stands in a graph of another model."""
    graph = joint_of(Function(lambda x: x.exp().sum(-1).log()), half(4, 8), **PLAIN, fp32="off")
    assert graph.owning_module is not None
    graph = copy_graph(graph.owning_module).graph
    x = next(iter(graph.find_nodes(op="placeholder")))
    with graph.inserting_before(graph.output_node()):
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"):
            target = getattr(torch.ops.aten, name).default
            node = graph.call_function(target, (x, x, x))
            node.meta["val"] = (x.meta["val"],)
            assert not can_widen(node)
    left = decide(graph, Context(Recipe(fp32={"islands": "off", "keep": ("aten.*attention",)}))).skipped
    assert [(reason, "takes no FP32" in why) for _, reason, why in left] == [
        ("Recipe.fp32.keep: aten.*attention", True)
    ] * 2


def test_lists_name_operations_that_exist() -> None:
    for name in (*WIDEN, *LEFT, *POLES):
        assert hasattr(torch.ops.aten, name), name
    assert not WIDEN.keys() & LEFT.keys()
