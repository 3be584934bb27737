"""Codes of weights in a whole step: its forward and backward read them, its updates write those of the new weights over them.

    codes, codes transposed, inv_scale      inputs of the graph (``Recipe.cache_weights``)
    update of a weight                      new weight, its codes under a scale known before the step, amax by group
    behind it, still of the update          what the next step's scale is made of; whether a value was clipped
    a kernel of its own                     the codes turned

Numbers are those of an optimizer with ``weight_codes=True`` (fp8compile/optim/code_writer.py). Codes are written in place: a
backward of another call that is still to come finds them overwritten, as it finds the weights, and autograd says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fp8compile.optim.plan import Tensors
from fp8compile.optim.step_codes import Wanted
from fp8compile.scaling.packed_weights import Codes
from fp8compile.scaling.weight_slot import WeightCodes

PACKED = "Recipe.merge_dgrads takes codes of several weights as one matrix, which an update does not write"


@dataclass(frozen=True)
class Coded:
    """What the update of one weight takes to write its codes.

    Attributes:
        wanted: the codes that it writes.
        tensors: by name (fp8compile/optim/step_codes.py), what it reads and overwrites.
    """

    wanted: Wanted
    tensors: Tensors


@dataclass(frozen=True)
class Given:
    """The codes that one call of a graph is given.

    Attributes:
        inputs: by position, behind those of Dynamo's graph.
        found: by the weight's position.
    """

    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    found: Mapping[int, Codes] = field(default_factory=dict)

    @classmethod
    def of(cls, codes: WeightCodes | None, args: Sequence[Any]) -> Given:
        """Those of a call with these arguments."""
        if codes is None:
            return cls()
        found = codes.found(args)
        return cls(dict(enumerate(codes.inputs(args, found), len(args))), found)
