"""compress_collectives: what ranks send one another is codes, in forward and backward, or left with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile
from fp8compile._version import release_of
from fp8compile.numerics.metrics import sqnr
from fp8compile.passes.compress_collectives import LEAST, compress_collectives
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, text_of
from tests.support.ranks import on_ranks, one_of_two

SENT = {"linears": "off", "saved": "off", "collectives": "groupwise"}
HIDDEN, TOKENS = 64, LEAST // 64


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(128, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Exchange(nn.Module):
    """A training graph with one collective in its forward."""

    def __init__(self, exchange: Any) -> None:
        super().__init__()
        self.exchange, self.scale = exchange, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            exchanged = self.exchange(x.sin())
        return self.scale * x.cos() * exchanged.mean()


def parallel(model: MLP) -> MLP:
    """Tensor-parallel on all ranks that there are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with one_of_two():
        yield


@pytest.mark.skipif(
    release_of(torch.__version__) <= (2, 11), reason="the golden has the nodes' names of torch 2.13 and 2.15"
)
def test_golden_a_sum_over_ranks_each_way(two_ranks: None) -> None:
    x = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    text = text_of(joint_of(parallel(MLP().bfloat16()), x, **SENT))
    lines = [line for line in text.splitlines() if "codes" in line or "mm(" in line or "add" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
mm: bfloat16[256, 64] = mm(primals_1, permute)
add: float32[256, 64] = add(erf)
mul_2: float32[256, 64] = mul(mul, add)
mm_1: bfloat16[256, 64] = mm(convert_element_type_3, permute_1)
all_to_all_single: uint8[2, 8320] = send_codes(mm_1)
view_44: bfloat16[256, 64] = receive_codes(all_to_all_single)
add_1: bfloat16[256, 64] = add(primals_1, view_44)
mm_2: bfloat16[64, 64] = mm(permute_2, convert_element_type_3)
mm_3: bfloat16[256, 64] = mm(tangents_1, permute_4)
add_2: float32[256, 64] = add(erf_1)
mul_4: float32[256, 64] = mul(add_2, 0.5)
add_3: float32[256, 64] = add(mul_4, mul_8)
mul_9: float32[256, 64] = mul(convert_element_type_10, add_3)
mm_4: bfloat16[64, 64] = mm(permute_6, primals_1)
mm_5: bfloat16[256, 64] = mm(convert_element_type_12, permute_8)
all_to_all_single_1: uint8[2, 8320] = send_codes(mm_5)
view_83: bfloat16[256, 64] = receive_codes(all_to_all_single_1)
add_4: bfloat16[256, 64] = add(tangents_1, view_83)
return add_1, add_4, None, mm_4, primals_2, mm_2, primals_2""",
    )


def report_of(exchange: Any, x: Tensor, **options: Any) -> Any:
    model = Exchange(exchange)
    model.compile(backend="fp8compile", options={**SENT, "debug.codegen": "eager", **options})
    model(x.requires_grad_()).sum().backward()
    return fp8compile.report(model)


def gathered(x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x, 0, dist.group.WORLD)


def summed(x: Tensor, how: str = "sum") -> Tensor:
    return functional.all_reduce(x, how, dist.group.WORLD)


@pytest.mark.parametrize(
    ("exchange", "sent_plain"),
    [
        (gathered, 2 * LEAST),
        (lambda x: functional.reduce_scatter_tensor(x, "avg", 0, dist.group.WORLD), LEAST),
        (summed, 2 * LEAST),
    ],
    ids=["all_gather", "reduce_scatter", "all_reduce"],
)
def test_bytes_that_a_rank_sends(two_ranks: None, exchange: Any, sent_plain: int) -> None:
    (made,) = report_of(exchange, torch.randn(LEAST).bfloat16()).collectives
    assert (made.ranks, made.sent_plain) == (2, sent_plain)
    assert made.sent == sent_plain * (1 + 2 / 128) / 2


@pytest.mark.parametrize(
    ("reason", "exchange", "x", "options"),
    [
        ("its reduction is 'max', neither a sum nor a mean", lambda x: summed(x, "max"), torch.randn(LEAST), {}),
        (f"fewer than {LEAST} elements", summed, torch.randn(LEAST - 1), {}),
        ("f64 is left alone", summed, torch.randn(LEAST).double(), {}),
        (
            "all_to_all_single is left as it is",
            lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD),
            torch.randn(LEAST),
            {},
        ),
        (
            "Recipe.collectives is off for module ''",
            summed,
            torch.randn(LEAST),
            {"collectives": "off", "modules": {"other": {"collectives": "groupwise"}}},
        ),
    ],
)
def test_what_is_left_and_why(
    two_ranks: None, reason: str, exchange: Any, x: Tensor, options: dict[str, Any]
) -> None:
    report = report_of(exchange, x, **options)
    assert not report.collectives
    assert [skip.reason for skip in report.skips if skip.kind == "collective"] == [reason]


def test_what_the_user_puts_in_fp32_stays(two_ranks: None) -> None:
    weight = torch.randn(HIDDEN, HIDDEN).bfloat16()
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    (skip,) = report_of(lambda x: summed((x @ weight).float()), x).skips
    assert skip.reason == "the user computes this in FP32 inside a 16-bit model"


def test_sizes_that_a_run_knows_stay(two_ranks: None) -> None:
    model = torch.compile(
        Exchange(summed), backend="fp8compile", options={**SENT, "debug.codegen": "eager"}, dynamic=True
    )
    model(torch.randn(LEAST, requires_grad=True)).sum().backward()
    (skip,) = fp8compile.report(model).skips
    assert skip.reason == "its size is known at run time only"


def test_by_default_nothing_is_touched(two_ranks: None) -> None:
    report = report_of(summed, torch.randn(LEAST), collectives="off")
    assert not report.collectives and not report.skips


def test_a_second_run_finds_nothing(two_ranks: None) -> None:
    graph = joint_of(parallel(MLP().bfloat16()), torch.randn(TOKENS, HIDDEN).bfloat16(), **SENT)
    before = text_of(graph)
    notes = compress_collectives(graph, Context(Recipe(**SENT)))
    assert not notes.collectives and not notes.skips and text_of(graph) == before


def gradients(collectives: str, codegen: str) -> list[Tensor]:
    """The loss, and the gradients of this rank's shards after a step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = parallel(MLP().bfloat16()), torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    model.compile(backend="fp8compile", options={**SENT, "collectives": collectives, "debug.codegen": codegen})
    loss = model(x).float().square().mean()
    loss.backward()
    assert len(fp8compile.report(model).collectives) == (2 if collectives == "groupwise" else 0)
    return [loss.detach(), x.grad, *(p.grad.to_local() for p in model.parameters())]  # type: ignore[list-item, union-attr]


def qualities(codegen: str) -> tuple[list[float], list[list[float]]]:
    """In dB, of what codes change; and the values that all ranks share, with codes and without."""
    plain, ours = gradients("off", codegen), gradients("groupwise", codegen)
    shared = [[float(each.double().sum()) for each in found[:2]] for found in (plain, ours)]
    return [sqnr(p, o) for p, o in zip(plain, ours, strict=True)], shared


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_on_two_ranks_gradients_are_close_to_those_of_plain_collectives(codegen: str) -> None:
    first, second = on_ranks(2, qualities, codegen)
    for (_, *quality), _ in (first, second):
        assert min(quality) > 41, "INT8 in groups of 128 normal values, rounded twice"
        assert max(quality) < 90, "every gradient has been through codes"
    assert first[1] == second[1], "every rank decodes the same codes"
