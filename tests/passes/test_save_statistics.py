"""save_statistics: golden, contract, numbers, declines."""

from __future__ import annotations

import copy

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
    """A sum is normalised: computed again from codes of x, its error is not bounded beside its own size."""

    def __init__(self) -> None:
        super().__init__(nn.RMSNorm)
        self.first, self.inner = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.inner(self.first(x)))


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
    return split_of(model, torch.randn(128, WIDTH), disabled=disabled, linear="off", **options)  # type: ignore[arg-type]


def shares(model: nn.Module, **options: object) -> float:
    """Bytes saved over plain Inductor's."""
    torch._dynamo.reset()
    fn = compiled(model, linear="off", min_saved_numel=0, codegen="eager", **options)
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
    save_statistics(found, Context(Recipe(linear="off")))
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
            fn = compiled(twin, linear="off", min_saved_numel=0, codegen=codegen)
            fn(x).square().mean().backward()
        found.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_gradients_are_those_of_codes(norm: type[nn.Module], offset: float) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(*(Block(norm) for _ in range(3))), torch.randn(256, WIDTH)
    model.embed.bias.data += offset
    found = gradient_sqnr(model, compiled(model, linear="off", min_saved_numel=0, codegen="eager"), (x,))
    assert min(found.values()) > 30, found


# ------------------------------------------------------------------------------------------------ where it declines


def test_what_must_stay_exact_all_the_same_gets_no_statistic() -> None:
    model = Checkpointed(TwoNorms()).bfloat16()
    torch._dynamo.reset()
    found = split_of(model, torch.randn(128, WIDTH).bfloat16(), disabled=LATER, linear="off")
    assert not statistics(found)
    assert shares(Checkpointed(TwoNorms())) < 0.60  # in FP32 the sum is saved beside x, each in a byte


def test_without_regions_or_storage_nothing_is_saved_more() -> None:
    found = split(Checkpointed(Block()), f"{LATER},save_statistics")
    save_statistics(found, Context(Recipe(saved="off")))
    assert not statistics(found)
    before = split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), f"{LATER},save_statistics")
    assert len(statistics(split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())))) == len(statistics(before))
