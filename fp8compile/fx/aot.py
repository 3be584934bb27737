"""What AOTAutograd says of a graph's inputs and outputs, by its descriptors."""

from __future__ import annotations

from torch.fx import Graph, Node


def is_tangent(node: Node) -> bool:
    """Whether an input of a joint graph is the gradient of one of the model's outputs."""
    return type(node.meta.get("desc")).__name__ == "TangentAOTInput"


def is_training(graph: Graph) -> bool:
    """Whether a joint graph has a backward; an inference graph takes no tangents."""
    return any(map(is_tangent, graph.find_nodes(op="placeholder")))


FORWARD, BACKWARD = "forward", "backward"
