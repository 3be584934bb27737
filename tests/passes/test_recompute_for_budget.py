"""recompute_for_budget: golden, contract, declines, numbers."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8compile
from fp8compile._text import human
from fp8compile.analysis.liveness import peak_bytes
from fp8compile.budget.frontier import State, chosen
from fp8compile.compiler import pipeline
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.recompute_for_budget import NOT_STATIC, NOT_WHOLE, _may_go, recompute_for_budget
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.budget import Budget
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.report import GraphReport
from tests.support.graphs import backward_of, split_of
from tests.support.measure import LlamaLayer
from tests.support.reference import sqnr_db

aten = torch.ops.aten
PLAIN = {"preset": "off", "codegen": "eager"}
BUDGETS = [i / 20 for i in range(20, 0, -1)]
EXACT = 120.0  # dB: FP32, equal but for the order of a sum


class Steps(nn.Module):
    """Linears with a tanh between them: what is kept is each tanh, or made again by a matmul."""

    def __init__(self, count: int = 2, size: int = 64) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        return x


class Llama(nn.Module):
    def __init__(self, layers: int = 3, hidden: int = 64, ffn: int = 176) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(hidden, ffn, 4) for _ in range(layers))
        self.tables = nn.Buffer(torch.randn(2, 64, hidden // 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *self.tables)
        return x


class Encoder(nn.Module):
    """BERT-style layers with attention written by hand, layer norms, biases and GELU."""

    def __init__(self, layers: int = 2, hidden: int = 64) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + out(((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
            x = x + mlp(x)
        return x


class Gated(nn.Module):
    """The deep model of pytorch issue 197838 without its attention: residual layers silu(gate) * up, narrow and many."""

    def __init__(self, layers: int = 32, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(i, o, bias=False) for i, o in ((size, 3 * size), (size, 3 * size), (3 * size, size))
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in self.layers:  # type: ignore[misc]
            x = x + down(F.silu(gate(x)) * up(x))
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


Case = tuple[nn.Module, Tensor]
CASES: dict[str, Callable[[], Case]] = {
    "steps": lambda: (Steps(8), torch.randn(128, 64)),
    "llama": lambda: (Llama(), torch.randn(2, 64, 64)),
    "encoder": lambda: (Encoder(), torch.randn(2, 64, 64)),
    "convolutions": lambda: (Convolutions(), torch.randn(2, 16, 16, 16)),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def walked(split: PartitionedGraph) -> int:
    """The peak that the walk over the finished graphs finds."""
    return peak_bytes(split)


def step(model: nn.Module, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output and all gradients of one training step, of a copy of the model."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    torch._dynamo.reset()
    out = torch.compile(model, backend="fp8compile", options=options)(x)
    out.float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **found}


def split_under(budget: float, model: nn.Module, x: Tensor, notes: list[Notes], **options: Any) -> PartitionedGraph:
    """The halves under a budget; what the pass noted goes into ``notes``."""

    def recompute_for_budget_noted(split: PartitionedGraph, ctx: Context) -> Notes:
        notes.append(recompute_for_budget(split, ctx))
        return notes[-1]

    passes = tuple(
        each._replace(run=functools.wraps(recompute_for_budget)(recompute_for_budget_noted))
        if each.run is recompute_for_budget else each for each in pipeline.PARTITION
    )  # fmt: skip
    with mock.patch.object(pipeline, "PARTITION", passes):
        torch._dynamo.reset()
        return split_of(model, x, memory_budget=budget, **options)


def budget_of(model: nn.Module, x: Tensor, budget: float, **options: Any) -> tuple[Budget, PartitionedGraph]:
    notes: list[Notes] = []
    split = split_under(budget, model, x, notes, **options)
    (told,) = notes[0].budgets
    return told, split


def test_golden_backward_that_repeats_a_matmul() -> None:
    _, split = budget_of(Steps(2), torch.randn(128, 64), 0.0, **PLAIN)
    assert_expected_inline(
        backward_of(split),
        """\
primals_2: float32[128, 64]
primals_3: float32[64, 64]
primals_1: float32[64, 64]
tanh_1: float32[128, 64]
tangents_1: float32[128, 64]
mul: float32[128, 64] = mul(tanh_1, tanh_1)
sub: float32[128, 64] = sub(mul)
mul_1: float32[128, 64] = mul(tangents_1, sub)
permute_2: float32[64, 128] = permute(mul_1)
permute: float32[64, 64] = permute(primals_1)
mm: float32[128, 64] = mm(primals_2, permute)
tanh_2: float32[128, 64] = tanh(mm)
mm_2: float32[64, 64] = mm(permute_2, tanh_2)
permute_1: float32[64, 64] = permute(primals_3)
permute_4: float32[64, 64] = permute(permute_1)
mm_3: float32[128, 64] = mm(mul_1, permute_4)
mul_2: float32[128, 64] = mul(tanh_2, tanh_2)
sub_1: float32[128, 64] = sub(mul_2)
mul_3: float32[128, 64] = mul(mm_3, sub_1)
permute_6: float32[64, 128] = permute(mul_3)
mm_4: float32[64, 64] = mm(permute_6, primals_2)
return mm_4, None, mm_2
""",
    )


def test_a_copy_stands_directly_before_what_reads_it_first() -> None:
    """No copy of an earlier step exists before the gradients of later ones are done."""
    told, split = budget_of(Steps(12), torch.randn(128, 64), 0.0, **PLAIN)
    nodes = list(split.bw.graph.nodes)
    copies = [n for n in nodes if n.target is aten.mm.default and is_copy(n, split)]
    assert told.chosen and copies
    for copied in copies:
        first = min(copied.users, key=nodes.index)
        between = nodes[nodes.index(copied) + 1 : nodes.index(first)]
        assert all(is_copy(n, split) for n in between), f"{copied} waits for {between}"


def is_copy(node: Node, split: PartitionedGraph) -> bool:
    """Whether a node of the backward depends on no incoming gradient."""
    tangents = [n for n in split.bw.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    waiting, seen = [node], set[Node]()
    while waiting:
        n = waiting.pop()
        if n in tangents:
            return False
        waiting += [parent for parent in n.all_input_nodes if parent not in seen]
        seen.update(n.all_input_nodes)
    return True


@pytest.mark.parametrize("name", list(CASES))
def test_the_predicted_peak_is_what_the_finished_graphs_need(name: str) -> None:
    model, x = case_of(name)
    for budget in (0.7, 0.0):
        told, split = budget_of(model, x, budget, **PLAIN)
        point = told.frontier[told.chosen]
        assert (point.peak, point.saved) == (walked(split), split.saved_bytes())


@pytest.mark.parametrize("name", list(CASES))
def test_with_codes_the_predicted_peak_is_what_the_finished_graphs_need(name: str) -> None:
    """To the byte, but for the encoder: there a value that was to stay exact, since repeated products read it, needs not."""
    model, x = case_of(name)
    for budget in (0.99, 0.0):
        told, split = budget_of(model, x, budget, codegen="eager", linear="off", min_saved_numel=0)
        point = told.frontier[told.chosen]
        found = (walked(split), split.saved_bytes())
        assert found == (point.peak, point.saved) or (name == "encoder" and found < (point.peak, point.saved))


@pytest.mark.parametrize("name", [*CASES, "deep"])
def test_a_smaller_budget_never_has_a_higher_peak(name: str) -> None:
    model, x = (Gated(), torch.randn(128, 32)) if name == "deep" else case_of(name)
    told, _ = budget_of(model, x, 0.99, **PLAIN)
    points = [State((), (), p.saved, p.peak, p.us) for p in told.frontier]
    found = [chosen(points, int(budget * points[0].peak)) for budget in BUDGETS]
    assert all(after.peak <= before.peak for before, after in itertools.pairwise(found))
    assert all(after.us >= before.us for before, after in itertools.pairwise(found))
    assert found[-1].peak < 0.85 * points[0].peak
    assert all(
        state.peak <= budget * points[0].peak or state is found[-1]
        for budget, state in zip(BUDGETS, found, strict=True)
    )


@pytest.mark.parametrize("name", list(CASES))
def test_without_codes_every_budget_gives_the_same_gradients(name: str) -> None:
    model, x = case_of(name)
    exact = step(model, x, **PLAIN)
    for budget in (0.6, 0.0):
        found = step(model, x, memory_budget=budget, **PLAIN)
        assert min(sqnr_db(exact[n], found[n]) for n in exact) > EXACT


def test_with_codes_gradients_stay_as_good_as_the_defaults() -> None:
    """What is made again comes from exact values or from codes once: no gradient loses more than the codes' own error."""
    model, x = case_of("llama")
    exact = step(model, x, **PLAIN)
    stored = {"codegen": "eager", "linear": "off", "min_saved_numel": 0}
    default, tight = step(model, x, **stored), step(model, x, memory_budget=0.0, **stored)
    worst = {name: min(sqnr_db(exact[n], found[n]) for n in exact) for name, found in (("1", default), ("0", tight))}
    assert worst["0"] > worst["1"] - 3.0, worst


def test_with_fp8_linears_the_products_are_repeated_from_codes_alike() -> None:
    model, x = case_of("llama")
    linears = {"codegen": "eager", "preset": "linear_only", "emulate": True}
    default, tight = step(model, x, **linears), step(model, x, memory_budget=0.0, **linears)
    assert min(sqnr_db(default[n], tight[n]) for n in default) > EXACT


def test_it_is_idempotent_in_bytes() -> None:
    model, x = case_of("steps")
    target = 250_000
    told, split = budget_of(model, x, target, **PLAIN)
    assert told.is_met and told.chosen > 0
    (again,) = recompute_for_budget(
        split, Context(Recipe.preset("off", memory_budget=target, codegen="eager"))
    ).budgets
    assert again.chosen == 0


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
    exact, found = step(model, x, **PLAIN), step(model, x, memory_budget=0.0, **PLAIN)
    assert min(sqnr_db(exact[n], found[n]) for n in exact) > EXACT


def test_generated_code_draws_dropouts_numbers_again() -> None:
    model, x = Dropped(), torch.randn(128, 64)
    exact, found = step(model, x, preset="off"), step(model, x, preset="off", memory_budget=0.0)
    assert min(sqnr_db(exact[n], found[n]) for n in exact) > EXACT


def test_symbolic_sizes_have_the_reason() -> None:
    model = Steps(4)
    compiled = torch.compile(model, backend="fp8compile", options={**PLAIN, "memory_budget": 0.5}, dynamic=True)
    compiled(torch.randn(128, 64)).sum().backward()
    (told,) = fp8compile.report(compiled).budgets
    assert told.reason == NOT_STATIC and not told.frontier
    assert NOT_STATIC in " ".join(str(fp8compile.report(compiled)).split())


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
    ctx = Context(Recipe.preset("off", memory_budget=0.5))
    returned = [edge for edge in split.edges if edge.forward in split.user_outputs]
    assert returned and not any(_may_go(split, edge, ctx) for edge in returned)
    assert any(_may_go(split, edge, ctx) for edge in split.edges)


def test_modules_with_a_budget_of_one_keep_what_is_theirs() -> None:
    model, x = case_of("llama")
    _, split = budget_of(model, x, 0.0, modules={"layers.*": {"memory_budget": 1.0}}, **PLAIN)
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


@pytest.mark.parametrize("wrong", [-0.1, 1.5, True, "half", -3])
def test_a_budget_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        Recipe(memory_budget=wrong)


def test_a_module_cannot_have_a_budget_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"modules\['steps.0'\].memory_budget is 0.5"):
        Recipe(modules={"steps.0": {"memory_budget": 0.5}})


def test_the_report_tells_the_frontier() -> None:
    model, x = case_of("steps")
    report = fp8compile.explain(model, (x,), recipe=Recipe.preset("off", memory_budget=0.5))
    (told,) = report.budgets
    assert told.target == int(0.5 * told.frontier[0].peak)
    assert str(told) in " ".join(str(report).split())
    assert told.table.count("<-") == 1
    assert "recomputed for the memory budget" in str(report)
    assert all(entry.sources for entry in report.recomputed if entry.for_budget)
    assert GraphReport.from_dict(json.loads(json.dumps(report.graphs[0].to_dict()))).notes.budgets == (told,)


def test_what_cannot_be_reached_is_said() -> None:
    model, x = case_of("steps")
    (told,) = fp8compile.explain(model, (x,), recipe=Recipe.preset("off", memory_budget=2)).budgets
    assert not told.is_met and "not reached" in str(told)
    assert told.frontier[told.chosen].peak == min(point.peak for point in told.frontier)


@pytest.mark.sweep
def test_saved_bytes_of_a_llama_layer_by_budget() -> None:
    """Bytes saved for each of 8 layers, in units of a layer's input in BF16: the default, and budgets of the peak."""
    torch.manual_seed(0)
    model, x = Llama(8, 512, 1376).bfloat16(), torch.randn(4, 64, 512, dtype=torch.bfloat16)
    unit = 8 * x.nbytes
    options = {"codegen": "eager", "linear": "off"}
    default = split_of(model, x, **options).saved_bytes() / unit
    found = {}
    for budget in (0.5, 0.25):
        _, split = budget_of(model, x, budget, **options)
        found[budget] = split.saved_bytes() / unit
    assert default <= 5.9 and found[0.5] <= 3.0 and found[0.25] <= 1.6, (default, found)


def fit_of(model: nn.Module, x: Tensor, card: int) -> Budget:
    notes: list[Notes] = []
    split_under("fit", model, x, notes, card_gib=card / 1024**3, **PLAIN)  # type: ignore[arg-type]
    (told,) = notes[0].budgets
    return told


def test_fit_takes_what_the_card_has_left() -> None:
    """The cheapest state whose whole step is within the card: with two moments, parameters are held three times."""
    model, x = Steps(8), torch.randn(1024, 64)
    held = 3 * sum(p.nbytes for p in model.parameters())
    free, _ = budget_of(model, x, 0.99, **PLAIN)
    peaks = [point.peak for point in free.frontier]
    for peak in (peaks[0], peaks[2], min(peaks)):
        told = fit_of(model, x, held + peak)
        assert told.is_met and told.chosen == next(at for at, other in enumerate(peaks) if other <= peak)
        assert (told.held, told.target) == (held, peak)
    assert "of the step" in str(told)


def test_fit_says_what_is_missing() -> None:
    model, x = Steps(8), torch.randn(1024, 64)
    weights = sum(p.nbytes for p in model.parameters())
    held, update = 3 * weights, 2 * weights  # update: all gradients, and a temporary of that size
    told = fit_of(model, x, held + update)  # room for the optimizer's step, and less than the smallest peak
    least = min(point.peak for point in told.frontier)
    assert not told.is_met and told.frontier[told.chosen].peak == least
    assert f"does not fit at any budget, {human(least - update)} too much" in str(told)
    assert "does not fit at any budget: parameters and optimizer states take" in str(
        fit_of(model, x, held)
    )


def test_fit_needs_the_whole_model() -> None:
    class Broken(Steps):
        def forward(self, x: Tensor) -> Tensor:
            first, *others = self.steps
            x = torch.tanh(first(x))
            torch._dynamo.graph_break()
            for step in others:
                x = torch.tanh(step(x))
            return x

    options = {**PLAIN, "memory_budget": "fit", "card_gib": 1.0}
    compiled = torch.compile(Broken(4), backend="fp8compile", options=options)
    compiled(torch.randn(128, 64)).sum().backward()
    assert {told.reason for told in fp8compile.report(compiled).budgets} == {NOT_WHOLE}
