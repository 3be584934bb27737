"""save_softmax: golden, contract, numbers, declines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.save_softmax import save_softmax
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled, gradient_sqnr

HEADS, TOKENS, WIDTH = 4, 64, 32
LATER = "save_normalised,recompute_for_budget,encode_saved"


class Attention(nn.Module):
    """By hand; the logits in FP32, as Transformers' eager attention has them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).to(self.dtype) / WIDTH**0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.logits(q, k).softmax(-1).to(v.dtype) @ v


class WithLogits(Attention):
    """A term of the loss reads the logits too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        z = self.logits(q, k)
        return z.softmax(-1).to(v.dtype) @ v + z.tanh().mean()


class OverTwo(Attention):
    """No softmax: a quotient by a sum over two dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        e = self.logits(q, k).exp()
        return (e / e.sum((-1, -2), keepdim=True)) @ v


def halves(model: nn.Module, disabled: str = LATER, **options: Any) -> PartitionedGraph:
    torch._dynamo.reset()
    dtype = next(model.parameters()).dtype
    return split_of(
        model, torch.randn(HEADS, TOKENS, WIDTH, dtype=dtype), disabled=disabled, linears="off", **options
    )


def large(split: PartitionedGraph) -> list[str]:
    """What is saved for all pairs of tokens."""
    pairs = [e.forward for e in split.edges if e.is_tensor and e.forward.meta["val"].numel() == HEADS * TOKENS**2]
    return [n.name for n in pairs]


def test_golden_what_the_backward_reads() -> None:
    lines = backward_of(halves(Attention())).splitlines()
    kept = ("div_1", "mul", "neg", "fma", "exp", "amax", "sum", "bmm", "sub")
    assert_expected_inline(
        "\n".join(line for line in lines if line.startswith(kept)),
        """\
expand_2: float32[4, 64, 64] = expand(div_3)
bmm_2: float32[4, 64, 32] = bmm(permute_4, tangents_1)
bmm_3: float32[4, 64, 64] = bmm(tangents_1, permute_5)
mul: float32[4, 64, 64] = mul(bmm_3, div_3)
sum_2: float32[4, 64, 1] = sum.dim_IntList(mul)
neg: float32[4, 64, 64] = neg(div_3)
fma: float32[4, 64, 64] = fma(neg, sum_2, mul)
bmm_4: float32[4, 32, 64] = bmm(permute_6, div_2)
bmm_5: float32[4, 64, 32] = bmm(div_2, permute_7)
sum_3: float32[1, 32] = sum.dim_IntList(view_18)
sum_4: float32[1, 32] = sum.dim_IntList(view_20)
sum_5: float32[1, 32] = sum.dim_IntList(view_22)""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_is_saved_and_nothing_of_its_logits(dtype: torch.dtype) -> None:
    model = Attention().to(dtype)
    assert large(halves(model, f"{LATER},save_softmax")) == ["bmm"]
    split = halves(model)
    assert large(split) == ["div_1"]
    statistics = [e for e in split.edges if e.is_tensor and e.forward.meta["val"].shape == (HEADS, TOKENS, 1)]
    assert not statistics, "maxima and sums of rows are read for the softmax alone"


def test_it_takes_a_byte_an_element() -> None:
    torch._dynamo.reset()
    fn = compiled(Attention().bfloat16(), linears="off", **{"debug.codegen": "eager"})
    fn(torch.randn(HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
    (found,) = [e for e in fp8compile.report(fn).saved if e.info.name == "div_1"]
    assert found.bytes_after == HEADS * TOKENS**2 + 2 * HEADS * TOKENS, "a BF16 scale a row of 64"


def test_it_is_idempotent() -> None:
    split = halves(Attention())
    edges = [(e.forward.name, e.backward.name) for e in split.edges]
    save_softmax(split, Context(Recipe(linears="off")))
    assert [(e.forward.name, e.backward.name) for e in split.edges] == edges


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_exact_gradients_stay_as_they_were_to_the_bit(codegen: str) -> None:
    torch.manual_seed(0)
    x, found, model = torch.randn(HEADS, TOKENS, WIDTH), [], Attention()
    for disabled in ("encode_saved", "encode_saved,save_softmax"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        with torch._inductor.config.patch(disabled_passes=disabled):
            compiled(twin, linears="off", **{"saved.min_numel": 0, "debug.codegen": codegen})(
                x
            ).square().mean().backward()
        found.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_are_those_of_codes() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(HEADS, TOKENS, WIDTH)
    found = gradient_sqnr(
        model, compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"}), (x,)
    )
    assert min(db for name, db in found.items() if name != "k.bias") > 30, "keys' bias has no gradient but roundings"


# ------------------------------------------------------------------------------------------------ where it declines


class Router(Attention):
    """Probabilities weigh rows: no matmul reads them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.logits(q, k).softmax(-1).amax(-1, keepdim=True) * v


@pytest.mark.parametrize("model", [WithLogits(), OverTwo(), Router()])
def test_logits_that_are_read_for_more_are_left(model: nn.Module) -> None:
    assert large(halves(model)) == ["bmm"]


def test_a_softmax_that_must_stay_exact_itself_is_left() -> None:
    assert large(halves(Attention(), skip=["*"])) == ["bmm"]


def test_where_nothing_is_stored_nothing_is_changed() -> None:
    split = halves(Attention(), f"{LATER},save_softmax")
    save_softmax(split, Context(Recipe(saved="off")))
    assert large(split) == ["bmm"]
