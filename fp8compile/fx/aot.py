"""What AOTAutograd's descriptors (``meta["desc"]``) say of a graph's inputs and outputs: no other file reads them.

A joint graph takes parameters, buffers, data and tangents, and returns outputs and gradients. A forward and a backward have
the same descriptors. A graph that is not a whole model, a nested region, has none until ``describe_joint`` gives it some.
AOTAutograd takes a tensor subclass (DTensor) apart. Each of its inner tensors counts as what the whole is: a parameter, a
tangent, a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import computed_from_any

FORWARD, BACKWARD = "forward", "backward"


def descriptor(node: Node) -> Any:
    """The descriptor of an input, for an inner tensor that of the whole; None where there is none."""
    return _of_whole(node.meta.get("desc"))


def output_descriptors(graph: Graph) -> list[Any]:
    """The descriptors of what a graph returns, in its order, for inner tensors those of the whole; empty without any."""
    return [_of_whole(desc) for desc in graph.output_node().meta.get("desc") or ()]


def _of_whole(desc: Any) -> Any:
    while isinstance(desc, (private.SubclassGetAttrAOTInput, private.SubclassGetAttrAOTOutput)):
        desc = desc.base
    return desc


def is_tangent(node: Node) -> bool:
    """Whether an input of a joint graph is the gradient of one of the model's outputs."""
    return isinstance(descriptor(node), private.TangentAOTInput)


def computed_from_gradients(graph: Graph) -> set[Node]:
    """The values of a joint graph, or of a backward, that are computed from gradients of the model's outputs, and these."""
    return computed_from_any(filter(is_tangent, graph.find_nodes(op="placeholder")))


def is_training(graph: Graph) -> bool:
    """Whether a joint graph has a backward; an inference graph takes no tangents."""
    return any(map(is_tangent, graph.find_nodes(op="placeholder")))


def is_parameter(node: Node, positions: Collection[int] = ()) -> bool:
    """Whether an input is a parameter: AOTAutograd says so, or it stands at one of these positions of a Dynamo graph."""
    return isinstance(descriptor(node), private.ParamAOTInput) or plain_position(node) in positions


def plain_position(node: Node) -> int | None:
    """The position among the Dynamo graph's inputs of one that is no parameter by itself; None for any other node."""
    desc = descriptor(node)
    return desc.idx if isinstance(desc, private.PlainAOTInput) else None


def is_token(node: Node) -> bool:
    """Whether an input only orders side effects; such inputs come first, and static indices do not count them."""
    return isinstance(descriptor(node), private.ForwardTokenAOTInput)


def position(desc: Any) -> int | None:
    """The position of an input or output that has one; None for a parameter by name, a tangent, ..."""
    found = getattr(_of_whole(desc), "idx", None)
    return found if isinstance(found, int) else None


def result_position(desc: Any) -> int | None:
    """The position of one of the Dynamo graph's results; None for what a forward returns beside these, and for gradients."""
    desc = _of_whole(desc)
    return int(desc.idx) if isinstance(desc, private.PlainAOTOutput) else None


def differentiated(tangent: Node) -> int | None:
    """The position of the Dynamo graph's result that a tangent is the gradient of; None for an input that is overwritten."""
    return result_position(descriptor(tangent).output)


def overwritten_input(desc: Any) -> Any:
    """The descriptor of the input that a forward returns to have it written back; None for any other output."""
    desc = _of_whole(desc)
    return desc.mutated_input if isinstance(desc, private.InputMutationAOTOutput) else None


def describe_joint(
    graph: Graph,
    primals: Sequence[Node],
    tangents: Sequence[Node],
    parameters: Collection[int],
    trained: Collection[int] | None = None,
) -> None:
    """Give a joint graph the descriptors of a whole model's graph.

    ``parameters`` are positions among ``primals``, ``trained`` of those whose gradients it returns last, by default all.
    """
    for i, node in enumerate(primals):
        node.meta["desc"] = private.ParamAOTInput(str(i)) if i in parameters else private.PlainAOTInput(i)
    for i, node in enumerate(tangents):
        node.meta["desc"] = private.TangentAOTInput(private.PlainAOTOutput(i))
    out = graph.output_node()
    results: Any = out.args[0]
    of = primals if trained is None else [primals[i] for i in trained]
    own = [private.PlainAOTOutput(i) for i in range(len(results) - len(of))]
    out.meta["desc"] = [*own, *(private.GradAOTOutput(n.meta["desc"]) for n in of)]


def describe_backward(graph: Graph, tangents: Sequence[Node], results: Sequence[Any]) -> None:
    """Give a backward its descriptors: which inputs are tangents, and what it returns (``output_descriptors``)."""
    for i, node in enumerate(tangents):
        node.meta["desc"] = private.TangentAOTInput(private.PlainAOTOutput(i))
    graph.output_node().meta["desc"] = list(results)


def missing_gradient(graph: Graph, of: Node) -> int | None:
    """The position of an input's gradient among a joint graph's outputs where None stands there; None where a node does."""
    inputs = [n for n in graph.find_nodes(op="placeholder") if not is_tangent(n)]
    outputs: Any = graph.output_node().args[0]
    at = len(outputs) - len(inputs) + inputs.index(of)
    return at if outputs[at] is None else None


def return_at(graph: Graph, at: int, node: Node) -> None:
    """Let a graph return ``node`` at this position."""
    out = graph.output_node()
    outputs: Any = out.args[0]
    out.args = (type(outputs)([*outputs[:at], node, *outputs[at + 1 :]]),)


def gradients(graph: Graph) -> Iterator[tuple[Any, Node]]:
    """For each gradient that a joint or backward graph returns: the descriptor of its input, and the node."""
    outputs: Any = graph.output_node().args[0]
    for desc, node in zip(output_descriptors(graph), outputs, strict=False):
        if isinstance(desc, private.GradAOTOutput) and isinstance(node, Node):
            yield desc.grad_of, node
