"""copy_overwritten: golden, contract, numbers against eager, and upstream's fault that it mends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fp8compile._version import release_of
from fp8compile.passes.copy_overwritten import copy_overwritten
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Notes
from tests.support.graphs import forward_of, split_of
from tests.support.reference import sqnr_db

Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]


class ChangedInput(nn.Module):
    """Normalises its argument in place, as a data loader's transform would."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x.mul_(3).add_(1))))


class Codebook(nn.Module):
    """Reads a buffer, then overwrites it, as a VQ-VAE does with its codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Linear(64, 32), nn.Linear(32, 64)
        self.register_buffer("codes", torch.randn(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        z = self.e(x)
        q = self.codes[torch.cdist(z, self.codes).argmin(1)]
        with torch.no_grad():
            self.codes.copy_(self.codes * 0.5 + z.mean(0) * 0.5)
        return self.d(F.gelu(z + (q - z).detach()))


class RunningScale(nn.Module):
    """Multiplies by the root of a running statistic that it then updates: the backward needs the one that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x) * self.scale.sqrt())  # eager saves the root; a cut may recompute it
        self.scale.mul_(0.9).add_(y.detach().abs().mean(0))
        return y


class ThroughAView(nn.Module):
    """Overwrites part of its argument through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        left = x[:, :32]
        y = self.a(left * left)
        left.zero_()
        return y


class RunningCovariance(nn.Module):
    """Divides by the roots of the diagonal of a covariance that it then updates."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.register_buffer("covariance", 2 * torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = torch.tanh(h * self.covariance.diagonal().rsqrt())
        d = h.detach()
        self.covariance.mul_(0.5).add_(d.t() @ d / len(d), alpha=0.5)
        return y


class RunningWindows(nn.Module):
    """Multiplies by the roots of windows of a buffer that it then updates."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.register_buffer("seen", torch.ones(67))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = torch.tanh(h.unsqueeze(-1) * self.seen.unfold(0, 4, 1).sqrt()).sum(-1)
        self.seen[:64].mul_(0.5).add_(h.detach().mean(0))
        return y


KINDS = (ChangedInput, Codebook, RunningScale, ThroughAView, RunningCovariance, RunningWindows)
CASES: dict[str, type[nn.Module]] = {c.__name__: c for c in KINDS}


def gradients(kind: type[nn.Module], **how: Any) -> tuple[dict[str, Tensor], Tensor, nn.Module]:
    """Of each parameter, the argument as it is afterwards, and the model."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 64)
    torch._dynamo.reset()
    fn = torch.compile(model, **how) if how else model
    fn(x).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, x, model


def worst(kind: type[nn.Module], **how: Any) -> float:
    reference, found = gradients(kind)[0], gradients(kind, **how)[0]
    return min(sqnr_db(g, found[name]) for name, g in reference.items())


def test_golden_the_copy_is_kept() -> None:
    split = split_of(RunningScale(), torch.randn(64, 64), disabled="encode_saved")
    assert_expected_inline(
        forward_of(split),
        """\
primals_1: float32[64, 64]
primals_2: float32[64]
primals_3: float32[64, 64]
primals_4: float32[64]
clone: float32[64] = as_read(primals_4)
permute: float32[64, 64] = permute(primals_1)
addmm: float32[64, 64] = addmm(primals_2, primals_3, permute)
sqrt: float32[64] = sqrt(primals_4)
mul: float32[64, 64] = mul(addmm, sqrt)
tanh: float32[64, 64] = tanh(mul)
mul_1: float32[64] = mul(primals_4, 0.9)
abs_1: float32[64, 64] = abs(tanh)
mean: float32[64] = mean.dim(abs_1)
add: float32[64] = add(mul_1, mean)
copy_: float32[64] = copy_(primals_4, add)
return tanh, primals_3, clone, tanh
""",
    )


def test_what_is_not_overwritten_is_not_copied() -> None:
    class Plain(ChangedInput):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x.mul(3).add(1))))

    split = split_of(Plain(), torch.randn(64, 64))
    assert not split.overwritten
    assert not [n for n in split.fw.graph.nodes if n.target is torch.ops.aten.clone.default]


@pytest.mark.parametrize("name", CASES)
def test_no_kept_value_and_no_operand_of_a_recomputation_is_overwritten(name: str) -> None:
    split = split_of(CASES[name](), torch.randn(64, 64))
    assert split.overwritten
    assert not {e.forward for e in split.edges} & split.overwritten


def test_it_is_idempotent() -> None:
    split = split_of(Codebook(), torch.randn(64, 64), disabled="encode_saved")
    before = [e.forward for e in split.edges]
    assert copy_overwritten(split, Context(Recipe())) == Notes()
    assert [e.forward for e in split.edges] == before


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("preset", ["off", "default"])
def test_gradients_are_those_of_eager(name: str, codegen: str, preset: str) -> None:
    if (name, codegen) == ("Codebook", "inductor") and release_of(torch.__version__) <= (2, 11):
        pytest.skip("Inductor of torch 2.11 overwrites the codebook before it gathers from it, whatever the backend")
    options = {"debug.codegen": codegen, "preset": preset, **({"saved.min_numel": 0} if preset == "default" else {})}
    assert worst(CASES[name], backend="fp8compile", options=options) > (100 if preset == "off" else 30)


@pytest.mark.parametrize("name", CASES)
def test_what_is_overwritten_ends_up_as_in_eager(name: str) -> None:
    _, x, model = gradients(CASES[name])
    _, ours, twin = gradients(CASES[name], backend="fp8compile", options={"debug.codegen": "eager"})
    torch.testing.assert_close(ours, x)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(other, one)


def test_plain_inductor_takes_the_overwritten_value() -> None:
    """Upstream's fault (torch 2.13): once it is gone, SOUND may go too. With preset "off" we are right where it is wrong."""
    assert worst(RunningScale, backend="inductor") < 40
