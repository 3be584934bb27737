"""Recipes that differ across ranks are named, without a rank that waits for another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8compile
from fp8compile import Recipe
from fp8compile.compiler.ranks_agree import difference
from tests.support.ranks import on_ranks

PATHS = ("blocks.0.up.weight", "blocks.0.down.weight", "head.weight", "head.bias")
DEFAULT, ROWWISE = Recipe(), Recipe(linears="rowwise")


def in_turn(*recipes: Recipe) -> list[str | None]:
    """What each rank is told, one after the other: rank 0 first, and rank 0 never again."""
    rank = dist.get_rank()
    for turn in range(dist.get_world_size()):
        if turn == rank:
            found = [difference(recipes[rank], PATHS), difference(recipes[rank], PATHS)]
        dist.barrier()
    return found


def test_every_rank_that_differs_from_the_first_is_named_once() -> None:
    first, second, third = on_ranks(3, in_turn, DEFAULT, ROWWISE, DEFAULT)
    assert first == third == [None, None]
    assert second == [
        "recipes differ across ranks: the graph of blocks.0.down.weight, blocks.0.up.weight, head.bias and 1 more was "
        "compiled with Recipe(linears='rowwise') on rank 1 and with Recipe() on rank 0. Each rank trains by its own. Give "
        "torch.compile the same options on all ranks",
        None,
    ]


def several() -> list[str | None]:
    """Recipes one after the other; graphs of one rank alone; what only looks on."""
    rank = dist.get_rank()
    own = [f"stages.{rank}.weight"]
    if rank == 0:  # far ahead of rank 1
        found = [difference(r, PATHS) for r in (DEFAULT, ROWWISE, DEFAULT)]
    dist.barrier()
    if rank == 1:
        found = [
            difference(r, PATHS) for r in (Recipe(debug={"check": "first_step", "dump": "there"}), ROWWISE, DEFAULT)
        ]
    return [*found, difference((DEFAULT, ROWWISE)[rank], own), difference((DEFAULT, ROWWISE)[rank], [])]


def test_recipes_are_compared_one_by_one_graph_by_graph() -> None:
    assert on_ranks(2, several) == [[None] * 5] * 2


def test_nothing_is_asked_without_a_process_group() -> None:
    assert difference(DEFAULT, PATHS) is None


def without_answers() -> str | None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)  # as for a dry run
    return difference(DEFAULT, PATHS)


def test_a_store_that_does_not_answer_is_no_error() -> None:
    assert on_ranks(1, without_answers) == [None]


def compiled_apart() -> tuple[str, ...]:
    """A model that each rank compiles with a recipe of its own, rank 0 first."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    run = torch.compile(
        model, backend="fp8compile", options={"debug.codegen": "eager", "saved.group_size": 64 << dist.get_rank()}
    )
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            run(torch.randn(4, 16)).sum().backward()
        dist.barrier()
    return fp8compile.report(run).remarks


def test_a_report_says_it() -> None:
    first, second = on_ranks(2, compiled_apart)
    assert not first
    (remark,) = second
    assert "recipes differ across ranks" in remark and "'group_size': 64" in remark
