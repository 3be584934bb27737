"""What a recipe hands on from call to call, as inputs of a whole step behind those that Dynamo has captured.

    scales      delayed scaling: those of this step; the gradient of this input are the statistics for the next ones
    codes       of weights (``Recipe.linears.cache_weights``)

A step whose scales are not known yet, the first one or one behind too much clipping, is no whole step: forward, backward and
update run by themselves, and it measures (fp8compile/linears/slot.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.linears.history import Histories
from fp8compile.linears.packed_weights import Codes
from fp8compile.linears.slot import WithScales
from fp8compile.linears.weight_slot import WithWeightCodes
from fp8compile.observe.slot import WithStatsInputs
from fp8compile.whole_step.joined import CannotJoin

TO_FILL = "the recipe gives the graph statistics to fill: fp32.observe=False leaves them out"
MERGED = "Recipe.linears.merge_dgrads takes codes of several weights as one matrix, which an update does not write"


@dataclass(frozen=True)
class Given:
    """What one call of a graph is given.

    Attributes:
        inputs: by position.
        codes: of weights, by the weight's position: by rows, transposed, inv_scale.
        histories: what its scales come from, and its statistics go to; None without delayed scaling.
    """

    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    codes: Mapping[int, Codes] = field(default_factory=dict)
    histories: Histories | None = None


class OwnInputs:
    """Those of one captured graph.

    Args:
        halves: what is called in place of Dynamo's graph; it has no code.

    Attributes:
        graphs: how many were cut: first the one that takes what it is given, then one that measures.
        returns_statistics: whether scales go in, of which the graph has statistics.
        dtypes: what codes are encoded from, by the weight's position.

    Raises:
        CannotJoin: codes that updates do not write.
    """

    def __init__(self, halves: Callable[..., Any]) -> None:
        if isinstance(halves, WithStatsInputs):
            raise CannotJoin(TO_FILL)
        self._scales = halves if isinstance(halves, WithScales) else None
        self.graphs = 1 if self._scales is None else 2
        self.returns_statistics = self._scales is not None and bool(self._scales.operands)
        inner = self._scales.known if self._scales else halves
        self._codes = inner.codes if isinstance(inner, WithWeightCodes) else None
        if self._codes is not None and self._codes.packs:
            raise CannotJoin(MERGED)
        layouts = {} if self._codes is None else self._codes.layouts
        self.dtypes = {at: each.dtype for at, each in layouts.items()}

    def given(self, args: Sequence[Any]) -> Given:
        """Those of a call with these arguments."""
        histories = None if self._scales is None else self._scales.histories.of(args)
        before = [*args] if histories is None else [*args, histories.scales]
        codes = {} if self._codes is None else self._codes.found(before)
        behind = [] if self._codes is None else self._codes.inputs(before, codes)
        inputs = dict(enumerate([*before, *behind]))
        return Given({at: inputs[at] for at in range(len(args), len(inputs))}, codes, histories)

    def measures(self, args: Sequence[Any]) -> Any:
        """What the graph returns, with gradients, if this call has to measure; else None."""
        if self._scales is None or not self.returns_statistics:
            return None
        if not self._scales.histories.of(args).must_measure():
            return None
        with torch.enable_grad():
            return self._scales(*args)
