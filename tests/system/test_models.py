"""Whole models from transformers: the report tells the truth, bytes fall, gradients stay sane, training goes on.

The full sweep, timm included, is ``benchmarks/studies/bench_models.py``; here its smallest models run without a C++ compiler.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from benchmarks.harness.batches import digits
from benchmarks.studies.measuring import (
    Measured,
    Quality,
    Way,
    build,
    kept_storages,
    measure,
    quality,
    reference_gradients,
    train,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.studies.models import TRANSFORMERS, Case
from benchmarks.studies.rows import agree

pytest.importorskip("transformers")
torch.set_num_threads(1)

NAMES = ("bert", "t5", "vit")
STEPS = 3
LARGEST_SHARE = 0.6  # of plain Inductor's bytes
LARGEST_GAP = 0.01  # of the loss, relative
WORST_SQNR = 5.0  # dB: even the noisiest gradient is mostly signal
MEDIAN_SQNR = 25.0


@dataclass(frozen=True)
class Tried:
    """A model, plain and with INT8 storage: what one forward keeps, the gradients, and the losses of a few steps."""

    case: Case
    plain: Measured
    ours: Measured
    plain_losses: list[float]
    our_losses: list[float]


@pytest.fixture(scope="module", params=NAMES)
def tried(request):
    case = TRANSFORMERS[request.param](0, tiny=True)
    warm_up(case, steps=5)  # no gradient is zero by construction afterwards
    measured, losses = [], []
    for way in ("plain", "int8"):
        built = build(case, Way(way, "eager"), "amp")
        measured.append(measure(case, built))
        losses.append(train(case, built, STEPS, seed=0))
    return Tried(case, *measured, *losses)


def total(kept):
    return sum(k.nbytes for k in kept)


def test_report_is_what_autograd_keeps(tried):
    report = tried.ours.report
    assert agree(report.saved_bytes, total(tried.ours.kept))
    assert agree(report.saved_bytes_plain, total(tried.plain.kept))


def test_keeps_far_less_than_plain_inductor(tried):
    assert total(tried.ours.kept) <= LARGEST_SHARE * total(tried.plain.kept)


def test_forward_is_unchanged(tried):
    assert tried.ours.loss == tried.plain.loss


def test_gradients_stay_near_float64(tried):
    reference = reference_gradients(tried.case)
    skipped = zero_up_to_rounding(reference)
    assert len(skipped) < len(reference) / 4
    ours = quality(reference, tried.ours.gradients, skipped)
    assert ours.by_parameter[ours.worst] > WORST_SQNR, ours.worst
    assert ours.summary()["median_db"] > MEDIAN_SQNR


def test_trains_like_plain_inductor(tried):
    assert all(math.isfinite(loss) for loss in tried.our_losses)
    assert tried.our_losses[-1] == pytest.approx(tried.plain_losses[-1], rel=LARGEST_GAP)


def test_measuring_counts_each_storage_once_and_no_parameter_or_input():
    linear = torch.nn.Linear(16, 16)
    batch = digits(0, rows=2, size=8)

    def run():
        hidden = torch.randn(4, 16) * linear.weight[0]  # keeps the random factor
        return hidden.square(), hidden.view(-1).square(), batch.args[0] * linear.weight.sum()

    assert [k.nbytes for k in kept_storages(linear, run, batch)] == [4 * 16 * 4] * 2  # the factor, and hidden once


def test_quality_names_the_worst():
    found = Quality({"a": 30.0, "b": 10.0, "c": 20.0})
    assert (found.worst, found.summary()["median_db"]) == ("b", 20.0)
    assert quality({"a": torch.ones(4)}, {"a": torch.ones(4)}, ()).by_parameter == {"a": math.inf}
    tenth = quality({"a": torch.ones(4)}, {"a": torch.full((4,), 0.9)}, ())
    assert tenth.by_parameter["a"] == pytest.approx(20.0, abs=1e-3)
