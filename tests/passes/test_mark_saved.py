"""mark_saved: golden, contract, and that nothing is computed otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp8compile.fx.graph import TRIED
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.encode_saved import encode_saved
from fp8compile.passes.mark_saved import MARKED, mark_saved
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.plan import plan_saved
from tests.support.graphs import backward_of, forward_of, split_of
from tests.support.net import Net, SwiGLU

RECIPE = Recipe(saved={"min_numel": 0}, linears="off")
CTX = Context(RECIPE, measures_saved=True)


def exact(model: nn.Module) -> PartitionedGraph:
    return split_of(model, torch.randn(128, 64), disabled="encode_saved", linears="off")


def marks(split: PartitionedGraph) -> dict[str, Any]:
    found = [edge.backward.meta[TRIED] for edge in split.edges if TRIED in edge.backward.meta]
    return {tried.key.module: tried for tried in found}


def test_golden_ways_to_store_each_value() -> None:
    split = exact(SwiGLU())
    mark_saved(split, CTX)
    ways = [f"{module}: {dict(tried.nbytes)}" for module, tried in sorted(marks(split).items())]
    assert_expected_inline(
        "\n".join(ways),
        """\
gate: {'4bit': 8704, '5bit': 10752, '6bit': 12800, '8bit': 16640, 'exact': 65536}
up: {'2bit': 4608, '3bit': 6656, '4bit': 8704, '5bit': 10752, '6bit': 12800, '8bit': 16640, 'exact': 65536}""",
    )


def test_the_graphs_stay_as_they_are_and_each_value_is_reported() -> None:
    split = exact(SwiGLU())
    before = forward_of(split), backward_of(split)
    notes = mark_saved(split, CTX)
    assert (forward_of(split), backward_of(split)) == before
    assert [skip.reason for skip in notes.skips] == [MARKED] * 2 and not notes.saved
    assert mark_saved(split, CTX) == notes


@pytest.mark.parametrize("name", ["2bit", "5bit", "8bit"])
def test_bytes_are_those_of_encode_saved(name: str) -> None:
    split = exact(SwiGLU())
    mark_saved(split, CTX)
    tried = marks(split)["up"].nbytes
    recipe = Recipe(saved={"min_numel": 0, "format": "int8" if name == "8bit" else name}, linears="off")
    taken = {s.origin.module: s.bytes_after for s in encode_saved(split, Context(recipe)).saved}
    assert taken["up"] == tried[name] and tried["exact"] == 4 * 128 * 128


def test_what_is_no_smooth_function_of_it_has_its_byte_or_none() -> None:
    split = exact(Net(F.relu))
    mark_saved(split, CTX)
    (tried,) = marks(split).values()
    assert list(tried.nbytes) == ["8bit", "exact"] and tried.ways["8bit"].codec.name == "e4m3 1x128"


def test_what_is_left_exact_is_not_marked() -> None:
    small = exact(SwiGLU())
    nothing = Context(Recipe(linears="off", saved={"min_numel": 10**9}), measures_saved=True)
    assert not mark_saved(small, nothing).skips and not marks(small) and not plan_saved(small, nothing).nbytes


def test_a_value_comes_back_with_the_error_of_its_bits() -> None:
    split = exact(SwiGLU())
    mark_saved(split, CTX)
    tried, x = marks(split)["up"], torch.randn(128, 128)
    errors = [float((tried.came_back(x, way) - x).square().mean()) for way in tried.ways]
    assert errors == sorted(errors, reverse=True) and all(3 < a / b < 17 for a, b in itertools.pairwise(errors))
