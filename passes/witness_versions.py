"""Numbers stay as they are. What eager refuses is refused, although the tensor that was changed is kept as codes only.

    y = f(x); x.mul_(2) or y.mul_(2); y.sum().backward()       RuntimeError: ... modified by an inplace operation

Autograd compares the version of every tensor that it kept with the one it had. Of a tensor stored as codes it has nothing to
compare; codes would give the gradient of the value that was, where eager, and plain Inductor, raise. So the backward is also
handed an empty tensor that shares the version counter (fp8compile/witness.py), of every tensor that the caller can change:
an input of the graph, or what it returns. What lives within the graph nobody else can reach.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fp8compile.context import Context
from fp8compile.graph import SPLICED, is_tensor, place_after, splice, storage_root
from fp8compile.report import Notes
from fp8compile.split import NO_VERSION_CHECK, Split
from fp8compile.witness import witness


def witness_versions(split: Split, ctx: Context) -> Notes:
    """Keep a witness of every tensor of the caller's that is kept as codes."""
    kept = {storage_root(edge.made) for edge in split.edges if edge.is_tensor}
    for value in _callers(split, [node for edge in split.edges for node in _encoded_by(edge.made)]):
        if storage_root(value) not in kept:
            seen = splice(split.fw.graph, witness, value, before=place_after(value))
            split.keep(seen, f"{value.name}_version")
    return Notes()


def _callers(split: Split, encoded: list[Node]) -> list[Node]:
    """Of values that are kept as codes: the inputs that they look at, and what is returned of the same memory."""
    roots = dict.fromkeys(map(storage_root, encoded))
    returned = {storage_root(r): r for r in split.returned if isinstance(r, Node) and is_tensor(r)}
    found = [root if root.op == "placeholder" else returned.get(root) for root in roots]
    plain = torch._subclasses.FakeTensor
    return [v for v in found if v is not None and v not in split.overwritten and type(v.meta["val"]) is plain]


def _encoded_by(made: Node) -> list[Node]:
    """The values of the model's that codes or scales were made from; none for what is kept exactly."""
    if made.meta.get(NO_VERSION_CHECK) or SPLICED not in made.meta:
        return []
    found, seen, waiting = [], {made}, [made]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in seen and is_tensor(node):
                seen.add(node)
                (waiting if SPLICED in node.meta else found).append(node)
    return found
