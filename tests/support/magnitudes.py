"""How large a gradient is before its terms cancel: the root of the sum of their squares, carried through the backward.

A layer norm's gradient of its own sum of squares is 0, the difference of two terms of size 1. An error of 1 % of a term is
infinite beside it, and small beside the terms. No byte holds such a gradient: its error is judged beside its terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.sensitivity import responses as R
from tests.support.wide import Wide

aten, prims = torch.ops.aten, torch.ops.prims


class Magnitudes(Wide):
    """Runs a backward graph in float64; ``squares`` holds, for each floating-point value, the squares of its size."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.squares: dict[Node, Tensor] = {}

    def sizes_of(self, *inputs: Any) -> list[Tensor | None]:
        """The size of each output, of the output's shape; None where it is no floating-point tensor."""
        self.run(*inputs)
        outputs: Any = self.module.graph.output_node().args[0]
        return [self.squares[n].sqrt() if n in self.squares else None for n in outputs]

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.squares[n] = torch.maximum(result.square(), self._of_terms(n))
        return result

    def _of_terms(self, n: Node) -> Tensor:
        """By its operands', where it is a sum, a product or a move of them; else 0: it is as large as it is."""
        op = packet(n) if n.op == "call_function" else None
        if op in R.ADDITIONS:
            terms = [self._factor(a) for a in n.args]
            return terms[0] + sum(float(n.kwargs.get("alpha", 1)) ** 2 * term for term in terms[1:])  # type: ignore[arg-type]
        if op in R.PRODUCTS:
            return n.target(*map(self._factor, n.args))  # type: ignore[operator, no-any-return]
        if op is R.DIV:
            return self._square(n.args[0]) / torch.as_tensor(self._value(n.args[1])).square()
        if op is aten.mean:
            mean = n.target(*map(self._square, n.args), **n.kwargs)  # type: ignore[operator]
            return mean * mean.numel() / self.env[n.args[0]].numel()  # type: ignore[index, no-any-return]
        if n.target is prims.convert_element_type.default:
            return self._square(n.args[0])
        if op in R.CONTRACTIONS | R.CHOICES | R.JOINS | R.SUMS | R.MOVES:
            return n.target(*map(self._square, n.args), **n.kwargs)  # type: ignore[operator, no-any-return]
        return torch.zeros(())

    def _value(self, argument: Any) -> Any:
        return self.env[argument] if isinstance(argument, Node) else argument

    def _square(self, argument: Any) -> Any:
        """A tensor's squares; what is no floating-point tensor as it is."""
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(self._square, argument))
        return self.squares.get(argument, self._value(argument)) if isinstance(argument, Node) else argument

    def _factor(self, argument: Any) -> Any:
        """The squares of a tensor or of a number that is a term or a factor."""
        return argument**2 if isinstance(argument, (int, float)) else self._square(argument)
