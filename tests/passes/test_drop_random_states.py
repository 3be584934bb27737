"""drop_random_states: golden, contract, numbers, declines."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8compile.fx.ops import is_attention
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.drop_random_states import drop_random_states
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import split_of
from tests.support.measure import compiled

WIDTH = 64
ops = torch.ops.higher_order
WITH_STATES = (ops.run_and_save_rng_state, ops.run_with_rng_state, ops.graphsafe_run_with_rng_state)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(WIDTH, WIDTH), block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.embed(x), use_reentrant=False)


def split(model: nn.Module, disabled: str = "encode_saved", **options: object) -> PartitionedGraph:
    torch._dynamo.reset()
    return split_of(model, torch.randn(2, 16, WIDTH), disabled=disabled, linears="off", **options)  # type: ignore[arg-type]


def with_states(found: PartitionedGraph) -> list[str]:
    return [node.name for gm in (found.fw, found.bw) for node in gm.graph.nodes if node.target in WITH_STATES]


def attentions(found: PartitionedGraph) -> str:
    """Each call of attention, in the forward and in the backward, with what it reads."""
    nodes = [node for gm in (found.fw, found.bw) for node in gm.graph.nodes if is_attention(node)]
    return "\n".join(f"{node.name}({', '.join(n.name for n in node.all_input_nodes)})" for node in nodes)


def test_golden_attention_in_both_halves() -> None:
    assert_expected_inline(
        attentions(split(Checkpointed(Attention()))),
        """\
_scaled_dot_product_flash_attention_for_cpu_default(select, select_1, select_2)
_scaled_dot_product_flash_attention_for_cpu_default(select, select_1, select_2)
_scaled_dot_product_flash_attention_for_cpu_backward(permute_4, select, select_1, select_2, getitem, getitem_1)""",
    )


def test_no_state_is_kept() -> None:
    before = split(Checkpointed(Attention()), "encode_saved,drop_random_states")
    after = split(Checkpointed(Attention()))
    assert len(with_states(before)) == 2 and not with_states(after)
    assert after.saved_bytes() < before.saved_bytes()
    assert len(after.edges) == len(before.edges) - 1


def test_it_is_idempotent() -> None:
    found = split(Checkpointed(Attention()))
    before = attentions(found)
    drop_random_states(found, Context(Recipe()))
    assert attentions(found) == before


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_gradients_and_the_generator_stay_as_they_were_to_the_bit(codegen: str) -> None:
    torch.manual_seed(0)
    model, x, found = Checkpointed(Attention()), torch.randn(2, 16, WIDTH), []
    for disabled in ("encode_saved", "encode_saved,drop_random_states"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        with torch._inductor.config.patch(disabled_passes=disabled):
            fn = compiled(twin, linears="off", **{"debug.codegen": codegen})
            torch.manual_seed(1)
            fn(x).square().mean().backward()
        found.append([p.grad for p in twin.parameters()] + [torch.random.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_call_that_cuda_graphs_allow_is_one_of_them() -> None:
    """On a GPU the state is an input of both halves, and stays one, unread."""
    found = split(Checkpointed(Attention()), "encode_saved,drop_random_states")
    [call] = [n for n in found.bw.graph.nodes if n.target is ops.run_with_rng_state]
    call.target, call.args = ops.graphsafe_run_with_rng_state, call.args[1:]
    drop_random_states(found, Context(Recipe()))
    assert not [n for n in found.bw.graph.nodes if n.target in WITH_STATES]


# ------------------------------------------------------------------------------------------------ where it declines


def test_attention_with_dropout_keeps_its_state() -> None:
    found = split(Checkpointed(Attention()), "encode_saved,drop_random_states")
    for node in (n for gm in (found.fw, found.bw) for n in gm.graph.nodes if n.target in WITH_STATES):
        node.update_kwarg("dropout_p", 0.5)
    drop_random_states(found, Context(Recipe()))
    assert len(with_states(found)) == 2 and len(found.edges) == len(split(Checkpointed(Attention())).edges) + 1
