"""Numbers change: linears multiply FP8 or INT8 codes in all three matmuls (forward, dgrad, wgrad), with scales from tensors
themselves (current scaling).

A codec goes on both operands of every matmul of a linear; *a matmul of two decoded operands is a scaled matmul*:
``_scaled_mm`` where the device has FP8 matrix units, else decode-then-multiply with ``Recipe.linears.emulate``. A value is
encoded once for each format and scaling axis and shared by all its uses: q, k and v read one encoding, the wgrad reads
the forward's. With tensorwise scales that encoding is of the value itself, whatever view of it a matmul takes.

Formats: E4M3 for activations and weights; gradients in E5M2 ("hybrid") or E4M3 ("e4m3"), or as named for dgrad and wgrad.
``linears="int8"`` has INT8 for all, scales along rows, and ``_int_mm`` (linears/integer_matmuls.py). Scales of blocks
("blockwise", "mxfp8") are emulated only: linears/block_operands.py. Grouped matmuls of experts have E4M3 and
scales of rows, from the tensors themselves, under "tensorwise", "rowwise" and "auto": linears/expert_matmuls.py.

Left as they are, each with its reason in the report: the output head (by path, marked by the user, tied to an embedding, or
the last linear of a whole model with four times as many outputs as inputs), what the user put in FP32 inside a 16-bit
model, FP32 islands, routers, weights whose sides are not multiples of 16 (``_scaled_mm`` takes no others; LoRA), batched
matmuls of parameters, float64 and complex, inputs without rows, devices without such units unless emulated; with
``linears="auto"``, what FP8 is not predicted to pay for.

A value that a nonlinear operation needs for its backward too is saved once, as *its* codes (groupwise, see encode_saved). The
wgrad encodes the decoded value again under the forward's scale. A value that only matmuls need is saved as their codes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, Node

from fp8compile.analysis.linears import Matmul
from fp8compile.fx.aot import is_training
from fp8compile.fx.ops import FORWARD
from fp8compile.fx.provenance import Origin, TensorInfo, module_path, op_name, source_line
from fp8compile.linears.block_operands import BlockOperands, in_blocks
from fp8compile.linears.cached_weights import CachedWeights
from fp8compile.linears.expert_matmuls import ExpertMatmuls
from fp8compile.linears.expert_reasons import OPAQUE, opaque_experts
from fp8compile.linears.known_scales import KnownScales
from fp8compile.linears.merged_dgrads import MergedDgrads
from fp8compile.linears.operands import Operands
from fp8compile.linears.plan import ApplyGrouped, Leave, plan_linears, tensorwise_operands
from fp8compile.linears.products import rewrite, rewrite_in_blocks
from fp8compile.linears.row_blocks import take_in_blocks
from fp8compile.linears.smooth_swiglu import SmoothSwiglu
from fp8compile.linears.weight_amaxes import take_scales_at_once
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import LINEAR, Linear, Notes, Skip


def quantize_linears(graph: Graph, ctx: Context) -> Notes:
    """Make every matmul of a linear a matmul of codes, or say why not."""
    if not ctx.recipe.quantizes_linears or not is_training(graph):
        return Notes()  # in inference the model computes as it is written
    scales, weights = KnownScales.of(graph, ctx), CachedWeights(graph, ctx)
    operands = Operands(graph, scales, weights, stores_dear=not ctx.recipe.limits_memory)
    plan = plan_linears(graph, ctx, delayed=scales is not None)
    smooth = SmoothSwiglu(operands, plan)
    take_in_blocks(*tensorwise_operands(plan.applied))
    take_scales_at_once(graph, plan.applied)
    merged = MergedDgrads(operands, plan.applied)
    blocks = BlockOperands(graph, operands)
    experts = ExpertMatmuls(graph, operands)
    linears, skips = list[Linear](), list[Skip]()
    for each in plan.decisions:
        matmul = each.matmul
        info = _info(matmul.node, matmul.forward)
        note = smooth.notes.get(matmul.node, "") + merged.notes.get(matmul.node, "")
        if isinstance(each, Leave):
            skips.append(Skip(info, each.reason, LINEAR, matmul.direction))
            continue
        if isinstance(each, ApplyGrouped):
            linears.append(_entry(info, matmul, experts.rewrite(matmul, each.recipe)))
            continue
        if in_blocks(each.recipe):
            formats = rewrite_in_blocks(each, blocks)
        else:
            formats = rewrite(each, operands, at_once=matmul.node not in merged.taken)
        linears.append(_entry(info, matmul, formats + note, *each.us))
    skips += [Skip(_info(node, node), OPAQUE, LINEAR, FORWARD) for node in opaque_experts(graph)]
    merged.rewrite()
    if scales:
        scales.promise()
    return Notes(linears=tuple(linears), skips=tuple(skips), weights=weights.entries())


def _entry(info: TensorInfo, matmul: Matmul, formats: str, *us: float) -> Linear:
    M, K, N = map(_size, (matmul.M, matmul.K, matmul.N))
    return Linear(info, matmul.direction, M, K, N, formats, *us)


def _info(node: Node, forward: Node) -> TensorInfo:
    """A matmul's result; its origin is the linear's forward."""
    where = Origin(op_name(forward), module_path(forward), source_line(forward))
    return dataclasses.replace(TensorInfo.of(node), origin=where)


def _size(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(size)
