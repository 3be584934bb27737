"""Links of ``torch.distributed.pipelining`` in few bits: ``compress_links(stage, bits=4, backward_bits=8)``.

    forward     the change of each sample's activation since its last visit, in ``bits`` (AQ-SGD), or the activation itself
    backward    the gradient itself, in ``backward_bits``

Numbers change: the next stage computes with what the codes stand for, and its gradient is taken for that of what was sent.

A schedule asks its stage for the operations that send and receive a message, starts and awaits them, and then has the stage
compute. So that is where codes are put in: a tensor to be sent is replaced by its bytes (uint8), a buffer to be received into
by one for bytes, and they are decoded into the stage's buffer before the stage computes. Autograd ends at a stage's input and
begins again at its output, so codes, which have no gradient, are never inside it; a stage whose output were the bytes would
need a gradient of them, which the pipeline then sends too. Stages of one rank hand tensors over, and nothing is coded there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fp8compile._arguments import FLAGS, check_one_of
from fp8compile.extras.links.link_ends import ChangesEnd, DirectEnd
from fp8compile.extras.links.links import Links
from fp8compile.numerics import few_bits
from fp8compile.numerics.wire_codes import WireCode

BITS = (*few_bits.BITS, 8)
ANY_BITS = (*BITS, 16, None)
# What schedules call on a stage for each message: without an underscore, and on no page of torch's
SENDS_AND_RECEIVES = ("get_fwd_send_ops", "get_fwd_recv_ops", "get_bwd_send_ops", "get_bwd_recv_ops")
COMPUTES = ("forward_one_chunk", "backward_one_chunk")
_MARK = "_fp8compile_links"


def compress_links(
    stage: Any,
    *,
    bits: int = 4,
    backward_bits: int | None = 8,
    changes: bool = True,
    first: int | None = 16,
    group_size: int = 128,
    check: bool = False,
) -> Links:
    """Send what a stage sends in few bits, and read what it receives; before its first step, on every stage, with the same
    settings.

    Args:
        stage: a ``PipelineStage``, or what ``build_stage`` makes. Schedules are used as before.
        bits: of each element of an activation (changes of it): 2 to 6, or 8.
        backward_bits: of each element of a gradient: those, 16, or None for the tensor as it is.
        changes: send changes since a sample's last visit. That asks for ``samples(ids)`` before each step, and keeps two
            bytes for each element of each sample on both hosts of a link. False: each activation for itself.
        first: bits of an activation on its sample's first visit, likewise. For changes alone.
        group_size: elements of a row that share scales at most; a multiple of 8 up to 65,536.
        check: compare both ends' memory after each message, by eight bytes in it.

    Raises:
        ValueError: no stage, a pipeline of one stage, links that are there already, bits or a group size that are none.
    """
    _check_stage(stage)
    for name, value, choices in (
        ("bits", bits, BITS),
        ("backward_bits", backward_bits, ANY_BITS),
        ("first", first, ANY_BITS),
        ("changes", changes, FLAGS),
        ("check", check, FLAGS),
    ):
        check_one_of(name, value, choices)
    if check and not changes:
        raise ValueError("check=True compares what ends remember, and with changes=False they remember nothing")
    few_bits.FewBits(4, group_size)  # checks it
    code = WireCode(bits, group_size)
    make = (
        functools.partial(ChangesEnd, code, WireCode(first, group_size), check)
        if changes
        else lambda: DirectEnd(code)
    )
    links = Links(stage, make, None if backward_bits is None else DirectEnd(WireCode(backward_bits, group_size)))
    _tie(stage, links)
    return links


def _check_stage(stage: Any) -> None:
    if not all(callable(getattr(stage, name, None)) for name in (*SENDS_AND_RECEIVES, *COMPUTES)):
        raise ValueError(
            f"compress_links takes a stage of torch.distributed.pipelining, not a {type(stage).__name__}; the stages of a "
            "schedule are compressed one by one"
        )
    if stage.num_stages < 2:
        raise ValueError("a pipeline of one stage has no link: leave compress_links away")
    if hasattr(stage, _MARK):
        raise ValueError("this stage's links are compressed already: call compress_links once for a stage")


def _tie(stage: Any, links: Links) -> None:
    """Have the stage's own methods, under the names that schedules call, hand over codes."""
    setattr(stage, _MARK, links)
    methods = (links.send_activations, links.receive_activations, links.send_gradients, links.receive_gradients)
    sides = ("outgoing", "incoming", None, None)
    for name, then, side in zip(SENDS_AND_RECEIVES, methods, sides, strict=True):
        before = (lambda chunk: None) if side is None else functools.partial(links.check_ids, side)
        setattr(stage, name, _with_codes(getattr(stage, name), before, then))
    for name, direction in zip(COMPUTES, ("forward", "backward"), strict=True):
        setattr(stage, name, _decoded(getattr(stage, name), functools.partial(links.arrived, direction)))


def _with_codes(
    plain: Callable[..., Any], before: Callable[[int], None], then: Callable[[Sequence[Any], int], None]
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def operations(chunk: int, *args: Any, **kwargs: Any) -> Any:
        before(chunk)
        ops = plain(chunk, *args, **kwargs)
        then(ops, chunk)
        return ops

    return operations


def _decoded(plain: Callable[..., Any], first: Callable[[int], None]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def computed(chunk: int, *args: Any, **kwargs: Any) -> Any:
        first(chunk)
        return plain(chunk, *args, **kwargs)

    return computed
