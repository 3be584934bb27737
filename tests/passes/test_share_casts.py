"""share_casts: one cast for a value and dtype, so that autocast's q, k and v read one encoding."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.fx.graph import ENCODING
from fp8compile.passes.share_casts import CAST, share_casts
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2  # of a leaf autocast keeps the cast itself
        return self.a(x) + self.b(x)


def inputs() -> Tensor:
    return torch.randn(16, 32, requires_grad=True)


def test_golden_both_linears_read_one_cast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = joint_of(Two(), inputs(), **{"linears.emulate": True})
    forward = [line for line in text_of(graph).splitlines() if "mul" in line]
    assert_expected_inline(
        "\n".join(forward),
        """\
mul: float32[16, 32] = mul(primals_1)
convert_element_type_1: bfloat16[16, 32] = convert_element_type(mul, torch.bfloat16)
mul_1: float32[16, 32] = mul(add_1)
return add, mul_1, convert_element_type_19, convert_element_type_13""",
    )


def test_one_encoding_of_the_input_and_one_kept() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = joint_of(Two(), inputs(), **{"linears.emulate": True})
        report = fp8compile.explain(
            Two(), (inputs(),), recipe=Recipe(linears={"emulate": True}, saved={"min_numel": 0})
        )
    codes = [n for n in graph.nodes if ENCODING in n.meta and n.meta["val"].dtype == torch.float8_e4m3fn]
    assert len(codes) == 1 + 2, "the input and two weights"
    assert len(report.saved) == 1


def test_it_is_idempotent_and_stays_away_without_linears() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        shared = joint_of(Two(), inputs(), **{"linears.emulate": True})
        plain = joint_of(Two(), inputs(), linears="off")
    before = len(shared.nodes)
    share_casts(shared, Context(Recipe()))
    assert len(shared.nodes) == before
    of_the_input = [n for n in plain.find_nodes(op="call_function", target=CAST) if n.args[0].name == "mul"]  # type: ignore[union-attr]
    assert len(of_the_input) == 2


def test_inference_stays_as_it_is_written() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        graph = joint_of(Two(), inputs(), **{"linears.emulate": True})
    assert len([n for n in graph.find_nodes(op="call_function", target=CAST) if n.args[0].name == "mul"]) == 2  # type: ignore[union-attr]


def test_numbers_stay_as_they_are() -> None:
    model, x = Two(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(compiled(model, saved="off", **{"linears.emulate": True})(x).float().sum(), x)
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes="share_casts"):
            theirs = torch.autograd.grad(
                compiled(model, saved="off", **{"linears.emulate": True})(x).float().sum(), x
            )
    assert torch.equal(*ours, *theirs)
