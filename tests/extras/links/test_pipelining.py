"""Pipelines on two and three ranks whose links are coded: bytes, agreement, gradients beside plain links, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.numerics.wire_codes import WireCode
from tests.support.linked import (
    LENGTH,
    MICRO,
    ROWS,
    SAMPLES,
    SCHEDULES,
    WIDTH,
    in_one_process,
    one_step,
    traced,
    trained,
    with_a_state,
)
from tests.support.ranks import on_ranks
from tests.support.reference import sqnr_db

NUMEL = LENGTH * WIDTH  # of a sample
STEPS_2 = 1 + SAMPLES // ROWS  # of two epochs, see ``epochs_of``
ONE_STAGE = ("GPipe", "1F1B")
OLD_V = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 does not connect a V of gloo's ranks, coded or not"
)
every_schedule = pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=OLD_V) if name == "ZBV" else name for name in SCHEDULES]
)


def gradients_of(found: list[dict[str, Any]]) -> list[Tensor]:
    return [torch.tensor(g) for each in found for g in each["gradients"]]


@every_schedule
def test_both_ends_of_each_link_remember_the_same_bits(schedule: str) -> None:
    """Checked by each message's checksum too. Every end remembers every sample; a stage in the middle has two ends."""
    found = on_ranks(2, trained, schedule, {"bits": 2, "check": True})
    ours, theirs = (each["states"] for each in found)
    if schedule == "ZBV":  # stages 0 and 3 here, 1 and 2 there; from 1 to 2 nothing is sent
        pairs = [(ours[0], theirs[0]), (theirs[1], ours[1])]
    else:
        pairs = [(ours[0], theirs[0])] + ([(theirs[0], ours[1]), (ours[1], theirs[1])] if len(ours) > 1 else [])
    for sender, receiver in pairs:
        assert sender["outgoing"] == receiver["incoming"] and len(sender["outgoing"][0]["ids"]) == SAMPLES
    ends = 2 * len(pairs)
    assert sum(sum(each["nbytes"]) for each in found) == ends * SAMPLES * NUMEL * 2


@pytest.mark.parametrize("schedule", ONE_STAGE)
@pytest.mark.parametrize("changes", [True, False])
def test_bytes_on_the_wire_are_those_of_the_codes(schedule: str, changes: bool) -> None:
    """What schedules are given to send, counted apart from the links' own count. Three steps: each of 16 samples for the
    first time, 8 of them for the second; four micro-batches of two samples each, whose new and known ones are coded apart."""
    found = on_ranks(2, trained, schedule, {"bits": 3, "backward_bits": 6, "changes": changes, "first": 8})
    plain = STEPS_2 * ROWS * NUMEL * 4
    [forward, backward] = [found[0]["wire"][0]["get_fwd_send_ops"], found[1]["wire"][0]["get_bwd_send_ops"]]
    assert found[0]["traffic"] == [(forward, plain, 0, 0)] and found[1]["traffic"] == [(0, 0, backward, plain)]
    assert backward == STEPS_2 * MICRO * WireCode(6).nbytes((2, LENGTH, WIDTH), torch.float32)
    if changes:
        least = SAMPLES * NUMEL * 8 // 8 + ROWS * NUMEL * 3 // 8
        groups = (SAMPLES + ROWS) * 2  # a sample has one group and a part
        assert least < forward < least + groups * (4 + 128 * 3 // 8)
    else:
        assert forward == STEPS_2 * MICRO * WireCode(3).nbytes((2, LENGTH, WIDTH), torch.float32)


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_gradients_beside_the_plain_pipelines(schedule: str) -> None:
    """Of 128 normal numbers the range is 5.2 deviations, so codes have 20 log10(sqrt(12) (2**bits - 1) / 5.2) dB: 44 in 8
    bits, 20 in 4. The first stage's gradients have that of the bits they were sent in, the last stage's of what it received.
    """
    plain, found = on_ranks(2, trained, schedule, None, 3), {}
    for bits, backward_bits, changes in ((4, 8, True), (4, 4, True), (4, 8, False)):
        settings = {"bits": bits, "backward_bits": backward_bits, "changes": changes}
        coded = on_ranks(2, trained, schedule, settings, 3)
        db = [sqnr_db(*pair) for pair in zip(gradients_of(plain), gradients_of(coded), strict=True)]
        found[backward_bits, changes] = min(db[:2]), min(db[2:])  # one linear; one, and a head
    assert found[8, True][0] > 44 - 3 and abs(found[4, True][0] - 20) < 3
    assert found[4, True][1] > 50 and abs(found[8, False][1] - 20) < 3, "changes at the same bits as activations"


@pytest.mark.parametrize("schedule", ONE_STAGE)
@pytest.mark.parametrize("settings", [{"bits": 2, "backward_bits": 4}, {"bits": 4, "changes": False}], ids=str)
def test_two_ranks_are_what_both_ends_in_one_process_are_bit_for_bit(schedule: str, settings: dict[str, Any]) -> None:
    """So the study of ``benchmarks/studies/bench_links.py``, which runs in one process, says what ranks would do."""
    found = on_ranks(2, trained, schedule, settings, 3)
    weights, losses = in_one_process(settings, 3)
    assert [w for each in found for w in each["weights"]] == weights
    assert found[1]["losses"] == losses


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_after_some_epochs_weights_are_nearer_to_the_plain_pipelines_than_with_direct_codes(bits: int) -> None:
    """At the same bits, at several rates of learning, and so at several sizes of change; gradients as they are."""
    for rate in (0.02, 0.05, 0.1):
        plain, changes, direct = (
            torch.cat([torch.tensor(w).flatten() for w in in_one_process(settings, 5, rate)[0]])
            for settings in (
                None,
                {"bits": bits, "backward_bits": None},
                {"bits": bits, "backward_bits": None, "changes": False},
            )
        )
        assert float((changes - plain).norm()) < float((direct - plain).norm()) / 20


def test_a_mask_goes_along_as_it_is_and_bf16_stays_bf16() -> None:
    masked = torch.__version__ >= "2.12"  # torch 2.11 wants gradients of integers, coded or not
    plain = on_ranks(2, trained, "GPipe", None, 2, 0.05, "bfloat16", masked)
    coded = on_ranks(2, trained, "GPipe", {"bits": 4, "check": True}, 2, 0.05, "bfloat16", masked)
    assert coded[1]["losses"][:MICRO] == plain[1]["losses"][:MICRO], "first visits are in BF16"
    assert coded[1]["losses"] != plain[1]["losses"]
    mask = STEPS_2 * ROWS * LENGTH * 8 * masked
    [sent, whole, *_] = coded[0]["traffic"][0]
    assert (
        coded[0]["wire"][0]["get_fwd_send_ops"] - mask
        == sent
        < whole
        == plain[0]["wire"][0]["get_fwd_send_ops"] - mask
    )


def test_compiled_stages_send_as_many_bytes_and_both_ends_agree() -> None:
    settings = {"bits": 4, "check": True}
    plain, coded = (
        on_ranks(2, trained, "1F1B", settings, 2, 0.05, "float32", False, compiled) for compiled in (False, True)
    )
    assert [each["traffic"] for each in plain] == [each["traffic"] for each in coded]
    assert coded[0]["states"][0]["outgoing"] == coded[1]["states"][0]["incoming"] != plain[0]["states"][0]["outgoing"]
    assert coded[1]["losses"][:MICRO] == pytest.approx(plain[1]["losses"][:MICRO], rel=2.0**-16), "first visits"


def test_stages_that_torch_cuts_by_tracing_are_coded_too() -> None:
    """A first visit as it is gives the plain losses; later ones differ."""
    plain, coded = (on_ranks(2, traced, settings) for settings in (None, {"bits": 4, "first": None, "check": True}))
    assert coded[1]["losses"][0] == plain[1]["losses"][0] and coded[1]["losses"][1] != plain[1]["losses"][1]
    assert coded[0]["states"][0]["outgoing"] == coded[1]["states"][0]["incoming"] != []


def test_three_ranks_and_a_stage_in_the_middle() -> None:
    found = on_ranks(3, trained, "1F1B", {"bits": 4, "check": True})
    assert [each["nbytes"][0] for each in found] == [ends * SAMPLES * NUMEL * 2 for ends in (1, 2, 1)]
    assert found[0]["states"][0]["outgoing"] == found[1]["states"][0]["incoming"]
    assert found[1]["states"][0]["outgoing"] == found[2]["states"][0]["incoming"]


def test_a_saved_state_goes_on_bit_for_bit_and_evaluation_leaves_it_alone() -> None:
    [first, last] = on_ranks(2, with_a_state, "GPipe", {"bits": 3, "check": True})
    assert first["unchanged"] and last["unchanged"]
    assert last["went on"] == last["loaded"] and first["bytes"][0] == first["bytes"][1]


@pytest.mark.parametrize(("rank", "ids"), [(0, None), (1, None), (0, list(range(7))), (1, list(range(9)))])
def test_a_rank_without_the_ids_of_its_batch_says_so(rank: int, ids: list[int] | None) -> None:
    with pytest.raises(AssertionError, match=r"samples\(ids\)"):
        on_ranks(2, one_step, "GPipe", rank, ids)


def test_ranks_with_other_ids_are_found_by_the_checksum() -> None:
    with pytest.raises(AssertionError, match="remember different things"):
        on_ranks(2, one_step, "GPipe", 1, list(range(ROWS))[::-1])
