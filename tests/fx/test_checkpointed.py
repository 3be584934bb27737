"""fx.checkpointed: what passes put into a checkpointed region is of it, and regions keep their inputs alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8compile
from fp8compile import _torch as private
from fp8compile.fx.aot import describe_joint
from fp8compile.fx.checkpointed import join_regions, region_of, stand_in
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.report import Report

pytestmark = pytest.mark.usefixtures("vnni")
aten = torch.ops.aten
ROWS, WIDTH = 256, 64
UNIT = ROWS * WIDTH * 4
INT8 = {"linears": "int8"}  # products of codes on a CPU too: the matmul is another operation, as on a GPU
RECIPES = {
    "int8": {**INT8, "saved": "off"},
    "int8, stored": {**INT8, "saved.min_numel": 0},
    "emulated": {"linears.emulate": True, "saved": "off"},
    "rowwise": {"linears.emulate": True, "linears": "rowwise", "saved": "off"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x.sin())))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(wrap(Block()) for _ in range(3)), run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)
plainly = functools.partial(checkpoint, use_reentrant=False)
by_policy = functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE)
STACKS: dict[str, Callable[[], Stack]] = {
    "checkpoint": lambda: Stack(plainly, lambda block: block),
    "CheckpointWrapper": lambda: Stack(lambda block, x: block(x), checkpoint_wrapper),
}


def report(model: nn.Module, **options: Any) -> Report:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return fp8compile.explain(model, (x,), recipe=Recipe(debug={"codegen": "eager"}, **options))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_keep_their_inputs_as_plain_inductor_does(stack: str, recipe: str) -> None:
    found = report(STACKS[stack](), **RECIPES[recipe])
    assert len(found.linears) == 3 * 2 * 3, "every product is of codes"
    assert found.saved_bytes_plain == 3 * UNIT, "the inputs of the blocks"
    assert found.saved_bytes <= 3 * UNIT + 3 * 2 * 3 * 8, "scales at most, one number each"


def test_a_policy_that_saves_products_saves_these_alone() -> None:
    """Six products, and what the next block reads of the last two: its input is a sum, which plain Inductor saves too."""
    plain = report(Stack(by_policy, lambda block: block), linears="off", saved="off")
    found = report(Stack(by_policy, lambda block: block), **RECIPES["int8"])
    assert len(found.linears) == 3 * 2 * 3
    assert plain.saved_bytes > 3 * 4 * UNIT, "what `up` returns of each block at least"
    assert plain.saved_bytes <= found.saved_bytes <= plain.saved_bytes + 3 * 2 * 3 * 8


def graph_of_two_regions() -> dict[str, Node]:
    """x -> sin (1) -> cos (2) -> tanh (outside), and what passes might put beside them; all by name."""
    graph, n = Graph(), dict[str, Node]()
    n["x"], n["dy"] = graph.placeholder("primals_1"), graph.placeholder("tangents_1")

    def add(name: str, op: Any, *operands: str, region: int | None = None) -> None:
        n[name] = graph.call_function(op, tuple(n[o] for o in operands))
        if region is not None:
            n[name].meta |= {private.CHECKPOINT: region, private.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE}

    add("codes of x", aten.neg.default, "x")
    add("sin", aten.sin.default, "codes of x", region=1)
    add("codes of sin", aten.neg.default, "sin")
    add("turned codes", aten.neg.default, "codes of sin")
    add("cos", aten.cos.default, "codes of sin", region=2)
    add("codes of cos", aten.neg.default, "cos")
    add("codes for the backward", aten.abs.default, "cos")
    add("tanh", aten.tanh.default, "codes of cos")
    add("noise", aten.rand_like.default, "codes of x")
    add("noisy sin", aten.mul.Tensor, "sin", "noise", region=1)
    add("gradient's codes", aten.neg.default, "dy")
    add("product", aten.mul.Tensor, "gradient's codes", "turned codes")
    add("dx", aten.mul.Tensor, "product", "codes for the backward")
    graph.output([n["tanh"], n["noisy sin"], n["dx"]])
    describe_joint(graph, [n["x"]], [n["dy"]], parameters=())
    own = ("x", "dy", "sin", "cos", "tanh", "noisy sin", "dx")
    join_regions(graph, {n[name] for name in own})
    return n


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("codes of x", 1),  # the region's input is not of it, its codes are
        ("codes of sin", 2),  # made of the last region's result, for the next
        ("turned codes", 2),  # read by the backward alone
        ("codes of cos", None),  # read outside
        ("codes for the backward", 2),
        ("noise", None),  # another draw would be other numbers
        ("gradient's codes", None),
        ("product", None),
        ("tanh", None),  # the user's own stay as they are
    ],
)
def test_an_added_operation_is_of_the_region_that_reads_it(name: str, region: int | None) -> None:
    node = graph_of_two_regions()[name]
    assert region_of(node) == region
    assert node.meta.get(private.RECOMPUTE) == (None if region is None else CheckpointPolicy.PREFER_RECOMPUTE)


def test_a_stand_in_takes_the_policy_and_the_region() -> None:
    graph = Graph()
    old, new = graph.placeholder("old"), graph.placeholder("new")
    old.meta |= {private.CHECKPOINT: 3, private.RECOMPUTE: CheckpointPolicy.MUST_SAVE, "other": 1}
    stand_in(new, old)
    assert new.meta == {private.CHECKPOINT: 3, private.RECOMPUTE: CheckpointPolicy.MUST_SAVE}
