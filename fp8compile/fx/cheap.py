"""Operations whose results a backward makes again rather than keep: views, pointwise ones, and moves of rows.

All of them are deterministic; none is a reduction or a matmul. ``GATHER`` is one where it takes rows by their numbers.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fp8compile.fx.graph import AGAIN, is_tensor
from fp8compile.fx.ops import SEEDED, VIEWS

aten, prims = torch.ops.aten, torch.ops.prims

GATHER = aten.index.Tensor

CHEAP = (
    VIEWS
    | SEEDED
    | {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.abs.default,
        aten.exp.default,
        aten.erf.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.relu.default,
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.reciprocal.default,
        aten.pow.Tensor_Scalar,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.where.self,
        *(getattr(aten, name).Scalar for name in ("gt", "ge", "lt", "le")),
        aten.logical_not.default,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.bitwise_not.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.clone.default,
        aten.cat.default,
        aten.div.Tensor_mode,
        aten.full.default,
        GATHER,
        aten.scalar_tensor.default,
        aten.log.default,
        aten.log1p.default,
        prims.convert_element_type.default,
    }
)


# Of whole numbers alone: a comparison of others is a mask that, made again, would keep them exact.
OF_INTEGERS = {
    *(getattr(aten, name).Scalar for name in ("eq", "ne")),
    *(getattr(aten, name).Tensor for name in ("eq", "ne", "gt", "ge", "lt", "le")),
}


def is_cheap(node: Node) -> bool:
    """Whether a node may be computed once more. Gathers by a mask have as many rows as it has ones, and may not."""
    if node.target is GATHER and any(n.meta["val"].dtype is torch.bool for n in node.all_input_nodes[1:]):
        return False
    if node.target in OF_INTEGERS:
        return not any(n.meta["val"].is_floating_point() for n in node.all_input_nodes if is_tensor(n))
    return node.op == "call_function" and (node.target in CHEAP or AGAIN in node.meta)
