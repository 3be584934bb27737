"""encode_saved: with sizes that only a run knows, values that norms read are stored as with sizes that are known."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.analysis.sensitivity.error import NORMALISED
from tests.support.reference import sqnr_db

Function = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """A function between two linears, whose results lie three deviations from zero."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(64, 128), nn.Linear(128, 64), function
        self.gain = nn.Parameter(torch.linspace(1, 1000, 128))
        self.a.bias.data.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


class Scaled(Between):
    """A gain a channel between a linear and a norm: 9.1 dB where a view in between hides what the backward computes again."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x) * self.gain))


def over_batch_and_tokens(h: Tensor) -> Tensor:
    return (h - h.mean((0, 1))) * (h.var((0, 1), unbiased=False) + 1e-5).rsqrt()


CASES: dict[str, Callable[[], nn.Module]] = {
    "a gain before RMSNorm": lambda: Scaled(lambda h: F.rms_norm(h, (128,))),
    "a gain before LayerNorm": lambda: Scaled(lambda h: F.layer_norm(h, (128,))),
    "batch norm of rows": lambda: Between(
        lambda h: F.batch_norm(h.flatten(0, 1), None, None, training=True).view(h.shape)
    ),
    "batch norm by hand": lambda: Between(over_batch_and_tokens),
    "batch norm of channels": lambda: Between(
        lambda h: F.batch_norm(h.transpose(1, 2), None, None, training=True).transpose(1, 2)
    ),
    "group norm": lambda: Between(lambda h: F.group_norm(h.transpose(1, 2), 4).transpose(1, 2)),
    "norm and relu": lambda: Between(lambda h: F.relu(over_batch_and_tokens(h))),
    "a table made of constants": lambda: Between(lambda h: F.rms_norm(h * torch.arange(1.0, 129.0) ** 3, (128,))),
}


def run(
    make: Callable[[], nn.Module], dynamic: bool, **options: object
) -> tuple[list[str], set[str], dict[str, float]]:
    """How values are stored, why others are not, and each gradient in dB, of a second batch of other sizes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    exact = copy.deepcopy(model).double()
    given = {"debug.codegen": "eager", "linears": "off", "saved.min_numel": 0, **options}
    fn = torch.compile(model, backend="fp8compile", dynamic=dynamic, options=given)
    for batch, tokens in ((6, 40), (5, 43)):
        model.zero_grad()
        x, goal = torch.randn(batch, tokens, 64), torch.randn(batch, tokens, 64)
        (fn(x) - goal).square().mean().backward()
    (exact(x.double()) - goal).square().mean().backward()
    report = fp8compile.report(fn)
    assert len(report.graphs) == 1 + (not dynamic)
    saved = [s.codec for s in report.saved][: len(report.saved) // len(report.graphs)]
    least = 1e-6 * max(float(p.grad.norm()) for p in exact.parameters() if p.grad is not None)
    pairs = zip(exact.named_parameters(), model.parameters(), strict=True)
    found = {n: (q.grad, p.grad) for (n, q), p in pairs if q.grad is not None and q.grad.norm() > least}
    return saved, {s.reason for s in report.skips}, {n: sqnr_db(q, p) for n, (q, p) in found.items() if p is not None}


@pytest.mark.parametrize("name", CASES)
def test_storage_and_gradients_are_those_of_sizes_that_are_known(name: str) -> None:
    saved, reasons, db = run(CASES[name], dynamic=False)
    saved_then, reasons_then, db_then = run(CASES[name], dynamic=True)
    assert saved_then == saved and reasons_then == reasons
    assert db_then == pytest.approx(db, abs=0.1) or min((*db.values(), *db_then.values())) > 60, (
        "FP32's own roundings"
    )
    assert min(db_then.values()) > 35


@pytest.mark.parametrize("name", ["batch norm by hand", "group norm"])
def test_generated_code_knows_the_sizes_of_the_views_between(name: str) -> None:
    """Sizes that the forward's views name, and that the backward takes for the deviation alone."""
    saved, _, db = run(CASES[name], dynamic=True, **{"debug.codegen": "inductor"})
    assert saved == ["int8 1x128 (standardised)"] and min(db.values()) > 35


@pytest.mark.parametrize("name", ["a gain before RMSNorm", "a table made of constants"])
def test_what_is_scaled_before_a_norm_stays_exact(name: str) -> None:
    saved, reasons, _ = run(CASES[name], dynamic=True)
    assert not saved and NORMALISED in reasons
