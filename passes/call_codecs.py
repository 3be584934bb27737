"""Numbers stay as they are. On a CPU an encode or decode of groups is one call of compiled code, not arithmetic to generate.

    x -> reshape, abs, amax, mul, ..., convert_element_type       ->      codes, inv_scale = fp8compile.groups_encoded(x)
    codes, inv_scale -> convert_element_type, mul, ...            ->      x = fp8compile.groups_decoded(codes, inv_scale)

Inductor's C++ writer takes a third of a millisecond for each operation of each kernel body, and the compiler a second for
each kernel. With its codecs called, a Llama of eight layers takes 1.14 times as long to compile as without fp8compile; with
them written out 1.55 times.

A call reads and writes memory, where generated code would keep a value in registers. So these stay as they are:

    what codecs compute of a value of their own        a deviation from a mean, in FP32, is in no memory
    a value of more than an eighth of all such values  decoded it would be the peak: logits, as a rule
    sizes that only a run knows; FP16; other devices   on a GPU a codec belongs into the kernels around it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.cpu_codecs import DECODED, ENCODED, FORMATS, VALUES, compiled
from fp8compile.fx.graph import SPLICED, is_tensor, nbytes, storage_root
from fp8compile.fx.ops import CASTS, CONSTANTS, VIEWS, readers
from fp8compile.fx.tracing import CODEC_CALL, fake_result
from fp8compile.numerics.codec_calls import CodecCall
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten
CODES, SCALES, AMAXES = PARTS = "codes", "scales", "amaxes"  # what an encode makes
OF_ONE = (CODEC_CALL, "val")  # in the meta of a node, and of no other that stands in its place
LARGEST = 8  # a value has at most one of so many parts of the bytes of all that are coded


@dataclass(frozen=True)
class TracedCall:
    """One call in a graph.

    Attributes:
        nodes: its operations, in the graph's order.
    """

    call: CodecCall
    nodes: list[Node]

    @property
    def operands(self) -> list[Node]:
        """What it reads, but for constants."""
        inside = {*self.nodes}
        read = dict.fromkeys(operand for node in self.nodes for operand in node.all_input_nodes)
        return [node for node in read if node not in inside and node.target not in CONSTANTS]

    @property
    def results(self) -> list[Node]:
        """What of it is read outside."""
        inside = {*self.nodes}
        return [node for node in self.nodes if any(user not in inside for user in node.users)]

    @property
    def value(self) -> Node:
        """What is encoded, or was."""
        return self.operands[0] if self.call.encodes else self.results[0]


def call_codecs(graph: Graph, ctx: Context) -> Notes:
    """Call what can be."""
    found = [each for each in _traced_calls(graph) if _can_be_called(each)]
    most = sum(nbytes(each.value.meta["val"]) for each in found) // LARGEST
    called = [each for each in found if nbytes(each.value.meta["val"]) <= most]
    for dtype in {each.call.format.dtype for each in called}:
        compiled(dtype)  # what a compiler cannot do is said before the first step
    for each in called:
        _call(graph, each)
    return Notes()


def _traced_calls(graph: Graph) -> Iterator[TracedCall]:
    """Operations of one call hang together; a call that was traced once may stand in a graph many times."""
    nodes_of: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        call = node.meta.get(CODEC_CALL)
        if call is None or node.op != "call_function" or node.target in CONSTANTS:
            continue
        nodes_of[node] = mine = [node]
        for operand in node.all_input_nodes:
            other = nodes_of.get(operand, mine)
            if other is not mine and operand.meta[CODEC_CALL] is call:
                other.extend(mine)
                nodes_of |= dict.fromkeys(mine, other)
                mine = other
    place = {node: at for at, node in enumerate(graph.nodes)}
    for nodes in {id(each): each for each in nodes_of.values()}.values():
        yield TracedCall(nodes[0].meta[CODEC_CALL], sorted(nodes, key=place.__getitem__))


def _can_be_called(each: TracedCall) -> bool:
    call, operands, results = each.call, each.operands, each.results
    if call.format.dtype not in FORMATS or not {call.dtype, call.scale_dtype} <= {*VALUES}:
        return False
    if not all(map(_lies_on_a_cpu, (*operands, *results))):
        return False
    if call.encodes:
        parts = [_made(node, call) for node in results]
        is_whole = len(operands) == 1 and _is_value(operands[0], call) and len({*parts} & {*PARTS}) == len(parts)
        return is_whole and SPLICED not in storage_root(operands[0]).meta
    is_whole = len(results) == 1 and _is_value(results[0], call) and {*results[0].users}.isdisjoint(each.nodes)
    taken = sorted(_taken(node, call) for node in operands)
    return is_whole and taken == [CODES, SCALES] and not any(SPLICED in user.meta for user in readers(results[0]))


def _lies_on_a_cpu(node: Node) -> bool:
    """Whether a node is a tensor in the memory of a CPU, in order: as calls take and return it."""
    return is_tensor(node) and node.meta["val"].device.type == "cpu" and node.meta["val"].is_contiguous()


def _made(node: Node, call: CodecCall) -> str:
    """Which part of an encode a node is: that of its dtype, and made as numerics/scaling.py makes it."""
    part = _taken(node, call)
    if part == CODES:
        return part
    dtype, made = node.meta["val"].dtype, node
    while made.target in (*VIEWS, *CASTS) and isinstance(made.args[0], Node):
        made = made.args[0]
    if made.target is aten.amax.default:
        return AMAXES if dtype == call.dtype and node.meta["val"].numel() == call.count else ""
    return part if made.target is aten.where.self else ""


def _taken(node: Node, call: CodecCall) -> str:
    """Which part a decode's operand is, by its dtype and size: scales are one a row, not one a column."""
    value, (rows, row, _) = node.meta["val"], call.groups
    if value.dtype == call.format.dtype and value.numel() == rows * row:
        return CODES
    is_one_a_row = value.numel() == call.count and value.shape[-1:] in ((), (1,))
    return SCALES if value.dtype == call.scale_dtype and is_one_a_row else ""


def _is_value(node: Node, call: CodecCall) -> bool:
    value, (rows, row, _) = node.meta["val"], call.groups
    return bool(value.dtype == call.dtype and value.numel() == rows * row)


def _call(graph: Graph, each: TracedCall) -> None:
    call, results, inside = each.call, each.results, {*each.nodes}
    known = {key: v for key, v in results[0].meta.items() if key not in OF_ONE}

    def made(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta |= known | {"val": fake_result(node)}
        return node

    with graph.inserting_before(results[0]), results[0].meta["val"].fake_mode:
        if call.encodes:
            wanted = {_made(node, call) for node in results}
            parts = made(ENCODED, each.value, call.format.dtype, call.scale_dtype, AMAXES in wanted, *call.groups)
            found = {part: made(private.getitem, parts, i) for i, part in enumerate(PARTS) if part in wanted}
        else:
            by_part = {_taken(node, call): node for node in each.operands}
            value = made(DECODED, by_part[CODES], by_part[SCALES], call.dtype, *call.groups)
        for node in results:
            new, shape = found[_made(node, call)] if call.encodes else value, node.meta["val"].shape
            same = new if new.meta["val"].shape == shape else made(aten.view.default, new, list(shape))
            same.meta |= {key: v for key, v in node.meta.items() if key not in OF_ONE}
            node.replace_all_uses_with(same, lambda user: user not in inside)
    for node in reversed([*_constants(each), *each.nodes]):
        if not node.users:
            graph.erase_node(node)


def _constants(each: TracedCall) -> dict[Node, None]:
    return dict.fromkeys(n for node in each.nodes for n in node.all_input_nodes if n.target in CONSTANTS)
