"""Whole models from transformers: the report tells the truth, bytes fall, gradients stay sane, losses fall.

The full sweep, timm included, is ``benchmarks/bench_models.py``; here its smallest models run, codegen eager.
"""

import functools
import math

import pytest
import torch

from benchmarks.bench_models import (
    Way,
    agree,
    build,
    kept_storages,
    measure,
    quality,
    reference_gradients,
    train,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.models import TRANSFORMERS

pytest.importorskip("transformers")
torch.set_num_threads(1)

NAMES = ("bert", "t5", "vit")
STEPS = 3
LARGEST_SHARE = 0.6  # of plain Inductor's bytes
INT8_NOISE = 16.0  # dB that INT8 storage may lose on the worst gradient of a model
INT8_MEDIAN = 25.0  # dB that half of the gradients reach

by_model = pytest.mark.parametrize("name", NAMES)


@functools.cache
def case_of(name):
    """The model after a few steps of training, so that no gradient is zero by construction."""
    case = TRANSFORMERS[name](0, tiny=True)
    warm_up(case, steps=5)
    return case


@functools.cache
def built(name, way):
    return build(case_of(name), Way(way, "eager"), "amp")


@functools.cache
def measured(name, way):
    return measure(case_of(name), built(name, way))


def total(kept):
    return sum(k.nbytes for k in kept)


@by_model
def test_report_is_what_autograd_keeps(name):
    ours, plain = measured(name, "int8"), measured(name, "plain")
    assert agree(ours.report.saved_bytes, total(ours.kept))
    assert agree(ours.report.saved_bytes_plain, total(plain.kept))


@by_model
def test_keeps_far_less_than_plain_inductor(name):
    assert total(measured(name, "int8").kept) <= LARGEST_SHARE * total(measured(name, "plain").kept)


@by_model
def test_forward_is_unchanged(name):
    assert measured(name, "int8").loss == measured(name, "plain").loss


@by_model
def test_gradients_stay_near_those_of_16_bit(name):
    reference = reference_gradients(case_of(name))
    skipped = zero_up_to_rounding(reference)
    assert len(skipped) < len(reference) / 4
    ours = quality(reference, measured(name, "int8").gradients, skipped)
    plain = quality(reference, measured(name, "plain").gradients, skipped)
    loss = {p: plain.by_parameter[p] - ours.by_parameter[p] for p in ours.by_parameter}
    assert ours.summary()["median_db"] > INT8_MEDIAN
    assert max(loss.values()) < INT8_NOISE, max(loss, key=loss.get)


@by_model
def test_trains(name):
    losses = train(case_of(name), built(name, "int8"), STEPS, seed=0)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def test_measuring_counts_each_storage_once_and_no_parameter():
    case = case_of("vit")
    batch = case.batch(0)
    weight = next(p for p in case.model.parameters() if p.dim() == 2)
    base = torch.randn(64, weight.shape[1], requires_grad=True) * 1  # one storage, kept twice
    kept = kept_storages(case.model, lambda: (base @ weight.t(), base.view(-1).square(), base.sin()), batch)
    assert [k.nbytes for k in kept] == [base.numel() * 4]
