"""Logits in a joint graph: the result of a matmul of which a loss reads nothing but statistics of its rows.

    logits   z [T, V] = h [T, H] W' [H, V] (+ bias [V])
    forward  wide values, element by element: upcast, scaling, soft-cap, z - amax, exp
             statistics of rows: amax, sum, logsumexp, the target's entry; and what is made of them element by element
    backward wide values, element by element, of wide ones, statistics, targets and the gradient of the loss
             sums of a wide value over all columns, a number a row: an entropy's gradient is p (g log p - sum of p g log p)
             read by dgrad (dz W), wgrad (dz' h), the bias gradient (sum of dz over rows), and nothing else
             nothing at all for logits that take no gradient, as those of a reference model

A *wide* value has V columns in one of its dimensions and is computed from the logits. This is all that the forms of a loss
have in common (cross-entropy with its options, log-probabilities, entropy, z-loss, soft-cap, shifted rows), so it is all that
is asked of them: no formula is recognised. Every reader of a wide value is known, or the logits are declined with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.columns import carried, is_elementwise
from fp8compile.analysis.linears import PLAIN_MATMULS
from fp8compile.analysis.logit_rows import Declined, LogitRows, rows_of
from fp8compile.fx.graph import ENCODING, IN_CHUNKS, ROW, SPLICED, is_tensor, numel
from fp8compile.fx.ops import PARTS, is_split, is_view, opname

aten = torch.ops.aten

# Reductions of a row to one number. The second argument of each is the dimension or a list of them.
ROW_REDUCTIONS = frozenset(
    {
        aten.amax.default,
        aten.amin.default,
        aten.any.dim,
        aten.any.dims,
        aten.argmax.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
    }
)
OF_ONE_DIMENSION = (aten.any.dim, aten.argmax.default)  # its second argument is no list
OF_CODES = (aten._scaled_mm.default, aten._int_mm.default)

RETURNED = (
    "the logits are returned by the graph: compute the loss in the compiled function and return no logits (Hugging Face: "
    "return the loss alone)"
)
OBSERVED = "statistics of the logits or of their gradient are taken: Recipe.fp32.observe=False takes none"


@dataclass(frozen=True)
class Logits:
    """Logits whose every reader is known.

    Attributes:
        product: the mm or addmm that makes them.
        axis: each wide value, in graph order, and the dimension of its columns.
        rows: which rows of the logits the loss reads.
        statistics: values of the forward with one element a row, from reductions of wide values and made from such, that
            the loss or a wide value reads; in graph order.
        sums: the same reductions in the backward, of wide values that depend on the gradient of the loss; in graph order.
        results: what the backward makes of wide values and is neither: dgrad, wgrad, bias gradient; none without a gradient.
        form: what lies between the logits and their gradient, in words.
    """

    product: Node
    axis: Mapping[Node, int]
    rows: LogitRows
    statistics: tuple[Node, ...]
    sums: tuple[Node, ...]
    results: tuple[Node, ...]
    form: str

    @property
    def columns(self) -> int:
        """V."""
        size = self.product.meta["val"].shape[1]
        assert isinstance(size, int)
        return size


def candidates(graph: Graph) -> list[Node]:
    """The results of a model's matmuls, in its forward and its backward, that may be logits."""
    return [n for n in graph.nodes if n.target in (*PLAIN_MATMULS, *OF_CODES) and IN_CHUNKS not in n.meta]


def logits_of(product: Node, gradient: Set[Node]) -> Logits | None:
    """The result of a matmul as logits; None where no softmax reads it.

    Args:
        product: the matmul.
        gradient: all nodes of the graph that depend on a gradient from outside.

    Raises:
        Declined: a softmax reads it, but not every reader can be computed in chunks.
    """
    walk = None if product in gradient else _Walk(product, gradient)
    return walk.found() if walk and walk.is_softmax else None


class _Walk:
    """From a matmul's result to everything that reads it."""

    def __init__(self, product: Node, gradient: Set[Node]) -> None:
        self.product, self.gradient = product, gradient
        self.axis = {product: 1}
        self.reductions: list[Node] = []
        self.sums: list[Node] = []
        self.parts: list[Node] = []  # that are declined: one of a softmax's rows, a part of its columns
        self.results: list[Node] = []
        self.problem = _reason_against(product)
        self.is_softmax = False
        if any(isinstance(size, torch.SymInt) for size in product.meta["val"].shape):
            self.problem = "the logits' size is symbolic: torch.compile(dynamic=False)"
        columns = product.meta["val"].shape[1]
        self.size = columns if isinstance(columns, int) else -1
        nodes = iter(product.graph.nodes)
        for node in nodes:
            if node is product:
                break
        for node in nodes:
            if any(operand in self.axis for operand in node.all_input_nodes):
                self._visit(node)
        forward = {n for n in self.axis if n not in gradient}
        largest = [r for r in self.reductions if r.target is aten.amax.default]
        self.is_softmax = _is_softmax(forward, largest) or _is_softmax(*_of_parts(self.parts))

    def _visit(self, node: Node) -> None:
        gradient = node in self.gradient
        at = carried(node, self.axis, self.size)
        if at is not None and is_tensor(node):
            self.axis[node] = at
            if ROW in node.meta:
                self._decline(OBSERVED)
            return
        kind = self._kind(node)
        if kind == "rows":
            (self.sums if gradient else self.reductions).append(node)
        elif kind in ("dgrad", "columns") and gradient:
            self.results.append(node)
        elif node.op == "output":
            self._decline(RETURNED)
        elif node.target in PARTS or is_split(node):
            self.parts += [] if gradient else [node]
            self._decline(f"{opname(node)} takes a part of them: compute the loss of all rows and columns at once")
        elif is_view(node):
            self._decline(f"{opname(node)} moves their columns")
        else:
            self._decline(f"{opname(node) or node.name} reads them{' in the backward' * gradient}")

    def _decline(self, reason: str) -> None:
        self.problem = self.problem or reason

    def _kind(self, node: Node) -> str | None:
        """``rows``: a number a row; ``dgrad``: contracts the columns; ``columns``: keeps them and contracts the rows."""
        operand = node.args[0] if node.args else None
        if not isinstance(operand, Node):
            return None
        if operand in self.axis and node.target is aten.gather.default:
            index, last = node.args[2], operand.meta["val"].dim() - 1
            single = isinstance(index, Node) and index.meta["val"].shape[-1] == 1 and index not in self.axis
            return "rows" if node.args[1] in (last, -1) and self.axis[operand] == last and single else None
        if operand in self.axis and node.target in ROW_REDUCTIONS:
            return self._reduction(node, operand)
        if node.target is aten.mm.default:
            return self._matmul(node)
        return None

    def _reduction(self, node: Node, operand: Node) -> str | None:
        rank, at = operand.meta["val"].dim(), self.axis[operand]
        dims = node.args[1] if len(node.args) > 1 else None
        over = [d % rank for d in (dims if isinstance(dims, (list, tuple)) else (dims,)) if isinstance(d, int)]
        if over == [at]:
            return "rows"
        return "columns" if over and at not in over and node.target is aten.sum.dim_IntList else None

    def _matmul(self, node: Node) -> str | None:
        left, right = node.args
        if left in self.axis and right in self.axis:
            return None
        if left in self.axis:
            return "dgrad" if self.axis[left] == 1 else "columns"  # type: ignore[index]
        return "columns" if self.axis[right] == 1 else None  # type: ignore[index]

    def found(self) -> Logits:
        if self.problem:
            raise Declined(self.problem)
        forward = [n for n in self.axis if n not in self.gradient]
        if not self.results and len(forward) < len(self.axis):
            raise Declined("nothing reads their gradient")
        rows, read = rows_of(self.product, forward, self.axis), None
        for reduction in self.reductions:
            of = rows[reduction.args[0]]  # type: ignore[index]
            if read not in (None, of):
                raise Declined("the loss reads the logits' rows in two ways, all of them and some of them")
            read = of
        assert read is not None, "a softmax has a reduction"
        between = self._between(forward)
        statistics = tuple(n for n in self.product.graph.nodes if n in between or n in self.reductions)
        sums, results = tuple(self.sums), tuple(self.results)
        return Logits(self.product, self.axis, read, statistics, sums, results, _form(self, read, forward))

    def _between(self, forward: list[Node]) -> set[Node]:
        """What is computed from statistics and read by a wide value or by another reduction."""
        made = descendants(self.reductions)
        waiting = [o for n in (*forward, *self.reductions) for o in n.all_input_nodes if o in made]
        found = set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in found and node not in self.axis and node not in self.reductions:
                found.add(node)
                waiting += [o for o in node.all_input_nodes if o in made]
        return found


def _is_softmax(forward: set[Node], largest: list[Node]) -> bool:
    """Whether one of these values is an exponential that is relative to the largest of its row."""
    later = descendants(largest)
    return any(n.target is aten.exp.default and n in later for n in forward)


def _of_parts(parts: list[Node]) -> tuple[set[Node], list[Node]]:
    """What is made of parts of logits element by element, and the largest of its rows."""
    found, largest = set(parts), list[Node]()
    for node in parts[0].graph.nodes if parts else ():
        if any(operand in found for operand in node.all_input_nodes):
            if is_elementwise(node) or is_view(node) or is_split(node) or node.target is private.getitem:
                found.add(node)
            elif node.target is aten.amax.default:
                largest.append(node)
    return found, largest


def descendants(nodes: list[Node]) -> set[Node]:
    """All that is computed from these nodes."""
    found, waiting = set[Node](), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _reason_against(product: Node) -> str | None:
    if ROW in product.meta:
        return OBSERVED
    if not numel(product.meta["val"]):
        return "there are no rows"
    operands = [o for o in product.all_input_nodes if is_tensor(o)]
    if product.target in OF_CODES or any(map(_is_decoded, operands)):
        return "Recipe.linears.mode makes the head FP8 or INT8: name its module in linears.skip, or leave that at its default"
    if product.target is aten.addmm.default and numel(operands[0].meta["val"]) != product.meta["val"].shape[1]:
        return "addmm of something else than a bias"
    return "addmm with alpha or beta" if product.kwargs else None


def _is_decoded(operand: Node) -> bool:
    """Whether a matmul's operand is decoded from codes that were put there for it."""
    waiting = [operand]
    while waiting:
        node = waiting.pop()
        if ENCODING in node.meta:
            return True
        waiting += node.all_input_nodes if SPLICED in node.meta or is_view(node) else []
    return False


def _form(walk: _Walk, rows: LogitRows, forward: list[Node]) -> str:
    """Such as "addmm, shifted rows, float32, tanh, amax, sum, gather"."""
    targets = [opname(n) for n in forward if not is_view(n) and n.target is not aten.clone.default]
    words = [*(["some rows"] if rows.slices else []), *targets, *map(opname, walk.reductions)]
    return ", ".join(dict.fromkeys(word.replace("convert_element_type", "cast") for word in words))
