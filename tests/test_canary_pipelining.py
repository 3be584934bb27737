"""Canaries of torch.distributed.pipelining's stages: what schedules call on them, and which buffers they compute with.

``fp8compile/extras/links/pipelining.py`` puts codes in there. The methods have no underscore, and are on no page of torch's.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from fp8compile.extras.links.pipelining import COMPUTES, SENDS_AND_RECEIVES
from tests.support.linked import MICRO, SCHEDULES, called
from tests.support.ranks import on_ranks

PLACE = {"fwd_recv": 0, "forward": 1, "fwd_send": 2, "bwd_recv": 3, "backward": 4, "bwd_send": 5}  # of a micro-batch
OLD_V = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 does not connect a V of gloo's ranks, coded or not"
)


@pytest.mark.parametrize("name", [*SENDS_AND_RECEIVES, *COMPUTES])
def test_a_stage_has_these_methods_and_they_begin_with_a_micro_batch(name: str) -> None:
    first, chunk, *_ = inspect.signature(getattr(PipelineStage, name)).parameters
    assert first == "self" and chunk in ("fwd_chunk_id", "bwd_chunk_id")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=OLD_V) if name == "ZBV" else name for name in SCHEDULES]
)
def test_schedules_ask_once_for_each_message_before_it_is_sent_and_before_it_is_used(schedule: str) -> None:
    """Each by its number alone, in the order of ``PLACE``. A stage that another of its rank hands tensors to is not asked."""
    for stages in on_ranks(2, called, schedule):
        for calls in stages:
            for chunk in range(MICRO):
                names = [name for name, each in calls if each == chunk]
                places = [PLACE[name] for name in names]
                assert places == sorted(places) and len(set(places)) == len(places), names
                assert {"forward", "backward"} <= set(names)


def test_a_stage_computes_with_the_buffers_of_its_operations_and_sends_its_output_and_gradient() -> None:
    """Buffers filled with ones before the stage computes are its input and its gradient."""
    [first, last] = on_ranks(2, called, "GPipe", True)
    assert last[0] == [["input is ones", True]] * MICRO and first[0] == [["gradient is ones", True]] * MICRO
