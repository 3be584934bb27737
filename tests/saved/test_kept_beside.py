"""What is kept beside codes: reported bytes are those of the storages behind the autograd graph, and none is kept in vain."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.report import Report
from fp8compile.saved.about import ABOUT_MEAN, OF_SIZE
from fp8compile.saved.plan import plan_saved
from tests.support.graphs import split_of
from tests.support.measure import compiled, kept_bytes

OPTIONS = {"linears": "off", "saved.min_numel": 0}
CODES = 256 * 128 * (1 + 2 / 128)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda h: F.layer_norm(h, (128,)),
    "batch": lambda h: F.batch_norm(h, None, None, training=True),
    "instance": lambda h: F.instance_norm(h.unsqueeze(1)).squeeze(1),
    "rms": lambda h: F.rms_norm(h, (128,)),
    "mean that nothing else reads": lambda h: h - h.mean(0) + F.gelu(h),
    "mean for two values": lambda h: torch.cat([h - h.mean(0) + F.gelu(h), F.gelu(h.view(-1, 64)).view(-1, 128)]),
    "sizes made again": lambda h: F.normalize(h.view(-1, 16, 8), dim=-1).flatten(1),
}


class Behind(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(64, 128), nn.Linear(128, 64), FUNCTIONS[name]
        self.b.requires_grad_(not name.startswith("mean"))  # else its gradient makes what it reads again, of the mean

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


@functools.cache
def measured(name: str) -> tuple[Report, int]:
    """The report of a model, and the bytes that it keeps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Behind(name)
    fn = compiled(model, **OPTIONS)
    kept = kept_bytes(model, fn, (torch.randn(256, 64),))
    return fp8compile.report(fn), kept


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reported_bytes_are_those_that_are_kept(name: str) -> None:
    report, kept = measured(name)
    assert report.saved
    assert sum(s.bytes_after for s in report.saved) + sum(s.info.nbytes for s in report.skips) == kept
    assert report.saved_bytes == kept
    torch._dynamo.reset()
    split = split_of(Behind(name), torch.randn(256, 64), disabled="encode_saved", **OPTIONS)
    predicted = plan_saved(split, Context(Recipe(**OPTIONS))).nbytes  # type: ignore[arg-type]
    assert sum(predicted.values()) == sum(s.bytes_after for s in report.saved)


def saved(name: str) -> list[tuple[str, int]]:
    report, _ = measured(name)
    return [(s.codec, s.bytes_after) for s in report.saved]


def test_a_mean_that_only_codes_need_is_counted_with_them() -> None:
    [(codec, nbytes)] = saved("mean that nothing else reads")
    assert ABOUT_MEAN in codec and nbytes == CODES + 128 * 4


def test_a_size_that_the_backward_makes_again_is_not_kept_beside_what_it_is_made_of() -> None:
    """A quarter of all bytes: 16 heads of 8 channels, whose sizes are clamped."""
    [(codec, nbytes)] = saved("sizes made again")
    assert OF_SIZE in codec and nbytes == CODES


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_is_made_again_reads_exact_values(codegen: str) -> None:
    torch._dynamo.reset()
    model, x = Behind("sizes made again"), torch.randn(256, 64)
    gradients = []
    for fn in (model, compiled(model, **OPTIONS, **{"debug.codegen": codegen})):
        model.zero_grad()
        fn(x).square().mean().backward()
        gradients.append(model.a.weight.grad)
    exact, found = gradients
    assert exact is not None and found is not None and (exact - found).norm() < 0.02 * exact.norm()
