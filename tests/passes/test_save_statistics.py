"""save_statistics: golden, contract, numbers, declines."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.save_statistics import save_statistics
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled, gradient_sqnr

WIDTH = 64
LATER = "recompute_for_budget,encode_saved"


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class RMSNormByHand(nn.Module):
    """As Transformers has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


NORMS = [nn.LayerNorm, nn.RMSNorm, RMSNormByHand]


class TwoNorms(Block):
    """As a transformer's block: what a matmul makes of a norm is added to the norm's operand, and the sum is normalised."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm, cancels: float = 0.0) -> None:
        super().__init__(norm)
        self.first, self.inner = norm(WIDTH), nn.Linear(WIDTH, WIDTH)
        if cancels:
            self.inner.weight.data = -cancels * torch.eye(WIDTH)

    def added(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.added(x))


class OfTheNormAlone(TwoNorms):
    """No matmul between the norm and the sum: one large gain scales one channel."""

    def added(self, x: Tensor) -> Tensor:
        return self.first(x)


class OfTheValueToo(TwoNorms):
    """What is added has seen the value as it is: its size grows with it."""

    def added(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)) + self.inner(x)


class Scaled(TwoNorms):
    """The stream is scaled before the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, 0.5 * x + self.added(x))


class WithoutItsOwnNorm(TwoNorms):
    """Only what a linear makes of the value is normalised at first."""

    def added(self, x: Tensor) -> Tensor:
        return self.inner(self.first(self.inner(x)))


class Checkpointed(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def split(model: nn.Module, disabled: str = LATER, **options: object) -> PartitionedGraph:
    torch._dynamo.reset()
    return split_of(model, torch.randn(128, WIDTH), disabled=disabled, linears="off", **options)  # type: ignore[arg-type]


def shares(model: nn.Module, **options: object) -> float:
    """Bytes saved over plain Inductor's."""
    torch._dynamo.reset()
    fn = compiled(model, linears="off", **options, **{"saved.min_numel": 0, "debug.codegen": "eager"})
    fn(torch.randn(128, WIDTH)).square().mean().backward()
    report = fp8compile.report(fn)
    return report.saved_bytes / report.saved_bytes_plain


def statistics(found: PartitionedGraph) -> list[tuple[int, ...]]:
    shapes = [tuple(edge.forward.meta["val"].shape) for edge in found.edges if edge.is_tensor]
    return [shape for shape in shapes if shape == (128, 1)]


def test_golden_what_the_norm_reads() -> None:
    lines = backward_of(split(Checkpointed(Block()))).splitlines()
    kept = ("addmm", "getitem", "rsqrt", "sub:", "mul:", "var_mean")
    assert_expected_inline(
        "\n".join(line for line in lines if line.startswith(kept)),
        """\
getitem_2: float32[128, 1]
rsqrt_1: float32[128, 1]
addmm: float32[128, 64]
sub: float32[128, 64] = sub(addmm, getitem_2)
mul: float32[128, 64] = mul(sub, rsqrt_1)
addmm_1: float32[128, 128] = addmm(primals_7, add_1, permute_1)""",
    )


@pytest.mark.parametrize("norm", NORMS)
def test_a_region_starts_from_codes(norm: type[nn.Module]) -> None:
    blocks = [Block(norm) for _ in range(3)]
    with torch._inductor.config.patch(disabled_passes="save_statistics"):
        assert shares(Checkpointed(*blocks)) > 0.99
    assert shares(Checkpointed(*blocks)) < 0.30  # FP32: a byte for four, and scales, and statistics of 64 numbers


def test_it_is_idempotent() -> None:
    found = split(Checkpointed(Block()))
    edges = [(e.forward.name, e.backward.name) for e in found.edges]
    save_statistics(found, Context(Recipe(linears="off")))
    assert [(e.forward.name, e.backward.name) for e in found.edges] == edges and len(statistics(found)) == 2


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_exact_gradients_stay_as_they_were_to_the_bit(norm: type[nn.Module], codegen: str) -> None:
    """With what is saved left exact, a statistic that is saved is the one that would be made again."""
    torch.manual_seed(0)
    model, x = Checkpointed(Block(norm), Block(norm)), torch.randn(128, WIDTH)
    found = []
    for disabled in ("encode_saved", "encode_saved,save_statistics"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        with torch._inductor.config.patch(disabled_passes=disabled):
            fn = compiled(twin, linears="off", **{"saved.min_numel": 0, "debug.codegen": codegen})
            fn(x).square().mean().backward()
        found.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_gradients_are_those_of_codes(norm: type[nn.Module], offset: float) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(*(Block(norm) for _ in range(2))), torch.randn(256, WIDTH)
    model.embed.bias.data += offset
    found = gradient_sqnr(
        model, compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"}), (x,)
    )
    assert min(found.values()) > 30, found


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_sum_is_made_from_codes(norm: type[nn.Module], dtype: torch.dtype) -> None:
    """A byte an element, a BF16 scale for 64 and two statistics a row: 0.27 of FP32, 0.54 of BF16, and statistics."""
    torch._dynamo.reset()
    fn = compiled(
        Checkpointed(*(TwoNorms(norm) for _ in range(3))).to(dtype), linears="off", **{"debug.codegen": "eager"}
    )
    fn(torch.randn(512, WIDTH, dtype=dtype)).square().mean().backward()
    report = fp8compile.report(fn)
    a_row = WIDTH + 2 + 2 * 4 * (2 if norm is nn.LayerNorm else 1)
    assert report.saved_bytes <= 3 * 512 * a_row + 512 * WIDTH * 4


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_residual_sums_are_those_of_codes(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(*(TwoNorms(norm) for _ in range(2))), torch.randn(256, WIDTH)
    found = gradient_sqnr(
        model, compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"}), (x,)
    )
    assert min(found.values()) > 30, found


def test_a_sum_that_cancels_costs_what_it_costs_bf16() -> None:
    """x - 0.75 norm(x): a row of the sum is a quarter of x. INT8's error counts four times, 12 dB; so does BF16's own."""
    torch.manual_seed(0)
    x = torch.randn(256, WIDTH)
    worst = []
    for cancels in (0.01, 0.75):
        torch.manual_seed(1)
        model = Checkpointed(TwoNorms(nn.RMSNorm, cancels))
        model.embed.weight.data, model.embed.bias.data = torch.eye(WIDTH), torch.zeros(WIDTH)
        fn = compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"})
        worst.append(min(gradient_sqnr(model, fn, (x,)).values()))
    assert worst[0] > 35 and worst[1] > worst[0] - 20 * math.log10(4) - 3, worst


# ------------------------------------------------------------------------------------------------ where it declines


@pytest.mark.parametrize("block", [OfTheNormAlone, OfTheValueToo, Scaled, WithoutItsOwnNorm])
def test_a_sum_that_may_be_small_beside_what_it_is_made_of_stays_exact(block: type[nn.Module]) -> None:
    """In BF16 codes of the sum and of its operand would take as many bytes; so there is no statistic either."""
    torch._dynamo.reset()
    model = Checkpointed(block()).bfloat16()
    found = split_of(model, torch.randn(128, WIDTH).bfloat16(), disabled=LATER, linears="off")
    assert not statistics(found)


def test_without_regions_or_storage_nothing_is_saved_more() -> None:
    found = split(Checkpointed(Block()), f"{LATER},save_statistics")
    save_statistics(found, Context(Recipe(saved="off")))
    assert not statistics(found)
    before = split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), f"{LATER},save_statistics")
    assert len(statistics(split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())))) == len(statistics(before))
