"""Explaining a model on the meta device: what a real copy of it would get, without its memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.reporting.report import Report
from tests.support.measure import LlamaLayer


class Model(nn.Module):
    """An embedding tied to the head around a layer with attention, of which q is frozen; a buffer that scales."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.layer = LlamaLayer(128, 256, 4, 2)
        self.layer.q.requires_grad_(False)
        self.head = nn.Linear(128, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(ids), cos, sin)) * self.scale
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def arguments() -> tuple[Tensor, ...]:
    return torch.zeros(4, 64, dtype=torch.long), *(torch.ones(64, 32) for _ in range(2))


@functools.cache
def without_memory() -> tuple[nn.Module, Report]:
    """The model on the meta device, and what is told of it."""
    with torch.device("meta"):
        model, inputs = Model(), arguments()
    return model, fp8compile.explain(model, inputs)


def test_the_report_is_that_of_a_model_with_memory() -> None:
    real = fp8compile.explain(Model(), arguments())
    model, report = without_memory()
    assert str(report) == str(real)
    assert str(report.fits(24)) == str(real.fits(24))
    assert report.saved_bytes == real.saved_bytes < report.saved_bytes_plain
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_tied_weight_is_counted_once() -> None:
    model, report = without_memory()
    fit = report.fits()
    assert fit.weights == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_model_larger_than_any_machine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**19, 2**19, bias=False), nn.GELU())
    fit = fp8compile.explain(model, torch.empty(16, 2**19, device="meta")).fits(80)
    assert not fit
    assert fit.weights == 2**40


def test_arguments_with_memory_are_taken_too() -> None:
    with torch.device("meta"):
        model = Model()
    assert fp8compile.explain(model, arguments()).graphs


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_partly_on_the_meta_device(which: str) -> None:
    model: Any = nn.Linear(16, 16)
    setattr(model, which, nn.Parameter(getattr(model, which).to("meta")))
    with pytest.raises(
        ValueError, match=rf"parameter {which} is on the meta device and \w+ is not: put all of them there"
    ):
        fp8compile.explain(model, torch.ones(4, 16))
