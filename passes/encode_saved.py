"""Numbers change: gradients are computed from rounded activations; the forward's results stay as they are.

Each tensor saved for backward is stored as one-byte codes with a scale per group (COAT's groupwise storage, groups that end
with their row: ``fp8compile/numerics/groups.py``, ``fp8compile/saved/rows.py``), encoded where
it is made and decoded where it is first used, so that Inductor fuses the one into its producer and the other into its
consumers; where the recipe names six bits or fewer, as so many bits, unbiased, if the gradients are linear in it
or smooth (``fp8compile/saved/bits_by_use.py``). Error per element: the format's (``fp8compile.numerics.quantize``); for
E4M3 at most 1/16 of the element, for INT8 at most 1/254 of its group's largest. The recipe names the format, by default by
use (``fp8compile/saved/format.py``). What is proven to be a softmax's result (``fp8compile/analysis/softmax.py``)
is divided by its sum when it is decoded (``fp8compile/numerics/unit_sums.py``): at most twice the error of an element, and
rows of the softmax's gradient sum to zero. Of fused attention's result it is the distance from the mean of its tokens that
is encoded (``fp8compile/numerics/centring.py``), which is what its backward depends on.

Left as they are, each with its reason in the report: what is not a floating-point activation (integers, RNG states,
tables, values made from parameters alone), small tensors, statistics of norms and softmax, float64 and complex, what the
user put in FP32 inside a 16-bit model, FP32 islands, operands of higher-order operators, what the recipe says to leave, and
every tensor for which it cannot be argued that the gradients answer its error with a small one
(``fp8compile/analysis/sensitivity``).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.fx.graph import (
    SAVED_AS_CODES,
    Encoding,
    insertion_point_after,
    memory_order,
    nbytes,
    splice,
    storage_root,
)
from fp8compile.fx.ops import is_pointwise
from fp8compile.fx.partition import NO_VERSION_CHECK, PartitionedGraph, SavedTensor
from fp8compile.linears.views import later
from fp8compile.memory.placing import move_views_to_their_operand
from fp8compile.numerics.formats import OPERANDS
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes, SavedEntry, Skip
from fp8compile.saved.kept_beside import KeptBeside
from fp8compile.saved.plan import plan_saved
from fp8compile.saved.stored import Stored


def encode_saved(split: PartitionedGraph, ctx: Context) -> Notes:
    """Store every saved activation as codes, or say why not."""
    plan = plan_saved(split, ctx)  # on one graph, for all
    notes = Notes(skips=plan.missing)
    for edge, found in plan.decisions:
        if isinstance(found, Stored):
            storage_root(edge.forward).meta[SAVED_AS_CODES] = True
            if ctx.recipe.limits_memory:
                move_views_to_their_operand(edge.forward)
            notes += Notes(saved=(_encode(split, edge, found, plan.beside),))
        elif found.operand:
            notes += Notes(saved=_codes_of_a_matmul(edge, found.operand))
        elif found.reason:
            notes += Notes(skips=(Skip(edge.info, found.reason),))
    return notes


def _encode(split: PartitionedGraph, edge: SavedTensor, stored: Stored, beside: KeptBeside) -> SavedEntry:
    value = edge.forward.meta["val"]
    order, dtype, shape = memory_order(value), value.dtype, value.shape

    decoded_as = dtype if stored.about is None else torch.float32
    about = stored.about.beside if stored.about else ()
    parts = len(stored.parts)

    def encode(x: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
        return stored.encode(x, order, *beside)

    def decode(*given: Tensor) -> Tensor:
        return stored.decode(given[:parts], order, shape, decoded_as, *given[parts:])

    last = functools.reduce(later, stored.beside, edge.forward)
    made = splice(split.fw.graph, encode, edge.forward, *stored.beside, before=insertion_point_after(last))
    more = beside.nbytes(stored)
    first = edge.in_order[0]
    kept = [beside.in_backward(each, first) for each in about]  # before the codes, as it is among what is saved
    used = [split.placeholder(edge, node, part) for node, part in zip(made, stored.parts, strict=True)]
    decoded = splice(split.bw.graph, decode, *used, *kept, before=first)
    _read_instead(edge, decoded, dtype)
    shared = "" if edge.forward.meta.get(NO_VERSION_CHECK) else split.belongs_to(edge.forward)
    split.replace(edge, *zip(made, used, strict=True))
    after = sum(nbytes(n.meta["val"]) for n in made) + more
    return SavedEntry(edge.info, after, stored.name, shared)


def _read_instead(edge: SavedTensor, decoded: Node, dtype: torch.dtype) -> None:
    """Read what is decoded: in FP32 what computes in FP32, so that a deviation is not rounded beside its mean; else cast."""
    if decoded.meta["val"].dtype is dtype:
        edge.backward.replace_all_uses_with(decoded)
        return

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype)

    wide = [user for user in edge.in_order if is_pointwise(user) and user.meta["val"].dtype is torch.float32]
    for user in wide:
        user.replace_input_with(edge.backward, decoded)
    if edge.backward.users:
        narrow = splice(decoded.graph, cast, decoded, before=insertion_point_after(decoded))
        edge.backward.replace_all_uses_with(narrow)


def _codes_of_a_matmul(edge: SavedTensor, encoding: Encoding) -> tuple[SavedEntry, ...]:
    """Codes that quantize_linears made and only matmuls need: saved as they are. Their scale has no entry of its own."""
    if edge.forward.meta["val"].dtype not in OPERANDS:
        return ()
    exact = dataclasses.replace(edge.info, dtype=encoding.dtype, nbytes=encoding.nbytes)
    return (SavedEntry(exact, edge.info.nbytes, f"{encoding.codec}, a matmul's operand", is_operand=True),)
