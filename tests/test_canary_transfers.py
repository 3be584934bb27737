"""Canaries of torch's operators for copies to the host and back: what they order, and what they leave in memory.

No GPU is needed: streams and events are stand-ins that note what is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fp8compile import _torch as private

OPS = private.transfers()
pytestmark = pytest.mark.skipif(OPS is None, reason="torch 2.11 has no such operators")


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What the operators ask of the stream that computes, of that of the copies, and of an event, in order."""
    from torch._functorch._activation_offloading import offload_ops

    said: list[str] = []

    def stream(name: str) -> Any:
        note = lambda what: lambda other: said.append(f"{name} {what} {getattr(other, 'name', 'event')}")  # noqa: E731
        made = mock.Mock(
            **{f"{what}.side_effect": note(what) for what in ("wait_stream", "record_event", "wait_event")}
        )
        made.name = name
        return made

    computing, copying = stream("computing"), stream("copying")
    empty, copy = torch.empty, torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        said.append(f"copy, non_blocking={non_blocking}")
        return copy(self, other)

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        said.extend(["pinned"] if pin_memory else [])
        return empty(*args, **kwargs)

    def empty_like(tensor: torch.Tensor, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return unpinned(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)

    with (
        mock.patch.object(offload_ops, "_get_or_create_transfer_stream", lambda device: copying),
        mock.patch.object(torch.accelerator, "current_stream", lambda device=None: computing),
        mock.patch.object(torch.accelerator, "set_stream", lambda stream: said.append(f"on {stream.name}")),
        mock.patch.object(torch, "Event", lambda: "event"),
        mock.patch.object(torch.Tensor, "copy_", copied),
        mock.patch.object(torch, "empty", unpinned),
        mock.patch.object(torch, "empty_like", empty_like),
    ):
        yield said


def test_a_copy_waits_for_its_value_and_its_end_is_an_event_that_is_waited_for(log: list[str]) -> None:
    value = torch.arange(6, dtype=torch.int8)
    host = OPS.offload.default(value)
    begun = ["copying wait_stream computing", "on copying", "pinned", "copy, non_blocking=True"]
    assert log == [*begun, "copying record_event event", "on computing"]
    again = OPS.wait_tensor.default(host, *private.until_waited_for(value))
    assert log[6:] == ["computing wait_event event"] and again.data_ptr() == host.data_ptr()
    assert value.untyped_storage().nbytes() == 6, "the value is not emptied"
    assert torch.equal(again, value)


def test_a_copy_back_is_allocated_for_the_stream_that_computes_and_waits_for_it(log: list[str]) -> None:
    host = torch.arange(6, dtype=torch.int8)
    value = OPS.reload.default(host, torch.device("cpu"))
    begun = ["copying wait_stream computing", "on copying", "copy, non_blocking=True", "copying record_event event"]
    assert log == [*begun, "on computing"]
    again = OPS.wait_tensor.default(value, *private.until_waited_for(host))
    assert log[5:] == ["computing wait_event event"]
    assert host.untyped_storage().nbytes() == 6, "a second backward reads it again"
    assert torch.equal(again, host)


def test_a_wait_without_readers_stays_in_a_graph() -> None:
    graph = torch.fx.Graph()
    graph.call_function(OPS.wait_tensor.default, (graph.placeholder("x"),))
    graph.output(None)
    graph.eliminate_dead_code()
    assert graph.find_nodes(op="call_function", target=OPS.wait_tensor.default)
