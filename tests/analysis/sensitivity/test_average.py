"""What gradients answer to a value that is unbiased: each class with the neighbours that it leaves out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.analysis.sensitivity.average import Answer
from fp8compile.saved.bits_by_use import FOUR_BITS
from tests.support.graphs import split_of
from tests.support.net import Net

LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "the operand of a linear": lambda h: h * 1.0 + torch.tanh(h).detach(),
    "a product with another value": lambda h: h * torch.linspace(-1, 1, 64),
    "chosen by another's mask": lambda h: torch.where(torch.arange(64) > 7, h, 0 * h),
    "divided by a number": lambda h: h / 3,
}
SMOOTH: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (F.silu, "silu"),
    "gelu": (F.gelu, "gelu"),
    "gelu by tanh": (lambda h: F.gelu(h, approximate="tanh"), "gelu"),
    "cube": (lambda h: h**3, "pow"),
    "times itself": (lambda h: h * h * h, "mul"),
}
OTHER: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (F.relu, "le"),
    "elu": (F.elu, ""),
    "hardswish": (F.hardswish, ""),
    "clamp": (lambda h: h.clamp(-1, 1), ""),
    "abs": (torch.abs, "abs"),
    "softplus, which has an edge at 20": (F.softplus, "gt"),
    "a fourth power": (lambda h: h**4, "pow"),
    "cosine": (lambda h: torch.sin(0.1 * torch.tanh(h)), ""),
}


def answers(model: nn.Module, *args: Tensor) -> list[tuple[Answer, str]]:
    """Of every saved activation."""
    torch._dynamo.reset()
    split = split_of(model, *args, disabled="encode_saved", linears="off", **{"memory.chunk_logits": "off"})
    judge = Sensitivity(split)
    return [
        judge.answer_on_average(e.backward)
        for e in split.edges
        if e.is_tensor and e.forward.op != "placeholder" and e.forward.meta["val"].is_floating_point()
    ]


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    found = answers(Net(LINEAR[name]), torch.randn(128, 64))
    assert (Answer.LINEAR, "") in found, found


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_with_the_function_in_the_reason(name: str) -> None:
    function, reason = SMOOTH[name]
    found = answers(Net(function), torch.randn(128, 64))
    assert [(answer, reason in why) for answer, why in found] == [(Answer.SMOOTH, True)], found


@pytest.mark.parametrize("name", OTHER)
def test_others_with_the_operation_in_the_reason(name: str) -> None:
    function, reason = OTHER[name]
    found = answers(Net(function), torch.randn(128, 64))
    assert any(answer is Answer.OTHER and reason in why for answer, why in found), found


class Normed(nn.Module):
    """What a norm reads, with its statistics saved: x mean(x dy) in the backward, where one factor is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def test_what_a_norm_reads_is_linear_element_by_element() -> None:
    assert (Answer.LINEAR, "") in answers(Normed(), torch.randn(128, 64))


def test_of_attention_values_and_result_are_linear_queries_and_keys_not() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(2, (4, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    found = answers(Attention(), torch.randn(2, 64, 64))
    of = [answer for answer, _ in found]
    assert of.count(Answer.OTHER) == 2 + 1, f"q, k and the logsumexp: {found}"
    assert of.count(Answer.LINEAR) == 2, "v and the result"


def test_a_steep_function_is_not_gentle() -> None:
    for steepness, gentle in ((1.0, True), (1.1, False), (100.0, False)):
        torch._dynamo.reset()
        split = split_of(Net(lambda h: F.silu(steepness * h)), torch.randn(128, 64), disabled="encode_saved")  # noqa: B023
        judge = Sensitivity(split)
        (edge,) = [e for e in split.edges if e.is_tensor and e.forward.op != "placeholder"]
        assert judge.is_gentle(edge.backward, FOUR_BITS) == gentle, steepness
