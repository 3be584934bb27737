"""Numbers stay as they are. Cuts the joint graph so that fewer bytes are saved; no matmul or attention is recomputed.

Upstream's min-cut stays underneath: it also functionalises RNG state, honours checkpoint tags and higher-order
operators. One of its bans is lifted: "a node that is materialised in the backward is never recomputed". That ban saves the
time of writing a norm's output a second time, but costs the memory of keeping every norm output, silu(gate) * up and cast
weight (a Llama layer: 16.1 U saved with the ban, 11.4 U without; U = batch * sequence * hidden * 2 bytes).
Where a step's time counts, plain Inductor's cut stays, and ``recompute_kept`` asks what is worth that time.
The bans on recomputing matmuls, attention and random numbers, values used far apart, and long chains stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fp8compile import _torch as private


def cut_for_bytes(
    gm: GraphModule, joint_inputs: Sequence[object], kwargs: Mapping[str, Any]
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward graph; ``kwargs`` are what Inductor hands to a partitioner."""
    with private.functorch_config.patch(ban_recompute_materialized_backward=False):
        fw, bw = private.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    return fw, bw
