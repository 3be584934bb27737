"""chunk_logits for log-probabilities of given tokens, entropies, DPO and GRPO: numbers, counts, what exists, declines."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

import fp8compile
from fp8compile.fx.graph import IN_CHUNKS, is_tensor, numel
from fp8compile.passes.chunk_logits import chunk_logits
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import LOGITS
from tests.support import policies
from tests.support.graphs import joint_of, text_of
from tests.support.losses import HIDDEN, WORDS, Head, Loss, case, gradients
from tests.support.measure import compiled
from tests.support.policies import ENTRIES, SUMS, GroupRelative, Preference, known, pair
from tests.support.reference import sqnr_db

aten = torch.ops.aten
CHUNKS = 3
EXACT: dict[str, Any] = {"linears": "off", "saved": "off", "fp32.observe": False}
FORMS = [(form, 0) for form in ENTRIES] + [(form, CHUNKS) for form in SUMS]
named = pytest.mark.parametrize(("loss", "sums"), FORMS, ids=[form.__name__ for form, _ in FORMS])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def told(fn: Any) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Chunks of each matrix of logits, and why others are left."""
    report = fp8compile.report(fn)
    chunks = [(each.forward, each.sums, each.backward) for each in report.chunked]
    return chunks, [skip.reason for skip in report.notes.skipped(LOGITS)]


def beside_eager(model: nn.Module, *args: Tensor, **options: Any) -> tuple[list[tuple[int, int, int]], list[str]]:
    """The same; the loss and all gradients have to be those of eager, in float64 and another order of sums."""
    fn = compiled(model, **{**EXACT, "memory.chunk_logits": CHUNKS, **options})
    by = [p for p in (*args, *model.parameters()) if p.requires_grad]
    ours, exact = (torch.autograd.grad(run(*args), by) for run in (fn, model))
    for got, wanted in zip((fn(*args).detach(), *ours), (model(*args).detach(), *exact), strict=True):
        assert (got - wanted).norm() <= 1e-12 * max(1, wanted.norm())
    return told(fn)


@named
def test_numbers_are_those_of_eager(loss: Loss, sums: int) -> None:
    model, x, t = case(loss, torch.float64)
    assert beside_eager(model, x, t) == ([(CHUNKS, sums, CHUNKS)], [])


def of_their_size(graph: Graph) -> list[str]:
    """Values of 8 rows of logits and more, where a chunk has 4; the head's weight ``[16, 50]`` is none."""
    shapes = {n: tuple(n.meta["val"].shape) for n in graph.nodes if is_tensor(n)}
    return [
        n.name for n, shape in shapes.items() if shape[-1:] == (WORDS,) and 8 <= numel(n.meta["val"]) / WORDS < HIDDEN
    ]


COMPARED = (policies.scaled_after, policies.cross_entropy_with_entropy)  # columns, within the kernel of a sum


@named
def test_nothing_of_their_size_exists_and_it_is_idempotent(loss: Loss, sums: int) -> None:
    model, x, t = case(loss)
    graph = joint_of(model, x, t, **EXACT, **{"memory.chunk_logits": CHUNKS})
    assert aten.scatter_add.default not in {n.target for n in graph.nodes}
    assert bool(of_their_size(graph)) == (loss in COMPARED)
    before = text_of(graph)
    assert chunk_logits(graph, Context(Recipe(memory={"chunk_logits": CHUNKS}))).chunked == ()
    assert text_of(graph) == before


@pytest.mark.parametrize("loss", [policies.nll_16, policies.with_entropy], ids=lambda form: form.__name__)
def test_a_chunk_is_computed_when_the_one_before_is_done(loss: Loss) -> None:
    """Two in the forward, two of sums, two of columns: the first of these behind the sums of all rows."""
    model, x, t = case(loss)
    graph = joint_of(model, x, t, **EXACT, **{"memory.chunk_logits": 2})
    again = [n for n in graph.nodes if n.target is aten.mm.default and IN_CHUNKS in n.meta and _makes_logits(n)]
    assert len(again) == (6 if loss is policies.with_entropy else 4)
    for one, following in (*itertools.pairwise(again[:2]), *itertools.pairwise(again[2:])):
        assert one in _computed_from(following)


def _makes_logits(node: Node) -> bool:
    return tuple(node.meta["val"].shape) in {(6, WORDS), (12, WORDS // 2)}


def _computed_from(node: Node) -> set[Node]:
    found, waiting = set[Node](), [node]
    while waiting:
        new = [o for o in waiting.pop().all_input_nodes if o not in found]
        found.update(new)
        waiting += new
    return found


@pytest.mark.parametrize(
    "loss", [policies.nll, policies.nll_16, policies.entropy, policies.with_entropy], ids=lambda form: form.__name__
)
@pytest.mark.parametrize(
    ("dtype", "islands"),
    [(torch.float32, "off"), (torch.bfloat16, "off"), (torch.float16, "off"), (torch.float16, "policy")],
)
def test_in_each_dtype_they_are_as_exact_as_without_chunks(loss: Loss, dtype: torch.dtype, islands: str) -> None:
    """Roundings to 16 bits are the same, but for sums in FP32, which may turn one: 1 dB. In FP32 there are sums alone, of
    64 terms and less: each is off by 64 units at most, of an exponent below 8, in logits and statistics."""
    model, x, t = case(loss, dtype)
    options = {**EXACT, "fp32": islands}
    fn = compiled(model, **options, **{"memory.chunk_logits": CHUNKS})
    ours, (chunks, _) = gradients(model, fn, x, t), told(fn)
    assert len(chunks) == 1
    torch._dynamo.reset()
    plain = gradients(model, compiled(model, **options), x, t)
    exact = gradients(twin := copy.deepcopy(model).double(), twin, x.detach().double().requires_grad_(), t)
    for got, whole, wanted in zip(ours, plain, exact, strict=True):
        least = -20 * torch.tensor(2 * 64 * 8 * 2.0**-24).log10().item()
        least = min(sqnr_db(wanted, whole.double()) - 1, least)
        assert got.dtype == whole.dtype and sqnr_db(wanted, got.double()) >= least


@pytest.mark.parametrize(
    ("model", "wanted"), [(Preference, [(3, 0, 0)] * 2 + [(3, 0, 3)] * 2), (GroupRelative, [(3, 0, 3), (3, 0, 0)])]
)
def test_two_policies_in_one_graph(model: type[Preference], wanted: list[tuple[int, int, int]]) -> None:
    """The reference model's logits have no backward; those of both answers have one each."""
    torch.manual_seed(0)
    assert beside_eager(model().double(), *pair()) == (wanted, [])


def test_saved_bytes_and_what_the_report_says() -> None:
    torch.manual_seed(0)
    fn = compiled(model := Preference(), **EXACT, **{"memory.chunk_logits": CHUNKS})
    fn(*pair()).backward()
    report = fp8compile.report(fn)
    assert report.saved_bytes < report.saved_bytes_plain - 2 * 12 * WORDS * 4
    assert "logits: 2.7 KiB never exist, 3 + 0 chunks of at most 933 B" in str(report)
    assert "logits: 2.7 KiB never exist, 3 + 3 chunks of at most 952 B" in str(report)
    assert all(p.grad is None for p in model.reference.parameters())
    torch._dynamo.reset()
    head, x, t = case(policies.entropy)
    fn = compiled(head, **EXACT, **{"memory.chunk_logits": CHUNKS})
    fn(x, t)
    assert "logits: 2.3 KiB never exist, 3 + 3 + 3 chunks of at most 816 B" in str(fp8compile.report(fn))


class Flat(nn.Module):
    """Logits of two dimensions, as many rows as asked for."""

    def __init__(self, loss: Loss, rows: int, words: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head, self.loss = nn.Linear(HIDDEN, words, bias=False), loss
        self.x, self.t = nn.Parameter(torch.randn(rows, HIDDEN)), torch.arange(rows) % words

    def forward(self) -> Tensor:
        return self.loss(self.lm_head(self.x), self.t)


@pytest.mark.parametrize(
    "loss",
    [policies.nll, policies.nll_16, policies.with_entropy, policies.sum_of_sums],
    ids=lambda form: form.__name__,
)
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_one_row_rows_in_uneven_chunks_and_as_many_as_columns(loss: Loss, rows: int) -> None:
    chunks = {1: 1, 2: 2}.get(rows, CHUNKS)
    sums = chunks if loss in SUMS else 0
    assert beside_eager(Flat(loss, rows).double()) == ([(chunks, sums, CHUNKS)], [])


@pytest.mark.parametrize("loss", [policies.nll_16, policies.with_entropy], ids=lambda form: form.__name__)
def test_chunks_of_rows_and_columns_of_whole_tiles(loss: Loss) -> None:
    assert beside_eager(Flat(loss, 300, 520).double()) == ([(3, 3 if loss in SUMS else 0, 3)], [])


class Scaled(Head):
    """A trained scale of each row, whose gradient is a sum over columns and is read by nothing else; a trained bias of
    log-probabilities, whose gradient sums what gathered entries' are over rows."""

    def __init__(self) -> None:
        super().__init__(policies.nll_16)
        self.scale, self.bias = (
            nn.Parameter(torch.linspace(0.5, 1, 12).view(2, 6, 1)),
            nn.Parameter(torch.randn(WORDS)),
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return -(F.log_softmax(self.lm_head(x) * self.scale, -1) + self.bias).gather(-1, known(t)).mean()


def test_gradients_of_a_scale_and_of_a_bias() -> None:
    _, x, t = case(dtype=torch.float64)
    assert beside_eager(Scaled().double(), x, t) == ([(CHUNKS, CHUNKS, CHUNKS)], [])


def test_a_target_out_of_range_raises_as_it_does_in_plain_torch() -> None:
    model, x, t = case(lambda z, t: -(z.gather(-1, t.unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)).mean())
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(x, t)
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(model, **EXACT, **{"memory.chunk_logits": CHUNKS})(x, t)


# What is declined, and why.


def row_by_row(z: Tensor, t: Tensor) -> Tensor:
    """selective_log_softmax in 16 bits: a row of the batch at a time."""
    return -torch.stack([policies.log_softmaxed(row, to) for row, to in zip(z, t, strict=True)]).mean()


def sums_row_by_row(z: Tensor, t: Tensor) -> Tensor:
    """selective_log_softmax in 32 bits."""
    return (torch.stack([row.logsumexp(-1) for row in z]) - z.gather(-1, known(t)).squeeze(-1)).mean()


def in_pieces(z: Tensor, t: Tensor) -> Tensor:
    return torch.cat([policies.entropies(piece) for piece in z.flatten(0, 1).split(5)]).mean()


def some_columns(z: Tensor, t: Tensor) -> Tensor:
    return policies.nll(z[..., :48], t.clamp(max=47))


def several_columns(z: Tensor, t: Tensor) -> Tensor:
    return -F.log_softmax(z, -1).gather(-1, torch.cat([known(t), known(t) // 2], -1)).mean()


def indexed(z: Tensor, t: Tensor) -> Tensor:
    return -F.log_softmax(z.flatten(0, 1), -1)[torch.arange(12), t.flatten().clamp(min=0)].mean()


def shifted_late(z: Tensor, t: Tensor) -> Tensor:
    return policies.nll_16(z, t) + F.log_softmax(z, -1)[:, :-1].gather(-1, known(t[:, 1:])).mean()


def largest(z: Tensor, t: Tensor) -> Tensor:
    return -(z.max(-1).values - z.logsumexp(-1)).mean()


def largest_by_amax(z: Tensor, t: Tensor) -> Tensor:
    return -F.log_softmax(z, -1).amax(-1).mean()


def masked_columns(z: Tensor, t: Tensor) -> Tensor:
    """Of a mask of the logits' size a chunk of rows is not known to be one."""
    p = F.softmax(z, -1)
    return policies.nll(z, t) + (p * p * torch.arange(600).view(z.shape).cumsum(-1)).sum(-1).mean()


def of_padded_rows(z: Tensor, t: Tensor) -> Tensor:
    p = F.log_softmax(z, -1)
    return -(p.exp() * p)[:, :-1].sum(-1).mean()


DECLINED: list[tuple[Loss, str]] = [
    (row_by_row, "select takes a part of them: compute the loss of all rows and columns at once"),
    (sums_row_by_row, "select takes a part of them"),
    (in_pieces, "split takes a part of them"),
    (some_columns, "slice takes a part of them"),
    (several_columns, "gather reads them"),
    (indexed, "index reads them"),
    (shifted_late, "the loss reads the logits' rows in two ways"),
    (largest, "max reads them"),
    (
        largest_by_amax,
        "the gradient needs sum over all columns of what is computed from them: eq of them and of a number",
    ),
    (masked_columns, "mul reads a tensor of the logits' size beside them"),
    (of_padded_rows, "the loss reads the logits' rows in two ways"),
]


@pytest.mark.parametrize(("loss", "reason"), DECLINED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_declined_and_why(loss: Loss, reason: str) -> None:
    model, x, t = case(loss, torch.float64)
    chunks, reasons = beside_eager(model, x, t)
    assert chunks == [] and len(reasons) == 1 and reason in reasons[0], reasons


@pytest.mark.parametrize("loss", [policies.nll, policies.with_entropy], ids=lambda form: form.__name__)
def test_symbolic_sizes(loss: Loss) -> None:
    model, x, t = case(loss, torch.float64)
    for each in (x, t):
        torch._dynamo.mark_dynamic(each, 1)
    assert beside_eager(model, x, t) == ([], ["the logits' size is symbolic: torch.compile(dynamic=False)"])
