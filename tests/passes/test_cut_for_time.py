"""cut_for_time: golden, contract, numbers, declines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import _torch as private
from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.fx.graph import ENCODING
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.cut_for_time import cut_for_time
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, split_of
from tests.support.measure import compiled

NOTHING_MADE_AGAIN = {"saved.format": "off", "saved.max_cost": 0.0, "debug.device_rates": "h200"}
pytestmark = pytest.mark.usefixtures("fp8_units")
FP8 = {"linears.mode": "tensorwise", "linears.emulate": False}


class Block(nn.Module):
    """Two linears; what the second reads is made of what the first made, and is not needed otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def case() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Block().bfloat16(), torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)


def split(disabled: str = "", **options: object) -> PartitionedGraph:
    torch._dynamo.reset()
    return split_of(*case(), disabled=disabled, **{**FP8, **NOTHING_MADE_AGAIN, **options})


def kept(found: PartitionedGraph) -> list[str]:
    values = [e.forward.meta["val"] for e in found.edges if e.is_tensor and not found.caller_owns(e.forward)]
    return sorted(f"{value.dtype}{list(value.shape)}" for value in values if value.numel() > 1)


def test_codes_that_the_forward_made_are_kept_for_the_wgrad() -> None:
    assert_expected_inline(
        "\n".join(kept(split())),
        """\
torch.bfloat16[256, 128]
torch.float8_e4m3fn[256, 128]
torch.float8_e4m3fn[256, 64]""",
    )
    assert_expected_inline(
        "\n".join(kept(split(disabled="cut_for_time"))),
        """\
torch.bfloat16[256, 128]
torch.float8_e4m3fn[256, 64]""",
    )


def test_of_a_parameter_nothing_more_is_kept() -> None:
    """A byte a parameter would be kept however small the batch; a weight's codes are made again for the dgrad."""
    assert not any(each.endswith(("[64, 128]", "[128, 64]")) for each in kept(split()))


def test_no_mark_is_left() -> None:
    found = split()
    for half in (found.fw, found.bw):
        assert any(ENCODING in node.meta for node in half.graph.nodes)
        assert not any(private.RECOMPUTE in node.meta for node in half.graph.nodes)


def test_what_the_user_asked_for_stays() -> None:
    """A tag of selective checkpointing on codes: neither overwritten for the cut nor lost behind it."""
    seen: list[object] = []

    def tagged(gm: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        seen.extend(n.meta[private.RECOMPUTE] for n in gm.graph.nodes if ENCODING in n.meta)
        return gm, gm

    graph = joint_of(*case(), **FP8)
    first = next(n for n in graph.nodes if ENCODING in n.meta)
    first.meta[private.RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE
    with mock.patch.object(private, "min_cut_rematerialization_partition", tagged):
        cut_for_time(graph.owning_module, [], {})
    assert seen[0] is CheckpointPolicy.PREFER_RECOMPUTE and set(seen[1:]) == {CheckpointPolicy.MUST_SAVE}
    assert first.meta[private.RECOMPUTE] is CheckpointPolicy.PREFER_RECOMPUTE


def test_numbers_stay() -> None:
    found = []
    for disabled in ("", "cut_for_time"):
        torch._dynamo.reset()
        model, x = case()
        with torch._inductor.config.patch(disabled_passes=disabled):
            loss = compiled(model, **FP8, **NOTHING_MADE_AGAIN)(x).float().square().sum()
            loss.backward()
        found.append([loss.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_without_codes_it_is_plain_inductor_s_cut() -> None:
    exact = {"linears.mode": "off", "saved.format": "auto"}
    ours, plain = (kept(split(disabled, **exact)) for disabled in ("encode_saved", "cut_for_time,encode_saved"))
    assert ours == plain and any(each.startswith("torch.bfloat16[256, 128]") for each in ours)


@pytest.mark.parametrize(
    ("recipe", "cut"),
    [
        ({}, "cut_for_bytes"),
        ({"debug.device_rates": "h200"}, "cut_for_time"),
        ({"debug.device_rates": "h200", "saved": "off"}, "cut_for_time"),
        ({"debug.device_rates": "h200", "saved": "exact"}, "cut_for_bytes"),
        ({"debug.device_rates": "h200", "memory.budget": 0.9}, "cut_for_bytes"),
    ],
    ids=["rates unknown", "known", "no codes", "all that is exact", "a budget"],
)
def test_one_cut_or_the_other(recipe: dict[str, object], cut: str) -> None:
    made = Recipe.from_options({"linears": "tensorwise", **recipe})
    graph = joint_of(*case(), linears="off")
    assert [each.name for each in passes_on(On.CUT, Situation(Context(made), graph))] == [cut]
