"""chunk_logits where logits have two dimensions: numbers of rows and of columns can be taken for each other there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.reporting.entries import LOGITS
from tests.support.measure import compiled

Loss = Callable[[Tensor, Tensor], Tensor]
ce = F.cross_entropy


class Head(nn.Module):
    def __init__(self, loss: Loss, rows: int, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head, self.loss = nn.Linear(16, words, bias=False), loss
        self.x, self.t = torch.randn(rows, 16, requires_grad=True), torch.arange(rows) % words

    def forward(self) -> Tensor:
        return self.loss(self.lm_head(self.x), self.t)


def beside_eager(loss: Loss, rows: int = 24, words: int = 40) -> tuple[int, list[str]]:
    """How many logits are computed in chunks, and why others are not; loss and gradients have to be those of eager."""
    torch._dynamo.reset()
    exact, model = (Head(loss, rows, words).double() for _ in range(2))
    exact.x, model.x = (exact.x.detach().double().requires_grad_() for _ in range(2))
    model.lm_head = copy.deepcopy(exact.lm_head)
    fn = compiled(model, linears="off", saved="off", **{"fp32.observe": False, "memory.chunk_logits": 3})
    for run in (exact, fn):
        run().backward()
    for got, wanted in ((model.lm_head.weight.grad, exact.lm_head.weight.grad), (model.x.grad, exact.x.grad)):
        assert got is not None and wanted is not None
        assert (got - wanted).norm() <= 1e-12 * wanted.norm()
    report = fp8compile.report(fn)  # type: ignore[arg-type]
    return len(report.chunked), [skip.reason for skip in report.notes.skipped(LOGITS)]


def divided(z: Tensor, t: Tensor) -> Tensor:
    return ce(z / 5, t)


def soft_capped(z: Tensor, t: Tensor) -> Tensor:
    return ce(5 * torch.tanh(z / 5), t)


def by_row(z: Tensor, t: Tensor) -> Tensor:
    return ce(z * (1 + t.double())[:, None], t)


def with_z_loss(z: Tensor, t: Tensor) -> Tensor:
    y = z * 0.25
    return ce(y, t) + 1e-2 * y.logsumexp(-1).square().mean()


def of_its_own_labels(z: Tensor, t: Tensor) -> Tensor:
    return ce(z, z.detach().argmax(-1))


@pytest.mark.parametrize("loss", [divided, soft_capped, by_row, with_z_loss, of_its_own_labels])
def test_forms_of_a_loss(loss: Loss) -> None:
    assert beside_eager(loss) == (1, [])


def less_the_largest_of_columns(z: Tensor, t: Tensor) -> Tensor:
    return ce(z - z.detach().amax(1), t)


def less_a_row_of_them(z: Tensor, t: Tensor) -> Tensor:
    return ce(z - z.detach().logsumexp(1)[None, :], t)


@pytest.mark.parametrize("loss", [less_the_largest_of_columns, less_a_row_of_them])
def test_one_number_a_row_read_as_one_a_column(loss: Loss) -> None:
    assert beside_eager(loss, 40, 40) == (0, ["sub reads one number a row as one a column"])


def with_the_largest(z: Tensor, t: Tensor) -> Tensor:
    return 1e-6 * ce(z, t) + z.amax(-1).square().mean()


def test_the_gradient_of_a_largest_logit_is_found_by_equality() -> None:
    """Logits that are made again in chunks of columns may differ by a bit from those of which the largest was taken."""
    chunked, [reason] = beside_eager(with_the_largest, 64, 50)
    assert not chunked and reason.startswith("eq of them and of a number of their row")


def test_one_class() -> None:
    assert beside_eager(lambda z, t: ce(z, t) + z.square().mean(), 24, 1)[0] == 0
