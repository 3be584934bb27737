"""A graph as lines of text, one a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

RETURNED = " (returned)"  # marks a result in a folded graph, instead of an edge to the output


@dataclass(frozen=True)
class Line:
    """One node.

    Attributes:
        kind: input, matmul, spliced, other or output.
        value: ``bf16[8, 64]`` or "".
        spliced: for a node that fp8compile put there, the call it is part of: ``encode(tanh)``.
        is_view: whether it computes nothing: a view, or one of several results.
        module, source: where it comes from, as an ``Origin`` has them.
        nbytes: bytes of its value; of several results, together.
        was: for an operation of an FP32 island, the name it had before it was widened.
    """

    name: str
    kind: str
    op: str
    value: str
    arguments: str
    comment: str
    reads: tuple[str, ...]
    spliced: str = ""
    is_view: bool = False
    module: str = ""
    source: str = ""
    nbytes: int = 0
    was: str = ""

    def __str__(self) -> str:
        if self.kind == "output":
            return f"return {self.arguments}"
        value = f"{self.name}: {self.value}" if self.value else self.name
        call = self.op if self.kind == "input" else f"{self.op}({self.arguments})"
        return f"{value} = {call}" + (f"  # {self.comment}" if self.comment else "")


@dataclass(frozen=True)
class GraphPart:
    """One graph of a snapshot: the joint graph, the forward or the backward."""

    title: str
    lines: tuple[Line, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        return Counter(line.op for line in self.lines if line.kind not in ("input", "output"))
