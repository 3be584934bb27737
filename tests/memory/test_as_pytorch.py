"""The cases that PyTorch's test/functorch/test_ac.py has for its memory budget, restated for ours.

Theirs is a budget of saved bytes and solves a knapsack for each. Ours is one of the peak, and its states are nested: each
gives up one value more. So a case is a claim about the states: what goes first, what that saves, and what is made again.
The unit is a matrix of 512 x 512 in FP32, in bytes, and the product of two of them, in work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8compile.fx.ops import is_attention, is_random_state
from fp8compile.memory.frontier import State
from tests.support.budgets import PLAIN, budget_of, states_of
from tests.support.graphs import split_of

aten = torch.ops.aten
UNIT = 512


def saved(state: State) -> float:
    return state.saved / (4 * UNIT**2)


def work(state: State) -> float:
    """Of the matmuls that are made again."""
    repeated = [node.args for node in state.repeated if node.target is aten.mm.default]
    shapes = [[arg.meta["val"].shape for arg in args] for args in repeated]  # type: ignore[union-attr]
    return sum(m * k * n for (m, k), (_, n) in shapes) / UNIT**3


class Weights(nn.Module):
    """Weights of these shapes, in units."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.ws = nn.ParameterList(torch.randn(i * UNIT, o * UNIT) / 30 for i, o in shapes)


class Chain(Weights):
    def forward(self, x: Tensor) -> Tensor:
        for w in self.ws:
            x = (x @ w).cos()
        return x.sum()


class Fan(Weights):
    """Each weight has an input of its own."""

    def forward(self, *xs: Tensor) -> Tensor:
        return sum((x @ w).cos().sum() for x, w in zip(xs, self.ws, strict=True))  # type: ignore[return-value]


class Shared(Weights):
    """All weights have one input."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((x @ w).cos().sum() for w in self.ws)  # type: ignore[return-value]


def data(rows: int = 1, columns: int = 1) -> Tensor:
    return torch.randn(rows * UNIT, columns * UNIT)


class Cosine(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return (x.cos() @ self.ws[0]).sum()


def test_what_is_cheap_is_made_again() -> None:
    """test_rematerializes_cheap: a cosine of the caller's data goes without a product that is repeated for it."""
    last = states_of(Cosine([(1, 1)]), data())[-1]
    assert (saved(last), work(last)) == (0, 0)


def test_each_product_of_a_chain_that_goes_is_made_again_once() -> None:
    """test_matmul_even_chain: of five, what is saved and what is repeated are five together, in every state."""
    states = states_of(Chain([(1, 1)] * 5), data())
    assert [saved(state) for state in states] == [5, 4, 3, 2, 1, 0]
    assert [work(state) for state in states] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("columns", [(11, 3, 4, 2), (3, 5, 11, 17, 14)])
def test_values_go_one_by_one(columns: tuple[int, ...]) -> None:
    """test_matmul_uneven_chain: theirs solves each budget exactly; ours leaves less room than one value takes."""
    found = [saved(state) for state in states_of(Shared([(1, each) for each in columns]), data())]
    assert found[0] == sum(columns) and found[-1] == 0
    gone = [before - after for before, after in itertools.pairwise(found)]
    assert sorted(gone) == sorted(columns)
    for budget in range(1, sum(columns)):
        room = budget - max(each for each in found if each <= budget)
        assert room < max(columns)


def test_the_cheaper_product_goes_first() -> None:
    """test_prioritize_cheaper_matmul: of two results of one size, the one with less work."""
    states = states_of(Fan([(1, 4), (2, 2)]), data(1, 1), data(2, 2))
    assert [(saved(state), work(state)) for state in states] == [(8, 0), (4, 4), (0, 12)]


def test_the_cheaper_products_go_first() -> None:
    """test_prioritize_cheaper_matmul2: work for a byte decides, not what comes nearest to the budget."""
    states = states_of(Fan([(4, 4), (6, 2), (2, 6)]), data(4, 4), data(6, 6), data(2, 2))
    third, first = 2 * 2 * 6, 4 * 4 * 4
    assert [(saved(s), work(s)) for s in states[:3]] == [(40, 0), (28, third), (12, third + first)]


class Attention(Weights):
    def forward(self, x: Tensor) -> Tensor:
        heads = x[None, None]
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)
        return nn.functional.linear(x, self.ws[0]).cos().sum()


@pytest.mark.parametrize(
    ("length", "width", "first"),
    [(1, 3, "attention"), (2, 8, "attention"), (2, 1, "mm"), (2, 4, "mm"), (4, 9, "mm")],
)
def test_attention_goes_first_where_it_is_the_cheaper(length: int, width: int, first: str) -> None:
    """test_attention_vs_linear: they count FLOPs, which are equal where columns are twice as many as rows. Ours are seconds:
    an H100's attention is rated at 0.8 of the matmuls' FLOPs in a second, so there the columns are 2.5 times as many."""
    states = states_of(Attention([(width, width)]), data(length, width))
    repeated = next(state.repeated for state in states if state.repeated)
    found = {"attention" if is_attention(node) else "mm" for node in repeated if is_attention(node) or work_of(node)}
    assert found == {first}


def work_of(node: torch.fx.Node) -> bool:
    return node.target is aten.mm.default


def test_regions_of_checkpoint_stay_as_they_are() -> None:
    """test_manual_ac: a tight budget keeps nothing of a region that the user has computed again."""

    def region(x: Tensor) -> Tensor:
        y = x @ x.T
        y = y @ y
        return (y @ y) @ x

    class Regions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(region, checkpoint(region, x, use_reentrant=False), use_reentrant=False).sum()

    x = torch.randn(64, 1024, requires_grad=True)
    default = split_of(Regions(), x, memory=10**12, **PLAIN)
    _, tight = budget_of(Regions(), x, 0.01, **PLAIN)
    assert default.saved_bytes() <= 2 * x.nbytes  # the inputs of both regions
    assert tight.saved_bytes() <= default.saved_bytes()


class Walked(nn.Module):
    """Blocks of attention and a linear, each a checkpointed region, walked through once for each input."""

    def __init__(self, blocks: int = 3, size: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)))
            for _ in range(blocks)
        )

    def forward(self, *xs: Tensor) -> Tensor:
        return sum(self.walk(x).square().mean() for x in xs)  # type: ignore[return-value]

    def walk(self, x: Tensor) -> Tensor:
        for norm, qkv, out in self.blocks:  # type: ignore[misc]
            x = checkpoint(self.block, x, norm, qkv, out, use_reentrant=False)
        return x

    @staticmethod
    def block(x: Tensor, norm: nn.Module, qkv: nn.Module, out: nn.Module) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + out(attended.transpose(1, 2).flatten(-2))


def test_the_random_state_of_a_checkpoint_does_not_matter() -> None:
    """Its length is symbolic, and all else is not."""
    x = torch.randn(4, 128, 64, requires_grad=True)
    told, split = budget_of(Walked(), x, 0.5, disabled="drop_random_states", **PLAIN)
    assert any(is_random_state(edge.forward) for edge in split.edges)
    assert not told.reason and told.frontier


@pytest.mark.sweep
@pytest.mark.parametrize("budget", [10**9, 0.5])
def test_two_walks_through_one_stack_take_no_more_than_eager(budget: float) -> None:
    """pytorch issue 193193: plain Inductor holds the copies of several blocks."""
    from fp8compile.tools.step_memory import measured_peak

    xs = torch.randn(4, 512, 64), torch.randn(4, 512, 64)
    model = Walked()

    def peak(run: nn.Module) -> int:
        run(*xs).backward()
        model.zero_grad()
        return measured_peak(lambda: run(*xs).backward())

    options = {"preset": "off", "memory": budget}
    eager, ours = peak(model), peak(torch.compile(model, backend="fp8compile", options=options))  # type: ignore[arg-type]
    assert ours <= eager
