"""What an end of a link remembers of samples: rows in slabs, their bytes, states, and shapes that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8compile.extras.links import sample_messages
from fp8compile.extras.links.sample_messages import SampleMessages

CPU = torch.device("cpu")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> SampleMessages:
    """Rows of three elements, four to a slab."""
    monkeypatch.setattr(sample_messages, "SLAB_BYTES", 4 * 6)
    return SampleMessages()


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor([[n, n + 0.25, n + 0.5] for n in numbers]).bfloat16()


def test_rows_come_back_in_the_order_asked_for_across_slabs(kept: SampleMessages) -> None:
    ids = [50, -3, 7, 2**62, 9, 0]
    kept.write(ids[:4], rows(1, 2, 3, 4))
    kept.write(ids[4:], rows(5, 6))
    kept.write([7, 0], rows(33, 66))
    assert torch.equal(kept.read([0, 50, 7, 9], CPU), rows(66, 1, 33, 5))
    assert len(kept) == 6 and kept.nbytes == 6 * 3 * 2


def test_new_and_known_samples_are_told_apart(kept: SampleMessages) -> None:
    assert kept.parts([4, 5]) == ([0, 1], [])
    kept.write([5], rows(1))
    assert kept.parts([4, 5, 6]) == ([0, 2], [1])


def test_a_row_is_a_copy(kept: SampleMessages) -> None:
    given = rows(1)
    kept.write([1], given)
    given.zero_()
    kept.read([1], CPU).zero_()
    kept.state_dict()["messages"].zero_()
    assert torch.equal(kept.read([1], CPU), rows(1))


def test_another_shape_or_dtype_is_refused(kept: SampleMessages) -> None:
    kept.check((9, 9), torch.float16)
    kept.write([1], rows(1))
    kept.check((3,), torch.float32)
    for shape, dtype in (((4,), torch.float32), ((3, 1), torch.bfloat16), ((3,), torch.float16)):
        with pytest.raises(ValueError, match="pad to one length"):
            kept.check(shape, dtype)


def test_a_state_is_loaded_as_it_was(kept: SampleMessages) -> None:
    assert kept.state_dict() == {}
    kept.write([3, 1, 2], rows(3, 1, 2))
    other = SampleMessages()
    other.write([9], torch.zeros(1, 5).half())
    other.load_state_dict(kept.state_dict())
    assert torch.equal(other.read([1, 2, 3], CPU), rows(1, 2, 3)) and len(other) == 3
    assert (other.shape, other.dtype) == ((3,), torch.bfloat16)
    other.load_state_dict({})
    assert len(other) == 0 and other.shape is None


@pytest.mark.parametrize(
    "state",
    [
        {"ids": torch.tensor([1])},
        {"ids": [1], "messages": rows(1)},
        {"ids": torch.tensor([1, 2]), "messages": rows(1)},
        {"ids": torch.tensor([1, 1]), "messages": rows(1, 2)},
        {"ids": torch.tensor([1]), "messages": rows(1).float()},
        {"ids": torch.tensor([], dtype=torch.int64), "messages": rows(1)[:0]},
    ],
)
def test_what_is_no_state_is_refused_and_leaves_what_was(kept: SampleMessages, state: dict[str, Any]) -> None:
    kept.write([8], rows(8))
    with pytest.raises(ValueError, match="as state_dict"):
        kept.load_state_dict(state)
    assert torch.equal(kept.read([8], CPU), rows(8))
