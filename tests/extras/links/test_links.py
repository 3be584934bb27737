"""Ends of links in one process: what a message holds, that both ends agree, what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.extras.links.link_ends import CHECK_BYTES, ChangesEnd, DirectEnd
from fp8compile.extras.links.links import Links
from fp8compile.extras.links.pipelining import COMPUTES, SENDS_AND_RECEIVES, compress_links
from fp8compile.numerics.wire_codes import WireCode
from tests.support.reference import sqnr_db

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (5, 24)


def ends(bits: int = 4, first: int | None = 16, check: bool = True) -> tuple[ChangesEnd, ChangesEnd]:
    made = [ChangesEnd(WireCode(bits), WireCode(first), check) for _ in range(2)]
    return made[0], made[1]


def activation(ids: list[int], epoch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of each sample its own, and a little of the epoch's."""
    found = []
    for each in ids:
        random = torch.Generator().manual_seed(each)
        now = torch.Generator().manual_seed(1000 * epoch + each)
        found.append(torch.randn(SHAPE, generator=random) + 0.05 * epoch * torch.randn(SHAPE, generator=now))
    return torch.stack(found).to(dtype)


def sent(sender: ChangesEnd, receiver: ChangesEnd, x: Tensor, ids: list[int] | None) -> Tensor:
    like = torch.empty_like(x)
    told = receiver.nbytes(like, ids)
    wire = sender.encode(x, ids)
    assert len(wire) == told
    return receiver.decode(wire, like, ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [6, 8, 16, None])
def test_both_ends_remember_the_same_of_any_mixture_of_new_and_known_samples(
    dtype: torch.dtype, first: int | None
) -> None:
    sender, receiver = ends(first=first)
    for epoch, ids in enumerate([[1, 2, 3], [3, 9, 1, 8], [2], [8, 3, 2, 1, 9], [10, 1]]):
        x = activation(ids, epoch, dtype)
        received = sent(sender, receiver, x, ids)
        assert received.dtype == dtype and sqnr_db(x, received) > 30
        ours, theirs = (end.kept.state_dict() for end in (sender, receiver))
        assert torch.equal(ours["ids"], theirs["ids"]) and torch.equal(ours["messages"], theirs["messages"])
    assert sender.kept.nbytes == 6 * math.prod(SHAPE) * 2


def test_a_message_holds_first_visits_then_changes() -> None:
    sender, receiver = ends(bits=2, check=False)
    sent(sender, receiver, activation([1, 2], 0), [1, 2])
    numel = math.prod(SHAPE)
    wire = sender.encode(activation([5, 1, 6, 2], 1), [5, 1, 6, 2])
    assert len(wire) == 2 * numel * 2 + WireCode(2).nbytes((2, *SHAPE), torch.float32)
    whole = activation([5, 6], 1).bfloat16()
    assert torch.equal(wire[: 4 * numel].clone().view(torch.bfloat16), whole.flatten())


def test_a_first_visit_is_received_as_it_was_sent_and_not_as_it_is_kept() -> None:
    x = activation([1, 2], 1)
    exact, kept = ends(first=None)
    assert torch.equal(sent(exact, kept, x, [1, 2]), x)
    assert torch.equal(kept.kept.read([1, 2], x.device), x.bfloat16())


def test_samples_that_do_not_come_again_are_not_remembered() -> None:
    sender, receiver = ends()
    x = activation([1, 2], 0)
    assert torch.equal(sent(sender, receiver, x, None), x.bfloat16().float())
    assert len(sender.kept) == len(receiver.kept) == 0


def test_changes_are_received_better_than_activations_at_the_same_bits() -> None:
    sender, receiver = ends(3)
    direct = DirectEnd(WireCode(3))
    ids = [4, 5, 6]
    sent(sender, receiver, activation(ids, 0), ids)
    x = activation(ids, 1)
    assert (
        sqnr_db(x, sent(sender, receiver, x, ids)) > sqnr_db(x, direct.decode(direct.encode(x, None), x, None)) + 20
    )


@pytest.mark.parametrize("how", ["order", "lost", "bit"])
def test_a_checksum_tells_ends_apart_that_remember_different_things(how: str) -> None:
    sender, receiver = ends()
    sent(sender, receiver, activation([1, 2], 0), [1, 2])
    wire = sender.encode(activation([1, 2], 1), [1, 2])
    if how == "lost":
        receiver.kept.write([2], receiver.kept.read([1], wire.device))
    if how == "bit":
        wire[-CHECK_BYTES - 1] ^= 1
    with pytest.raises(RuntimeError, match="remember different things"):
        receiver.decode(wire, activation([1, 2], 1), [2, 1] if how == "order" else [1, 2])


def test_a_shape_that_changes_is_refused_on_both_ends_before_anything_is_sent() -> None:
    sender, receiver = ends()
    sent(sender, receiver, activation([1], 0), [1])
    longer = torch.zeros(1, 6, 24)
    for end in (lambda: sender.encode(longer, [2]), lambda: receiver.nbytes(longer, [2])):
        with pytest.raises(ValueError, match="changes=False"):
            end()
    assert len(sent(sender, receiver, longer, None)) == 1, "what is not remembered may have any shape"


# ---------------------------------------------------------------------------------------------- a stage that is none


class Stage:
    """Hands out operations and notes which buffer it computes with."""

    num_stages, chunks = 2, 2

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_fwd_send_ops(self, chunk: int) -> list[Any]:
        return [SimpleNamespace(tensor=self.tensor)]

    def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
        return [SimpleNamespace(tensor=self.tensor)]

    get_bwd_send_ops = get_bwd_recv_ops = get_fwd_recv_ops

    def forward_one_chunk(self, chunk: int) -> Tensor:
        return self.tensor

    backward_one_chunk = forward_one_chunk


def tied(tensor: Tensor | None = None, **settings: Any) -> tuple[Stage, Links]:
    stage = Stage(activation([1, 2], 0) if tensor is None else tensor)
    return stage, compress_links(stage, **settings)


def test_ids_of_a_micro_batch_are_its_part_of_the_batch() -> None:
    """Two rows in each of two micro-batches; the second one's are the second half."""
    stage, links = tied()
    links.samples(torch.tensor([7, 3, 9, 4]))
    for chunk in (1, 0):
        stage.get_fwd_send_ops(chunk)
    assert links.state_dict()["outgoing"][0]["ids"].tolist() == [9, 4, 7, 3]


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1]])
def test_ids_of_a_wrong_number_are_refused(ids: list[int]) -> None:
    stage, links = tied()
    links.samples(ids)
    with pytest.raises(ValueError, match=f"were {len(ids)} ids, and each micro-batch has 2 rows"):
        stage.get_fwd_send_ops(0)


def test_an_activation_without_rows_is_refused() -> None:
    stage, links = tied(torch.tensor(1.0))
    links.samples([1, 2])
    with pytest.raises(ValueError, match=r"has 0 rows.*changes=False"):
        stage.get_fwd_send_ops(0)
    tied(torch.tensor(1.0), changes=False)[0].get_fwd_send_ops(0)


@pytest.mark.parametrize("name", ["get_fwd_send_ops", "get_fwd_recv_ops"])
def test_a_step_without_its_own_ids_is_refused(name: str) -> None:
    stage, links = tied()
    with pytest.raises(ValueError, match="before each step"):
        getattr(stage, name)(0)
    links.samples([1, 2, 3, 4])
    getattr(stage, name)(0)
    with pytest.raises(ValueError, match="before each step"):
        getattr(stage, name)(0)
    links.samples(None)
    getattr(stage, name)(0)
    getattr(stage, name)(0)


def test_direct_links_ask_for_no_ids() -> None:
    stage, links = tied(changes=False)
    stage.get_fwd_send_ops(0)
    links.samples([1])
    stage.get_fwd_send_ops(0)
    assert (
        links.state_dict() == {}
        and links.nbytes == 0
        and links.forward.sent == 2 * WireCode(4).nbytes((2, *SHAPE), torch.float32)
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 1, 4], "1 is there twice"),
        ([1.0, 2.0], "integers"),
        ([True, False], "integers"),
        ([2**63], "64 bits"),
        ("ab", "integers"),
        (7, "integers"),
        (torch.tensor([[1, 2]]), "1-d"),
        (torch.tensor([1.0, 2.0]), "integers"),
    ],
)
def test_what_are_no_ids_is_refused(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tied()[1].samples(ids)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_floats_that_links_do_not_code_are_refused(dtype: torch.dtype) -> None:
    stage, links = tied(torch.zeros(2, 4, dtype=dtype))
    links.samples([1, 2, 3, 4])
    for name in ("get_fwd_send_ops", "get_fwd_recv_ops"):
        with pytest.raises(ValueError, match="links code FP32, BF16 and FP16"):
            getattr(stage, name)(0)


def test_integers_travel_as_they_are() -> None:
    stage, links = tied(torch.arange(6))
    links.samples([1, 2, 3, 4])
    for name in SENDS_AND_RECEIVES:
        assert getattr(stage, name)(0)[0].tensor is stage.tensor
    assert links.forward.sent == links.backward.sent == 0


@pytest.mark.parametrize("bits", [2, 8, 16, None])
def test_gradients_are_coded_in_their_own_bits(bits: int | None) -> None:
    gradient = activation([1, 2], 0)
    stage, links = tied(gradient, backward_bits=bits)
    [op] = stage.get_bwd_send_ops(0)
    assert op.tensor.nbytes == WireCode(bits).nbytes((2, *SHAPE), torch.float32)
    assert (links.backward.sent, links.backward.plain) == (
        (0, 0) if bits is None else (op.tensor.nbytes, gradient.nbytes)
    )
    other, _ = tied(torch.full_like(gradient, math.nan), backward_bits=bits)
    [awaited] = other.get_bwd_recv_ops(0)
    awaited.tensor.copy_(op.tensor)
    other.backward_one_chunk(0)
    assert torch.equal(
        other.tensor, WireCode(bits).unpacked(WireCode(bits).packed(gradient), gradient.shape, *[torch.float32] * 2)
    )


def test_what_was_handed_over_on_one_rank_is_not_decoded() -> None:
    stage, _ = tied()
    before = stage.tensor.clone()
    assert torch.equal(stage.forward_one_chunk(0), before) and torch.equal(stage.backward_one_chunk(0), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 7}, "bits=7"),
        ({"bits": 16}, "bits=16"),
        ({"bits": True}, "bits=True"),
        ({"bits": None}, "bits=None"),
        ({"backward_bits": 1}, "backward_bits=1"),
        ({"first": 1}, "first=1"),
        ({"changes": 1}, "changes=1"),
        ({"check": "yes"}, "check="),
        ({"check": True, "changes": False}, "remember nothing"),
        ({"group_size": 12}, "multiple of 8"),
        ({"group_size": 0}, "multiple of 8"),
    ],
)
def test_settings_that_are_none_are_refused_and_leave_the_stage_plain(settings: dict[str, Any], message: str) -> None:
    stage = Stage(torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        compress_links(stage, **settings)
    assert not vars(stage).keys() & {*SENDS_AND_RECEIVES, *COMPUTES}
    compress_links(stage)


def test_what_has_no_links_is_refused() -> None:
    alone = Stage(torch.zeros(2))
    alone.num_stages = 1
    with pytest.raises(ValueError, match="one stage has no link"):
        compress_links(alone)
    with pytest.raises(ValueError, match="not a Linear"):
        compress_links(nn.Linear(2, 2))
    stage, _ = tied()
    with pytest.raises(ValueError, match="already"):
        compress_links(stage)


def test_a_state_continues_a_link() -> None:
    stage, links = tied()
    links.samples([1, 2, 3, 4])
    stage.get_fwd_send_ops(0)
    other_stage, other = tied()
    other.load_state_dict(links.state_dict())
    assert other.nbytes == links.nbytes == 2 * 2 * math.prod(SHAPE)
    for each in (links, other):
        each.samples([2, 1, 5, 6])
    ours, theirs = stage.get_fwd_send_ops(0)[0].tensor, other_stage.get_fwd_send_ops(0)[0].tensor
    assert torch.equal(ours, theirs) and len(ours) == WireCode(4).nbytes((2, *SHAPE), torch.float32)


def test_a_state_of_other_links_is_refused() -> None:
    for changes, state in ((False, tied()[1].state_dict()), (True, {}), (True, {"outgoing": []})):
        with pytest.raises(ValueError, match="changes="):
            tied(changes=changes)[1].load_state_dict(state)


def test_a_state_that_is_refused_changes_nothing() -> None:
    stage, links = tied()
    links.samples([1, 2, 3, 4])
    stage.get_fwd_send_ops(0)
    state = links.state_dict()
    wrong = {"outgoing": [{}], "incoming": [{"ids": torch.tensor([1])}]}
    with pytest.raises(ValueError, match="as state_dict"):
        links.load_state_dict(wrong)
    assert str(links.state_dict()) == str(state)
