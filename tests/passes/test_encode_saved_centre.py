"""encode_saved: attention's result is kept as its distance from the mean of its tokens; where it is not, what it is worth."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved import judge as saved_judge
from fp8compile.saved.plan import plan_saved
from fp8compile.saved.stored import CENTRED
from tests.support.graphs import forward_of, split_of
from tests.support.measure import compiled, gradient_sqnr, kept_bytes

HIDDEN, HEADS, TOKENS = 128, 4, 64


class Cross(nn.Module):
    """Queries attend to a memory of tokens that are alike, as a decoder does that has not learned yet."""

    def __init__(self, after=lambda o: o) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.after = after

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            f(t).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return self.o(self.after(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def case(after=lambda o: o, tokens: int = TOKENS, dtype=torch.float32) -> tuple[nn.Module, tuple[Tensor, Tensor]]:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    memory = torch.randn(2, 1, HIDDEN) + 0.3 * torch.randn(2, TOKENS, HIDDEN)
    return Cross(after).to(dtype), (torch.randn(2, tokens, HIDDEN, dtype=dtype), memory.to(dtype))


def names(model: nn.Module, args: tuple[Tensor, ...], **options: object) -> list[str]:
    fn = compiled(model, **{"saved.min_numel": 0, "linears": "off", **options})
    fn(*args).float().sum().backward()
    return [each.codec for each in fp8compile.report(fn).saved]


def centred(model: nn.Module, args: tuple[Tensor, ...], **options: object) -> int:
    return sum(CENTRED in name for name in names(model, args, **options))


@functools.cache
def trained() -> tuple[dict[str, float], int]:
    """The dB of every gradient, and the bytes that are kept."""
    torch._dynamo.reset()
    model, args = case()
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    return gradient_sqnr(model, fn, args), kept_bytes(model, fn, args)


def test_golden_what_the_forward_keeps() -> None:
    model, (x, memory) = case()
    listed = forward_of(split_of(model, x, memory.requires_grad_(), linears="off")).splitlines()
    attention = next(n for n, line in enumerate(listed) if "_scaled_dot_product" in line)
    assert_expected_inline(
        "\n".join(listed[attention:-1]),
        """\
_scaled_dot_product_flash_attention_for_cpu:  = _scaled_dot_product_flash_attention_for_cpu(permute_1, permute_3, permute_5)
getitem: float32[2, 4, 64, 32] = <built-in function getitem>(_scaled_dot_product_flash_attention_for_cpu)
view_41: bfloat16[128, 1] = encode(getitem)
convert_element_type_11: bfloat16[2, 1, 128] = encode(getitem)
view_44: int8[512, 32] = encode(getitem)
getitem_1: float32[2, 4, 64] = <built-in function getitem>(_scaled_dot_product_flash_attention_for_cpu)
permute_6: float32[2, 64, 4, 32] = permute(getitem)
view_9: float32[2, 64, 128] = view(permute_6)
view_10: float32[128, 128] = view(view_9)
permute_7: float32[128, 128] = permute(primals_6)
mm_3: float32[128, 128] = mm(view_10, permute_7)
view_11: float32[2, 64, 128] = view(mm_3)""",
    )


def test_gradients_of_queries_and_keys_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens 0.3 apart, an error of 1/254 of a result of size 1 is a large part of what these gradients are made of."""
    after, _ = trained()
    torch._dynamo.reset()
    model, args = case()
    monkeypatch.setattr(saved_judge, "tokens_of", lambda made: None)
    before = gradient_sqnr(model, compiled(model, linears="off", **{"saved.min_numel": 0}), args)
    for name in ("q.weight", "k.weight"):
        assert after[name] > before[name] + 6, (before, after)
    assert min(after.values()) > 20, (before, after)


def test_it_takes_a_centre_and_no_more() -> None:
    _, kept = trained()
    torch._dynamo.reset()
    model, args = case()
    fn = compiled(model, linears="off", **{"saved.min_numel": 0, "saved.attention_format": "e4m3"})
    assert kept - kept_bytes(model, fn, args) == 2 * 2 * HIDDEN, "BF16, for two sequences"


def test_what_is_predicted_is_what_is_kept() -> None:
    model, args = case()
    exact = split_of(model, *args, linears="off", disabled="encode_saved")
    predicted = sum(plan_saved(exact, Context(Recipe(linears="off", saved={"min_numel": 0}))).nbytes.values())
    torch._dynamo.reset()
    kept = [e.forward.meta["val"] for e in split_of(model, *args, linears="off").edges]
    assert predicted == sum(t.nbytes for t in kept if t.dtype in (torch.int8, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_every_dtype(dtype: torch.dtype) -> None:
    assert centred(*case(dtype=dtype)) == 1


def test_it_is_left_as_it_was_where_nothing_is_said_of_tokens() -> None:
    assert not centred(*case(tokens=16)), "too few"
    torch._dynamo.reset()
    assert not centred(*case(), **{"saved.attention_format": "e4m3"}), "a format for what counts by its own size"
    torch._dynamo.reset()
    assert not centred(*case(), **{"saved.attention": False})


def test_not_where_the_size_of_its_error_was_proven_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sensitivity, "needs_no_range", lambda self, used, fmt: False)
    assert not centred(*case())


def test_read_by_more_than_attention() -> None:
    model, args = case(lambda o: o * torch.sigmoid(o))
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    assert min(gradient_sqnr(model, fn, args).values()) > 20
    assert sum(CENTRED in each.codec for each in fp8compile.report(fn).saved) == 1


def test_exponentiated_it_stays_exact() -> None:
    assert not centred(*case(torch.exp))


def test_nan_reaches_the_gradients() -> None:
    model, (x, memory) = case()
    x[0, 3, 7] = float("nan")
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    fn(x, memory).sum().backward()
    assert bool(model.q.weight.grad.isnan().any())
