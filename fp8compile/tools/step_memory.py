"""The memory of a step, measured from outside: bytes saved for backward, and the most allocated at one time.

    saved   the distinct storages that autograd holds after a forward
    peak    the most allocated at one time during a step, beyond what was there before it

What a compiled graph saves reaches autograd in two ways: through ``save_for_backward``, where
``saved_tensors_hooks`` sees it, and (torch >= 2.11) as tensors kept on the node without a version check.
No hook sees these, so they are read from the nodes here. Parameters, buffers and the batch are left out: they
are there with or without a backward.

The peak is that of the allocator: CUDA's own count, or on a CPU what the profiler hears of each allocation. What libraries
allocate for themselves is in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

UNHOOKED_ATTRIBUTE = "_tensors_no_vc_check"


def saved_bytes(forward: Callable[[], Tensor], not_counted: Iterable[Tensor]) -> int:
    """Bytes that the result of ``forward()`` keeps alive for its backward.

    Args:
        forward: runs one forward and returns the loss; no backward follows.
        not_counted: parameters, buffers and inputs.
    """
    owned = {_key(tensor) for tensor in not_counted}
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        sizes[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = forward()
    for node in _nodes(loss):
        for tensor in getattr(node, UNHOOKED_ATTRIBUTE, ()):
            count(tensor)
    return sum(nbytes for key, nbytes in sizes.items() if key not in owned)


def measured_peak(step: Callable[[], object], cuda: Sequence[int] = ()) -> int:
    """The most bytes allocated at one time during ``step()``, beyond those before it.

    Args:
        step: runs once.
        cuda: indices of the CUDA devices that are counted, each with its own peak, added up. None of them: the CPU.
    """
    if not cuda:
        return _peak_on_cpu(step)
    before = [torch.cuda.memory_allocated(device) for device in cuda]
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    return sum(torch.cuda.max_memory_allocated(device) - b for device, b in zip(cuda, before, strict=True))


def _peak_on_cpu(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nodes(loss: Tensor) -> Iterator[Any]:
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)
