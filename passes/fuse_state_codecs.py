"""Numbers change, for the better: a state that is encoded and decoded within a graph is not rounded in between.

    decode_state(encode_state(x)) -> x        unread values are dropped; the other operators -> their arithmetic

An optimizer written for FP32 states (see fp8compile/optim/encoded_tensor.py) reads what it has just written:
``exp_avg_sq.mul_(beta2).addcmul_(...)``, then its root. As in fp8compile.optim the parameter step sees the fresh states
in FP32 and each state is encoded once, at the end. Legality: both operators are pure, and only pairs of one format and
shape cancel. With the arithmetic in place of the operators, Inductor fuses decode, update and encode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import SPLICED, size_hint, splice
from fp8compile.numerics.states.custom_ops import decoded_in_pieces, encoded_in_pieces
from fp8compile.numerics.states.registry import state_codec
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten

ENCODE = torch.ops.fp8compile.encode_state.default
DECODE = torch.ops.fp8compile.decode_state.default
COPY = aten.copy.default  # what is left of a write into a graph's input once the graph is functional


def holds_state_codecs(graph: Graph) -> bool:
    """Whether the graph reads or writes encoded states, as an optimizer's step does."""
    return any(graph.find_nodes(op="call_function", target=target) for target in (ENCODE, DECODE))


def fuse_state_codecs(graph: Graph, ctx: Context) -> Notes:
    """Cancel decodes of what was just encoded, drop encodes that are overwritten, splice in the arithmetic of the rest."""
    for node in graph.find_nodes(op="call_function", target=DECODE):
        x = _encoded_value(node)
        if x is not None:
            node.replace_all_uses_with(x)
            graph.erase_node(node)
    _drop_unread(graph)
    for node in graph.find_nodes(op="call_function", target=ENCODE):
        _splice_encode(node)
    for node in graph.find_nodes(op="call_function", target=DECODE):
        _splice_decode(node)
    return Notes()


def _encoded_value(decode: Node) -> Node | None:
    """The x of ``decode_state(encode_state(x))``; None where the parts come from elsewhere or stand for something else."""
    parts, shape, *stored = decode.args
    assert isinstance(parts, Sequence) and isinstance(shape, Sequence)
    sources = [_written(part) for part in parts if isinstance(part, Node)]
    encode = sources[0].args[0] if sources[0].target is private.getitem else None
    if not isinstance(encode, Node) or encode.target is not ENCODE or [*encode.args[1:]] != stored:
        return None
    if any(source.target is not private.getitem or source.args != (encode, i) for i, source in enumerate(sources)):
        return None
    x = encode.args[0]
    assert isinstance(x, Node)
    same = [size_hint(s) for s in x.meta["val"].shape] == [size_hint(s) for s in decode.meta["val"].shape]
    return x if same else None


def _written(part: Node) -> Node:
    """The value that a part has, through the copies that writing it into its memory left behind."""
    while part.target is COPY and _alike(*part.args[:2]):
        assert isinstance(part.args[1], Node)
        part = part.args[1]
    return part


def _alike(*nodes: object) -> bool:
    old, new = ((val.dtype, val.device, val.shape) for val in (n.meta["val"] for n in nodes if isinstance(n, Node)))
    return bool(old == new)


def _drop_unread(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        if node.target in (ENCODE, DECODE, COPY, private.getitem) and not node.users:
            graph.erase_node(node)


def _splice_decode(node: Node) -> None:
    parts, _, format, signed = node.args
    codec, shape = state_codec(format, signed=signed), node.meta["val"].shape  # type: ignore[arg-type]

    def decode(*parts: Tensor) -> Tensor:
        return decoded_in_pieces(codec, parts, shape)

    decode.__name__ = f"decode_{format}"
    node.replace_all_uses_with(splice(node.graph, decode, *parts, before=node))  # type: ignore[misc]
    node.graph.erase_node(node)


def _splice_encode(node: Node) -> None:
    x, format, signed = node.args
    codec = state_codec(format, signed=signed)  # type: ignore[arg-type]

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        return encoded_in_pieces(codec, x)

    encode.__name__ = f"encode_{format}"
    made = splice(node.graph, encode, x, before=node)  # type: ignore[arg-type]
    for part in list(node.users):
        new = made[part.args[1]]
        _store(part, new)
        part.replace_all_uses_with(new)
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def _store(part: Node, new: Node) -> None:
    """Write a part where it is kept; this does not count as using codes as numbers (see fp8compile/fx/spec.py)."""
    for user in list(part.users):
        if user.target is COPY and user.args[1] is part and _alike(*user.args[:2]):
            _store(user, new)
            user.replace_all_uses_with(new)
            user.graph.erase_node(user)
        elif user.target is aten.copy_.default and user.args[1] is part:
            user.meta[SPLICED] = f"store({new.name})"
