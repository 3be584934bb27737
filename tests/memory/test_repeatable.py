"""What is made again, and what is not: random numbers, custom operators, what the caller or a policy keeps."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8compile.passes.recompute_for_budget import _may_go
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.budgets import EXACT, PLAIN, Steps, budget_of, case_of, step
from tests.support.reference import sqnr_db

aten = torch.ops.aten


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.steps:
            x = F.dropout(torch.tanh(each(x)), 0.3)
        return x


def test_random_numbers_are_not_drawn_again_where_they_would_differ() -> None:
    """Node by node torch's inductor_random is no function of its seed: what is random stays, and gradients are right."""
    model, x = Dropped(), torch.randn(128, 64)
    exact, found = step(model, x, **PLAIN), step(model, x, memory=0.0, **PLAIN)
    assert min(sqnr_db(exact[n], found[n]) for n in exact) > EXACT


def test_generated_code_draws_dropouts_numbers_again() -> None:
    model, x = Dropped(), torch.randn(128, 64)
    exact = step(model, x, preset="off")
    for budget in (0.6, 0.0):
        found = step(model, x, preset="off", memory=budget)
        assert torch.equal(exact["output"] == 0, found["output"] == 0)  # the same elements are dropped
        assert min(sqnr_db(exact[n], found[n]) for n in exact) > EXACT


@torch.library.custom_op("budget::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(())


noisy.register_fake(torch.empty_like)


noisy.register_autograd(lambda ctx, gradient: gradient)


def test_a_custom_operator_is_not_repeated() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(noisy(self.a(x))))

    _, split = budget_of(Custom(), torch.randn(128, 64), 0.0, **PLAIN)
    assert not any("noisy" in str(n.target) for n in split.bw.graph.nodes if n.op == "call_function")
    assert any("noisy" in str(e.forward.target) for e in split.edges)


def test_what_the_caller_has_is_not_given_up() -> None:
    _, split = budget_of(Steps(6), torch.randn(128, 64), 0.9, **PLAIN)
    ctx = Context(Recipe.preset("off", memory=0.5))
    returned = [edge for edge in split.edges if edge.forward in split.user_outputs]
    assert returned and not any(_may_go(split, edge, ctx) for edge in returned)
    assert any(_may_go(split, edge, ctx) for edge in split.edges)


def test_modules_with_a_budget_of_one_keep_what_is_theirs() -> None:
    model, x = case_of("llama")
    _, split = budget_of(model, x, 0.0, modules={"layers.*": {"memory": 1.0}}, **PLAIN)
    _, free = budget_of(model, x, 0.0, **PLAIN)
    assert split.saved_bytes() > free.saved_bytes()


def test_a_checkpoint_policy_that_saves_is_followed() -> None:
    """Products are saved by the user's policy, so none is made again."""
    inner = Steps(6)

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

    _, split = budget_of(Checkpointed(), torch.randn(128, 64), 0.0, **PLAIN)
    assert sum(e.forward.target is aten.mm.default for e in split.edges) == 6
