"""Bytes sent against collectives run chunk by chunk, and against sums over all GPUs."""

from __future__ import annotations

from collections import Counter

import pytest

from fp8compile.extras.planning.bytes import stages
from fp8compile.extras.planning.layout import Layout, StepShape
from fp8compile.extras.planning.models import KNOWN
from fp8compile.extras.planning.traffic import _of_stage, traffic

LLAMA_2_7B = KNOWN[0]


def sent_in_a_ring(gpus: int, chunk: int) -> list[int]:
    """Bytes that each GPU sends in an all-gather: every one passes on, until all have everything, what it got last."""
    have, sent = [{rank} for rank in range(gpus)], Counter[int]()
    for turn in range(gpus - 1):
        for rank in range(gpus):
            have[(rank + 1) % gpus].add((rank - turn) % gpus)
            sent[rank] += chunk
    assert all(len(each) == gpus for each in have)
    return [sent[rank] for rank in range(gpus)]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_fsdp_sends_three_times_the_weights_around_a_ring(gpus: int) -> None:
    found = traffic(LLAMA_2_7B, Layout(gpus, 1, 1), StepShape(4096, gpus))
    shard = 2 * LLAMA_2_7B.parameters // gpus
    assert abs(found.fsdp - 3 * sent_in_a_ring(gpus, shard)[0]) <= 3 * gpus
    assert found.tp == found.pp == 0


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_sends_what_megatron_lists(tp: int) -> None:
    """Of each collective, a ring of parts of the hidden states; the list is of figure 5 of the paper, layer by layer."""
    forward = ["gather q k v", "scatter o", "gather gate up", "scatter down"]
    backward = ["gather down", "scatter gate up", "gather o", "scatter q k v"]
    again = ["gather q k v's input", "gather gate's and up's input"]
    ends = [
        "scatter embedding",
        "gather its gradient",
        "gather head",
        "scatter its gradient",
        "gather its input again",
    ]
    count = len(forward + backward + again) * LLAMA_2_7B.layers + len(ends)
    part = 2 * 4096 * 4096 // tp
    found = traffic(LLAMA_2_7B, Layout(1, tp, 1), StepShape(4096, 1))
    assert found.tp == count * sent_in_a_ring(tp, part)[0]
    assert found.fsdp == found.pp == 0


@pytest.mark.parametrize(("pp", "tp", "micro_batches"), [(2, 1, 1), (4, 1, 8), (8, 2, 16)])
def test_a_pipeline_sends_every_boundary_both_ways(pp: int, tp: int, micro_batches: int) -> None:
    layout, step = Layout(1, tp, pp), StepShape(4096, micro_batches)
    all_gpus = tp * sum(_of_stage(LLAMA_2_7B, stage, layout, step).pp for stage in stages(LLAMA_2_7B, pp))
    assert all_gpus == 2 * (pp - 1) * micro_batches * 2 * 4096 * 4096


def test_accumulation_gathers_anew_and_a_pipeline_does_not() -> None:
    once, four = (traffic(LLAMA_2_7B, Layout(8, 1, 1), StepShape(4096, 32, size)).fsdp for size in (4, 1))
    assert four == pytest.approx(4 * once)
    few, many = (traffic(LLAMA_2_7B, Layout(8, 1, 2), StepShape(4096, batch)).fsdp for batch in (32, 64))
    assert few == many
