"""The partitioned graph: a forward, a backward, and the tensors that go from one to the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile import _torch as private
from fp8compile.fx.aot import descriptor, gradients, is_token, overwritten_input, position
from fp8compile.fx.graph import is_on_host, is_size, is_tensor, nbytes, storage_root
from fp8compile.fx.ops import is_mutating
from fp8compile.fx.order import sink_weights
from fp8compile.fx.provenance import TensorInfo

NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"  # stashed on ctx: AOTAutograd counts these markers, order kept


@dataclass(frozen=True)
class SavedTensor:
    """One value saved for backward: ``forward`` in the forward graph, ``backward``, a placeholder of the backward graph."""

    forward: Node
    backward: Node
    desc: Any = None

    @property
    def is_tensor(self) -> bool:
        return is_tensor(self.forward)

    @cached_property
    def info(self) -> TensorInfo:
        """The facts of it that reports give, if it is a tensor."""
        return TensorInfo.of(self.forward)

    @property
    def in_order(self) -> tuple[Node, ...]:
        """The places that use the value, in the order of the backward graph."""
        position = {node: i for i, node in enumerate(self.backward.graph.nodes)}
        return tuple(sorted(self.backward.users, key=position.__getitem__))


class PartitionedGraph:
    """Forward and backward graph with the edges between them, in AOTAutograd's order; edit, then call ``finish()``.

    AOTAutograd passes saved values by position: the forward returns (user outputs, values, symbolic sizes), the
    backward takes (symbolic sizes, values, tangents ...). Values keep their order here and so keep their meaning:
    tensors, then tensors saved without a version check, then opaque objects, then RNG states.
    """

    def __init__(self, fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, static_inputs: list[int]) -> None:
        self.fw, self.bw = fw, bw
        self._out = fw.graph.output_node()
        outputs: list[Any] = list(self._out.args[0])  # type: ignore[arg-type]
        descs = list(self._out.meta.get("desc") or [None] * len(outputs))
        self.user_outputs, self._returned_descs = outputs[:num_fwd_outputs], descs[:num_fwd_outputs]
        kept = list(zip(outputs[num_fwd_outputs:], descs[num_fwd_outputs:], strict=False))
        self._sizes = [(node, desc) for node, desc in kept if is_size(node)]
        values = [(node, desc) for node, desc in kept if not is_size(node)]
        takes = bw.graph.find_nodes(op="placeholder")[len(self._sizes) :]
        self.edges = [SavedTensor(made, used, desc) for (made, desc), used in zip(values, takes, strict=False)]
        self.inputs = fw.graph.find_nodes(op="placeholder")
        tokens = sum(map(is_token, self.inputs))
        self.static = {self.inputs[tokens + i] for i in static_inputs}
        self.needs_grad = _inputs_with_gradient(self.inputs, bw)
        self.to_spend_us = 0.0  # on keeping less, of what rewrites are predicted to save; less what was spent

    def caller_owns(self, root: Node) -> bool:
        """Whether a storage outlives the forward anyway: a parameter, a buffer, or data the caller passed in."""
        return root.op == "placeholder" and (root in self.static or root not in self.needs_grad)

    def costs_nothing_to_keep(self, node: Node) -> bool:
        """Whether the backward may read a value without saving it: parameters and the caller's data, unless the forward
        overwrites them (a norm's bias, say); and dropout's seeds, one number each."""
        if node.target is torch.ops.prims.inductor_seeds.default:
            return True
        return (
            node.op == "placeholder" and is_tensor(node) and self.caller_owns(node) and node not in self.overwritten
        )

    @cached_property
    def overwritten(self) -> frozenset[Node]:
        """Inputs whose memory holds another value after the forward, because in-place changes are written back into them."""
        written = [n.args[0] for n in self.fw.graph.nodes if n.op == "call_function" and is_mutating(n) and n.args]
        returned = {overwritten_input(desc) for desc in self._returned_descs} - {None}
        roots = {storage_root(n) for n in written if isinstance(n, Node)}
        return frozenset(n for n in self.inputs if n in roots or descriptor(n) in returned)

    def may_be_codes(self, edge: SavedTensor) -> bool:
        """Whether a saved value is a floating-point tensor of the graph's own, of which nobody else keeps the exact one."""
        if not edge.is_tensor or not edge.forward.meta["val"].is_floating_point():
            return False
        return not self.caller_owns(storage_root(edge.forward))

    def belongs_to(self, made: Node) -> str:
        """Which of the graph's inputs or results a value shares its memory with: "input 3", "output 0", or ""."""
        root = storage_root(made)
        if root.op == "placeholder":
            index = position(descriptor(root))
            return "" if index is None else f"input {index}"
        for node, desc in zip(self.user_outputs, self._returned_descs, strict=True):
            if isinstance(node, Node) and storage_root(node) is root and position(desc) is not None:
                return f"output {position(desc)}"
        return ""

    def saved_bytes(self) -> int:
        """Bytes that stay alive on the device for the backward: distinct storages, without those that the caller owns."""
        roots = {storage_root(e.forward) for e in self.edges if e.is_tensor}
        return sum(nbytes(r.meta["val"]) for r in roots if not self.caller_owns(r) and not is_on_host(r))

    def replace(self, edge: SavedTensor, *made_and_used: tuple[Node, Node]) -> None:
        """Save other values instead of ``edge``, whose placeholder must have no users left."""
        at = self.edges.index(edge)
        new = [SavedTensor(made, used, edge.desc) for made, used in made_and_used]
        if edge.forward.meta.get(NO_VERSION_CHECK):
            for value in new:
                value.forward.meta[NO_VERSION_CHECK] = True
        self.edges[at : at + 1] = new
        self.bw.graph.erase_node(edge.backward)

    def add_beside(self, edge: SavedTensor, made: Node, used: Node) -> SavedTensor:
        """Save one more value, made like ``edge``, for an input of the backward that ``placeholder`` made."""
        added = SavedTensor(made, used, edge.desc)
        self.edges.insert(self.edges.index(edge), added)
        if edge.forward.meta.get(NO_VERSION_CHECK):
            made.meta[NO_VERSION_CHECK] = True
        return added

    def save(self, late: Node, made: Node, beside: SavedTensor) -> SavedTensor:
        """Save a value ``made`` in the forward, like ``beside``, for those that read ``late`` in the backward."""
        used = self.placeholder(beside, made)
        late.replace_all_uses_with(used)
        return self.add_beside(beside, made, used)

    def compute_again(self, edge: SavedTensor, late: Node) -> None:
        """The inverse of ``save``, before ``drop_unread``."""
        edge.backward.replace_all_uses_with(late)
        self.replace(edge)

    def drop_unread(self) -> None:
        """Compute and save nothing that the backward does not read."""
        self.bw.graph.eliminate_dead_code()
        for edge in [edge for edge in self.edges if edge.is_tensor and not edge.backward.users]:
            self.replace(edge)

    def keep_instead(self, edge: SavedTensor, made: Node) -> None:
        """Save another value of the forward instead of ``edge``, for the same input of the backward."""
        used = self.placeholder(edge, made)
        edge.backward.replace_all_uses_with(used)
        self.replace(edge, (made, used))

    def placeholder(self, edge: SavedTensor, made: Node, part: str = "") -> Node:
        """A new input of the backward graph, beside that of ``edge``, for a value made in the forward.

        Inductor asks its name and its meta whether it is an input of the forward, and then whether that stays in its place in
        memory: what is of the forward's own making must not pass for one.
        """
        name = f"{edge.backward.name}_{part}" if part else made.name
        if name.startswith(private.INPUTS) and made.op != "placeholder":
            name = f"kept_{name}"
        with self.bw.graph.inserting_before(edge.backward):
            node = self._input(name)
        node.meta = {key: made.meta[key] for key in ("val", private.STATIC_INPUT) if key in made.meta}
        return node

    def _input(self, name: str) -> Node:
        """A new input of the backward graph. Python code that is written from a graph calls an input by its target and all
        else by name, so its target must be no other node's name."""
        node: Node = self.bw.graph.placeholder(name)
        node.target = node.name
        return node

    def keep(self, made: Node, name: str) -> Node:
        """Save one more value for the backward, before all others; returns the backward graph's input for it."""
        inputs = self.bw.graph.find_nodes(op="placeholder")
        first = self.edges[0].backward if self.edges else inputs[len(self._sizes)]
        with self.bw.graph.inserting_before(first):
            used = self._input(name)
        used.meta = {"val": made.meta["val"]}
        self.edges.insert(0, SavedTensor(made, used, next((e.desc for e in self.edges if e.desc), None)))
        return used

    def keep_size(self, made: Node) -> Node:
        """The backward's input for a number of the forward: the one that it has already, or a new one."""
        inputs: list[Node] = self.bw.graph.find_nodes(op="placeholder")
        value = made.meta["val"]
        for i, (node, _) in enumerate(self._sizes):
            if statically_known_true(node.meta["val"] == value):
                return inputs[i]
        with self.bw.graph.inserting_before(inputs[len(self._sizes)]):
            new: Node = self._input(made.name)
        new.meta = {"val": value}
        self._sizes.append((made, next((desc for _, desc in self._sizes if desc), None)))
        return new

    @property
    def results(self) -> tuple[Any, ...]:
        """What the forward returns once ``finish`` has run."""
        return (*self.user_outputs, *(e.forward for e in self.edges), *(node for node, _ in self._sizes))

    def finish(self, sinks_weights: bool = False) -> None:
        """Write the edges back as the forward's outputs and make both graphs consistent.

        ``sinks_weights`` moves what is made of parameters alone to where it is read (fp8compile/fx/order.py).
        """
        takes = self.bw.graph.find_nodes(op="placeholder")[len(self._sizes) :]
        assert takes[: len(self.edges)] == [edge.backward for edge in self.edges], "saved in another order than taken"
        edges = [
            (e.forward, dataclasses.replace(e.desc, idx=i) if e.desc else None) for i, e in enumerate(self.edges)
        ]
        sizes = [
            (node, dataclasses.replace(desc, idx=len(edges) + i) if desc else None)
            for i, (node, desc) in enumerate(self._sizes)
        ]
        self._out.args = (self.results,)
        if "desc" in self._out.meta:
            self._out.meta["desc"] = [*self._returned_descs, *(desc for _, desc in edges + sizes)]
        self._out.meta["output_stack_traces"] = [
            n.meta.get("stack_trace") if isinstance(n, Node) else None for n in self._out.args[0]
        ]
        for module in (self.fw, self.bw):
            module.graph.eliminate_dead_code()
        if sinks_weights:
            of_weights = sink_weights(self.fw.graph, self.static)
            sink_weights(self.bw.graph, {edge.backward for edge in self.edges if edge.forward in of_weights})
        for module in (self.fw, self.bw):
            module.graph.lint()
            module.recompile()


def _inputs_with_gradient(inputs: list[Node], bw: GraphModule) -> set[Node]:
    described = {desc for desc, _ in gradients(bw.graph)}
    return {node for node in inputs if descriptor(node) in described}
