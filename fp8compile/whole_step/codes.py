"""Codes of weights in a whole step: its forward and backward read them, its updates write those of the new weights over them.

    codes, codes transposed, inv_scale      inputs of the graph (``Recipe.linears.cache_weights``)
    update of a weight                      new weight, its codes under a scale known before the step, amax by group
    behind it, still of the update          what the next step's scale is made of; whether a value was clipped
    a kernel of its own                     the codes transposed

Numbers are those of an optimizer with ``weight_codes=True`` (fp8compile/optim/code_writer.py). Codes are written in place: a
backward of another call that is still to come finds them overwritten, as it finds the weights, and autograd says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.optim.plan import Tensors
from fp8compile.optim.step_codes import Wanted


@dataclass(frozen=True)
class Coded:
    """What the update of one weight takes to write its codes.

    Attributes:
        wanted: the codes that it writes.
        tensors: by name (fp8compile/optim/step_codes.py), what it reads and overwrites.
    """

    wanted: Wanted
    tensors: Tensors
