"""tokens_of: where the tokens of attention's result lie in a saved value's memory, and values of which nothing is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.fx.graph import memory_order, storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.saved.attention_result import FEWEST, Tokens, is_read_by_attention, tokens_of
from tests.support.graphs import split_of

HEADS, SIZE = 2, 16


class Attention(nn.Module):
    """Heads of one linear attend to each other; ``after`` is what reads the result ``[B, H, S, D]``."""

    def __init__(self, after: Callable[[Tensor], Tensor], heads_first: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HEADS * SIZE, HEADS * SIZE), nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.after, self.heads_first = after, heads_first

    def forward(self, x: Tensor) -> Tensor:
        q = self.a(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
        q = q.contiguous() if self.heads_first else q
        return self.b(self.after(F.scaled_dot_product_attention(q, q, q, is_causal=True)))


def together(o: Tensor) -> Tensor:
    return o.transpose(1, 2).flatten(2)


def split(tokens: int = 64, after: Callable[[Tensor], Tensor] = together, **options: bool) -> PartitionedGraph:
    torch._dynamo.reset()  # or a second length is taken for one that only a run knows
    return split_of(
        Attention(after, **options), torch.randn(3, tokens, HEADS * SIZE), linears="off", disabled="encode_saved"
    )


def results(found: PartitionedGraph) -> list[SavedTensor]:
    return [e for e in found.edges if e.is_tensor and tokens_of(e.forward)]


@pytest.mark.parametrize("heads_first", [False, True])
def test_each_element_belongs_to_its_token(heads_first: bool) -> None:
    (edge,) = results(split(heads_first=heads_first))
    tokens = tokens_of(edge.forward)
    root, value = storage_root(edge.forward).meta["val"], edge.forward.meta["val"]
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        memory = torch.empty(root.numel())
        of_token = torch.arange(root.shape[2], dtype=torch.float32)[None, None, :, None].expand(root.shape)
        memory.as_strided(root.shape, root.stride()).copy_(of_token)
        x = memory.as_strided(value.shape, value.stride())
        order = memory_order(value)
        laid_out = (x if order is None else x.permute(order)).reshape(-1, *tokens)
        assert torch.equal(laid_out, torch.arange(64.0)[None, :, None].expand(laid_out.shape))
    assert is_read_by_attention(edge.backward)


def test_the_layout_of_flash_attention() -> None:
    (edge,) = results(split())
    assert tokens_of(edge.forward) == Tokens(64, HEADS * SIZE)


def test_operands_of_attention_are_no_result() -> None:
    found = split()
    read = [e for e in found.edges if e.is_tensor and is_read_by_attention(e.backward)]
    assert len(read) > len(results(found)) == 1


def test_too_few_tokens() -> None:
    assert results(split(FEWEST)) and not results(split(FEWEST - 1))


def test_sizes_that_only_a_run_knows() -> None:
    x = torch.randn(3, 64, HEADS * SIZE)
    torch._dynamo.mark_dynamic(x, 1)
    assert not results(split_of(Attention(together), x, linears="off", disabled="encode_saved"))


def test_a_part_of_the_result_and_what_is_made_of_it() -> None:
    found = split()
    (edge,) = results(found)
    root, graph = storage_root(edge.forward), found.fw.graph
    with graph.inserting_after(root):
        part = graph.call_function(torch.ops.aten.slice.Tensor, (root, 2, 0, 40))
        part.meta["val"] = root.meta["val"][:, :, :40]
        one = graph.call_function(torch.ops.aten.slice.Tensor, (root, 0, 0, 1))
        one.meta["val"] = root.meta["val"][:1]
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (root, 2))
        doubled.meta["val"] = root.meta["val"] * 2
    assert tokens_of(root) and not tokens_of(part) and not tokens_of(one) and not tokens_of(doubled)
