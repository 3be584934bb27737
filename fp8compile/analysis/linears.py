"""The matmuls of a model's linears in a joint graph: forward, dgrad and wgrad.

    forward   y [M, N] = x [M, K] W' [K, N]     exactly one operand is made from parameters alone
    dgrad     dx [M, K] = dy [M, N] W [N, K]     one from parameters alone, the other depends on a tangent
    wgrad     dW [N, K] = dy' [N, M] x [M, K]    a tangent and the input of a forward matmul

The two matmuls of the backward belong to the forward matmul of the same autograd node (``seq_nr``), and read its weight or
input. A product of two activations (attention) may read that input too, with a result as large as the weight: it has an
autograd node of its own. Where a node has more products than a matmul and its two gradients (``autograd.Function``), or
none is known, a wgrad must multiply what a dgrad multiplies; otherwise it is unknown, and no matmul of a linear.

A weight may be scaled by numbers that are no parameters: W / sigma of a spectral norm, where sigma comes from buffers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile.analysis.dataflow import Source, is_activation, sources
from fp8compile.fx.graph import is_tensor, numel, size_hint
from fp8compile.fx.ops import CASTS, DGRAD, FORWARD, WGRAD, contracts, is_view

aten = torch.ops.aten

# The overloads that a linear becomes, each with the position of its left operand; the right one is next. ``MATMULS`` in
# fx/ops.py names everything that multiplies matrices or convolves.
PLAIN_MATMULS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
BATCHED: dict[Any, int] = {aten.bmm.default: 0, aten.baddbmm.default: 1}
GROUPED: dict[Any, int] = {aten._grouped_mm.default: 0} if hasattr(aten, "_grouped_mm") else {}
ALL = PLAIN_MATMULS | BATCHED | GROUPED


@dataclass(frozen=True)
class Matmul:
    """One matmul of a linear. ``forward`` is the linear's forward matmul; for a forward matmul, the node itself."""

    node: Node
    direction: str
    forward: Node
    weight: Node  # the parameter, or the first value computed from parameters that is not a cast or view of one
    gradients: tuple[bool, bool]  # which operands depend on a tangent
    M: Any
    K: int
    N: int

    @property
    def operands(self) -> tuple[Node, Node]:
        """The left and the right operand, as they are now: other matmuls are rewritten in the meantime."""
        found = _operands(self.node)
        assert found is not None
        return found

    @property
    def weights(self) -> tuple[bool, bool]:
        """Which operands are the weight: none in a wgrad. Some models multiply it from the left."""
        if self.direction == FORWARD:
            left, right = (uncast(operand) is self.weight for operand in self.operands)
            return left, right
        return (False, False) if self.direction == WGRAD else (not self.gradients[0], not self.gradients[1])


def linear_matmuls(graph: Graph, parameters: Set[Node]) -> list[Matmul]:
    """The matmuls of every linear of a joint graph, in graph order, batched ones included."""
    found = sources(graph, parameters)
    matmuls: list[Matmul] = []
    reading: dict[Node, list[Matmul]] = defaultdict(list)  # forward matmuls, by the root of each operand
    scaled: set[Node] = set()  # weights that were scaled by what is no parameter
    for node in graph.nodes:
        operands = _operands(node)
        if operands is None:
            continue
        kinds = tuple(_kind(found[o], uncast(o) in scaled) for o in operands)
        if kinds == ("activation", "activation"):
            scaled |= {o for o in map(uncast, operands) if _is_scaled_weight(o, parameters)}
            kinds = tuple(_kind(found[o], uncast(o) in scaled) for o in operands)
        if sorted(kinds) == ["activation", "parameter"]:
            matmuls.append(_forward(node, *operands, weight_on_the_right=kinds[1] == "parameter"))
            for root in {*map(uncast, operands)}:
                reading[root].append(matmuls[-1])
        elif sorted(kinds) in (["gradient", "parameter"], ["activation", "gradient"]):
            known = 1 - kinds.index("gradient")
            direction, gradients = DGRAD if kinds[known] == "parameter" else WGRAD, (known == 1, known == 0)
            of = [p for p in reading[uncast(operands[known])] if _number(p.node) == _number(node)]
            matmuls += [dataclasses.replace(p, node=node, direction=direction, gradients=gradients) for p in of]
    return _without_doubt(matmuls, _many_products(graph, found))


def _without_doubt(matmuls: Sequence[Matmul], many: Set[Any]) -> list[Matmul]:
    """Each matmul once; a wgrad among many products by the gradient that it shares with its linear's dgrad, or not at all."""
    multiplied = {(p.forward, _gradient(p)) for p in matmuls if p.direction == DGRAD}
    chosen: dict[Node, Matmul] = {}
    for matmul in matmuls:
        unsure = matmul.direction == WGRAD and _number(matmul.node) in many
        if not unsure or (matmul.forward, _gradient(matmul)) in multiplied:
            chosen.setdefault(matmul.node, matmul)
    return list(chosen.values())


def _many_products(graph: Graph, found: Mapping[Node, Source]) -> set[Any]:
    """Autograd nodes that may have more products than a matmul and its two gradients; None stands for one that is unknown."""
    products = [node for node in graph.nodes if contracts(node)]
    backward = Counter(_number(node) for node in products if Source.GRADIENT in found[node])
    forward = Counter(_number(node) for node in products if Source.GRADIENT not in found[node])
    return {None} | {n for n in forward if forward[n] > 1} | {n for n in backward if backward[n] > 2}


def _number(node: Node) -> Any:
    """The autograd node that an operation belongs to."""
    return node.meta.get("seq_nr")


def _gradient(matmul: Matmul) -> Node:
    """The gradient that a matmul of the backward multiplies, without views and casts."""
    return uncast(matmul.operands[0 if matmul.gradients[0] else 1])


def _operands(node: Node) -> tuple[Node, Node] | None:
    if node.target not in ALL:
        return None
    at = ALL[node.target]
    left, right = node.args[at : at + 2]
    assert isinstance(left, Node) and isinstance(right, Node)
    return left, right


def _kind(source: Source, is_scaled_weight: bool) -> str:
    if Source.GRADIENT in source:
        return "gradient"
    if source == Source.PARAMETER or is_scaled_weight:
        return "parameter"
    return "activation" if is_activation(source) else "table"


def _is_scaled_weight(value: Node, parameters: Set[Node]) -> bool:
    """Whether a value is made from a parameter of its size, element by element; all other operands have fewer elements."""
    while value not in parameters:
        if torch.Tag.pointwise not in getattr(value.target, "tags", ()):
            return False
        sizes = {
            operand: size_hint(numel(operand.meta["val"])) for operand in value.all_input_nodes if is_tensor(operand)
        }
        whole = [operand for operand, size in sizes.items() if size >= size_hint(numel(value.meta["val"]))]
        if len(whole) != 1:
            return False
        value = uncast(whole[0])
    return True


def _forward(node: Node, left: Node, right: Node, *, weight_on_the_right: bool) -> Matmul:
    rows, inner, columns = left.meta["val"].shape[-2], left.meta["val"].shape[-1], right.meta["val"].shape[-1]
    weight = uncast(right if weight_on_the_right else left)
    M, N = (rows, columns) if weight_on_the_right else (columns, rows)
    return Matmul(node, FORWARD, node, weight, (False, False), M, size_hint(inner), size_hint(N))


def uncast(value: Node) -> Node:
    """What a value is a view or a cast of."""
    while is_view(value) or value.target in CASTS:
        parent = value.args[0]
        if not isinstance(parent, Node) or not is_tensor(parent):
            break
        value = parent
    return value


def made_from(parameters: Set[Node]) -> set[Node]:
    """These parameters and all that is made from them without a matmul, a spectral norm for example."""
    found, waiting = set[Node](), list(parameters)
    while waiting:
        node = waiting.pop()
        if node not in found and not contracts(node):
            found.add(node)
            waiting += node.users
    return found


def is_last(matmul: Matmul, sources: Mapping[Node, Source]) -> bool:
    """Whether no other matmul, convolution or attention of the forward depends on a forward matmul."""
    seen, waiting = set[Node](), [matmul.forward]
    while waiting:
        node = waiting.pop()
        following = [
            u for u in node.users if u not in seen and u.op != "output" and Source.GRADIENT not in sources[u]
        ]
        if any(map(contracts, following)):
            return False
        seen |= set(following)
        waiting += following
    return True


def is_tied_to_embedding(weight: Node) -> bool:
    """Whether a parameter is looked up by an embedding too."""
    waiting = [weight]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.target is aten.embedding.default or (
                user.target is aten.index.Tensor and user.args[0] is node and "autograd_backward" not in user.meta
            ):
                return True
            if is_view(user) or user.target in CASTS:
                waiting.append(user)
    return False
