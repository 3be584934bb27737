"""move_router_weights: golden, contract, gradients in dB, and the layers it leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph

from fp8compile.fx.graph import copy_graph
from fp8compile.passes.move_router_weights import move_router_weights
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.experts import Experts, any_experts, experts_case
from tests.support.graphs import joint_of, split_of, text_of
from tests.support.measure import compiled, gradient_sqnr, gradients, kept_bytes

OFF = "move_router_weights"
GROUPED = torch.ops.aten._grouped_mm.default
TOKENS = 128


@functools.cache
def joint() -> Graph:
    """The joint graph of a layer, which no test changes."""
    layer, x = experts_case()
    return joint_of(layer, x)


def _takes_rows_again(graph: Graph) -> bool:
    return "products(" in text_of(graph)


def test_golden_matmuls_and_what_stands_beside_them() -> None:
    lines = text_of(joint()).splitlines()
    shown = [
        line for line in lines if any(word in line for word in ("_grouped_mm(", "rounded(", "_rows(", "products("))
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
_grouped_mm: bfloat16[256, 192] = _grouped_mm(index, permute_1, cumsum)
_grouped_mm_1: bfloat16[256, 64] = _grouped_mm(mul_2, permute_2, cumsum)
convert_element_type_22: bfloat16[256, 64] = rounded(index_put_1)
_grouped_mm_3: bfloat16[256, 96] = _grouped_mm(convert_element_type_22, permute_5, cumsum)
convert_element_type_23: bfloat16[256, 96] = weighed_rows(_grouped_mm_3, unsqueeze)
sum_7: float32[256, 1] = products(_grouped_mm_3, mul_2)
_grouped_mm_2: bfloat16[4, 64, 96] = _grouped_mm(permute_3, mul_2, cumsum)
_grouped_mm_4: bfloat16[4, 192, 64] = _grouped_mm(permute_7, index, cumsum)
_grouped_mm_5: bfloat16[256, 64] = _grouped_mm(cat, permute_9, cumsum)""",
    )


def test_the_result_is_not_saved() -> None:
    layer, x = experts_case()
    with_it = split_of(layer, x, disabled="encode_saved")
    torch._dynamo.reset()
    without = split_of(layer, x, disabled=f"encode_saved,{OFF}")
    results = [
        [e for e in split.edges if e.is_tensor and e.forward.target is GROUPED] for split in (with_it, without)
    ]
    assert [len(each) for each in results] == [1, 2]
    size = 2 * TOKENS * 64 * 2  # two experts' results for each token, in BF16
    assert without.saved_bytes() - with_it.saved_bytes() == size


def test_no_matmul_is_added() -> None:
    assert len(joint().find_nodes(op="call_function", target=GROUPED)) == 6


def test_it_is_idempotent() -> None:
    shared = joint()
    assert shared.owning_module is not None
    graph = copy_graph(shared.owning_module).graph
    before = text_of(graph)
    move_router_weights(graph, Context(Recipe()))
    assert text_of(graph) == before


def test_without_storage_the_graph_stays() -> None:
    layer, x = experts_case()
    assert not _takes_rows_again(joint_of(layer, x, saved="off", **{"linears.emulate": True}))


@pytest.mark.parametrize("codes", [False, True], ids=["exact", "codes"])
def test_gradients_are_as_good(codes: bool) -> None:
    """Exact, both orders of the sums are BF16's. As codes, du has the error of codes of ``a``, where it had that of codes of
    y: errors that are alike in size, of sums that are other ones."""
    layer, x = experts_case(512, hidden=128, inner=192, experts=8)
    args = (x, any_experts(layer, 512))
    found = []
    for off in (OFF, ""):
        torch._dynamo.reset()
        with torch._inductor.config.patch(
            disabled_passes=",".join(filter(None, (off, "" if codes else "encode_saved")))
        ):
            found.append(gradient_sqnr(layer, compiled(layer, **{"saved.min_numel": 0}), args))
    before, after = found
    assert all(after[name] > before[name] - (2.0 if codes else 1.0) for name in before), (before, after)
    assert min(after.values()) > (36 if codes else 43), after


@pytest.mark.parametrize("to", ["one expert", "all but one"])
def test_experts_without_tokens(to: str) -> None:
    layer, x = experts_case(96)
    chosen = torch.tensor([[0, 1]] if to == "one expert" else [[1, 3]]).expand(96, 2).contiguous()
    assert min(gradient_sqnr(layer, compiled(layer, **{"saved.min_numel": 0}), (x, chosen)).values()) > 30


def test_code_is_generated_for_it() -> None:
    layer, x = experts_case()
    args = (x, any_experts(layer, TOKENS))
    ours = gradients(layer, compiled(layer, **{"saved.min_numel": 0, "debug.codegen": "inductor"}), args)
    node_by_node = gradients(layer, compiled(layer, **{"saved.min_numel": 0}), args)
    for name, value in ours.items():
        assert (value - node_by_node[name]).norm() < 0.02 * value.norm(), name


class ReadTwice(Experts):
    """The result before it is weighed counts by itself, too."""

    def weigh(self, y: Tensor, weights: Tensor) -> Tensor:
        return y * weights + 0.1 * y.tanh()


class Masked(Experts):
    """As where experts lie on several ranks: rows of others are taken out of the result."""

    def weigh(self, y: Tensor, weights: Tensor) -> Tensor:
        return y.masked_fill(weights > 2, 0.0) * weights


class OfColumns(Experts):
    """Weights that are no row's."""

    def weigh(self, y: Tensor, weights: Tensor) -> Tensor:
        return y * (weights + torch.zeros(1, y.shape[1]))


class Frozen(Experts):
    """No wgrad: nothing says that what the matmul reads is kept."""

    def multiply(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return super().multiply(rows, weight.detach(), ends)


@pytest.mark.parametrize("kind", [ReadTwice, Masked, OfColumns, Frozen])
def test_layers_that_stay(kind: Callable[[], Experts]) -> None:
    torch.manual_seed(0)
    layer, x = kind().bfloat16(), torch.randn(TOKENS, 64).bfloat16().requires_grad_()
    assert not _takes_rows_again(joint_of(layer, x))


def test_a_checkpointed_layer_stays() -> None:
    layer, x = experts_case()
    inner = layer.forward
    layer.forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)  # type: ignore[method-assign]
    assert not _takes_rows_again(joint_of(layer, x))


def test_the_bytes_of_a_layer() -> None:
    """Of the four tensors of a layer of experts one is left, the largest; rows that were gathered are gathered again."""
    layer, x = experts_case()
    args = (x, any_experts(layer, TOKENS))
    kept = []
    for off in (f"{OFF},recompute_kept", ""):
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=off):
            kept.append(kept_bytes(layer, compiled(layer, **{"saved.min_numel": 0}), args))
    rows = 2 * TOKENS * 64  # codes, a byte each; their scales are counted beside them
    assert kept[0] - kept[1] >= 2 * rows
