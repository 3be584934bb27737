"""A step in planes: groups whose codes are packed several to a byte, updated a plane at a time.

    param [..., n] of a group  ->  param/0, param/1 ... [..., n / P] each      P: codes to a byte of the narrowest format

A byte has one code of each plane (``numerics/states/packing.py``). So a loop over n / P elements that computes all planes has
a byte's codes at hand, and the step is one kernel; over n elements it would write codes out, and a second kernel pack them.
Numbers are those of the step in one piece.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8compile.fx.traced_calls import call_of
from fp8compile.numerics.states.interface import StateCodec
from fp8compile.numerics.states.packing import Planar
from fp8compile.numerics.states.plain import Whole
from fp8compile.optim.plan import Tensors, UpdatePlan


def planes_of(plan: UpdatePlan, size: int) -> int:
    """How many planes groups of ``size`` elements are updated in; 1 where nothing is packed, or not by planes alone."""
    codecs = [codec for _, codec in plan.codecs]
    packed = [codec for codec in codecs if isinstance(codec, Planar)]
    if not packed or plan.codes is not None or not all(isinstance(codec, (Planar, Whole)) for codec in codecs):
        return 1
    planes = max(8 // codec.bits for codec in packed)
    return planes if size % planes == 0 and size > planes else 1


def parted(t: Tensor, size: int, planes: int) -> Tensor | tuple[Tensor, ...]:
    """The planes of a parameter's part, ``[..., width]`` for a group of ``size``; metadata, of width 1, as they are."""
    width = size // planes
    return t if t.shape[-1] == 1 else torch.split(t, width, -1)


def named_planes(name: str, parts: Tensor | tuple[Tensor, ...]) -> Tensors:
    """A tensor under its name, or its planes under their own."""
    return {name: parts} if isinstance(parts, Tensor) else {_key(name, k): part for k, part in enumerate(parts)}


def updated(plan: UpdatePlan, tensors: Tensors) -> Tensors:
    """``plan(tensors)``, of tensors whose planes have names of their own, as have those of what is returned."""
    each = [_of_plane(tensors, k) for k in range(plan.planes)]
    decoded = {state: _decoded(plan, state, codec, tensors) for state, codec in plan.codecs}
    fresh: dict[str, list[Tensor]] = {state: [] for state, _ in plan.codecs}
    new: Tensors = {}
    for k, mine in enumerate(each):
        p, states = plan.moved(mine, {state: parts[k] for state, parts in decoded.items()})
        for state, x in states.items():
            fresh[state].append(x)
        here = replace(plan, planes=1, offset=plan.offset + k * p.shape[-1])
        with call_of(f"store({plan.master})"):
            stored = here.stored(p, mine)
        new |= {_key(name, k): value for name, value in stored.items()}
    for state, codec in plan.codecs:
        codes, *metadata = plan.part_keys(state)
        with call_of(f"encode({state})"):
            code_parts, made = _encoded(codec, fresh[state])
        new |= named_planes(codes, tuple(code_parts)) | dict(zip(metadata, made, strict=True))
    return new


def _key(name: str, plane: int) -> str:
    return f"{name}/{plane}"


def _of_plane(tensors: Tensors, plane: int) -> Tensors:
    """What one plane's update takes: its own tensors by their plain names, and those that planes share."""
    end = _key("", plane)
    return {name.removesuffix(end): t for name, t in tensors.items() if name.endswith(end) or "/" not in name}


def _parts(tensors: Tensors, name: str) -> list[Tensor]:
    """All planes of a tensor."""
    return [t for key, t in tensors.items() if key.partition("/")[0] == name]


def _decoded(plan: UpdatePlan, state: str, codec: StateCodec, tensors: Tensors) -> list[Tensor]:
    codes, *metadata = plan.part_keys(state)
    with call_of(f"decode({state})"):
        if isinstance(codec, Planar):
            return codec.decode_planes(_parts(tensors, codes), [tensors[key] for key in metadata])
        return [codec.decode([x], x.shape) for x in _parts(tensors, codes)]


def _encoded(codec: StateCodec, planes: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Planes of codes, and metadata."""
    return codec.encode_planes(planes) if isinstance(codec, Planar) else ([codec.encode(x)[0] for x in planes], ())
