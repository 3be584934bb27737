"""Numbers change: gradients are computed from rounded activations; the forward's results stay as they are.

Each tensor saved for backward is stored as one-byte codes with a scale per group (COAT's groupwise storage), encoded where
it is made and decoded where it is first used, so that Inductor fuses the one into its producer and the other into its
consumers; where the recipe names six bits or fewer, as so many bits, right on average, if the gradients are linear in it
or smooth (``fp8compile/encoding/bits_by_use.py``). Error per element: the format's (``fp8compile.numerics.quantize``); for
E4M3 at most 1/16 of the element, for INT8 at most 1/254 of its group's largest. The recipe names the format, by default by
use (``fp8compile/encoding/saved_format.py``). What is proven to be a softmax's result (``fp8compile/analysis/softmax.py``)
is divided by its sum when it is decoded (``fp8compile/numerics/unit_sums.py``): at most twice the error of an element, and
rows of the softmax's gradient sum to zero. Of fused attention's result it is the distance from the mean of its tokens that
is encoded (``fp8compile/numerics/centring.py``), which is what its backward depends on.

Left as they are, each with its reason in the report: what is not a floating-point activation (integers, masks, RNG states,
tables, values made from parameters alone), small tensors, statistics of norms and softmax, float64 and complex, what the
user put in FP32 inside a 16-bit model, FP32 islands, operands of higher-order operators, what the recipe says to leave, and
every tensor for which it cannot be argued that the gradients answer its error with a small one
(``fp8compile/analysis/sensitivity``).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.analysis.dataflow import Source, is_activation, sources, user_fp32
from fp8compile.analysis.linears import BATCHED
from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.analysis.softmax import softmax_dim
from fp8compile.budget.placing import move_views_to_their_operand
from fp8compile.encoding.attention_cost import price_of
from fp8compile.encoding.attention_result import is_read_by_attention, tokens_of
from fp8compile.encoding.bits_by_use import few_bits_of
from fp8compile.encoding.paying import device_name, rates_for
from fp8compile.encoding.saved_format import format_by_use
from fp8compile.encoding.stored import Stored
from fp8compile.fx.graph import (
    EXACT,
    SAVED_AS_CODES,
    SPLICED,
    WIDENED,
    Encoding,
    dtype_text,
    encoding_of,
    insertion_point_after,
    is_tensor,
    memory_order,
    nbytes,
    numel,
    splice,
    storage_root,
)
from fp8compile.fx.ops import FUSED_NORMS, STATISTICS, is_attention, is_of_attention, is_view, opname
from fp8compile.fx.partition import NO_VERSION_CHECK, PartitionedGraph, SavedTensor
from fp8compile.fx.regions import saves_itself
from fp8compile.numerics import E4M3, ENCODABLE, INT8, Codec, Format, Groupwise, GroupwiseBest
from fp8compile.numerics.few_bits import FEW_BITS, FewBits
from fp8compile.numerics.formats import OPERANDS
from fp8compile.planning.device_rates import RATES
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Notes, Saved, Skip

UNKNOWN = (
    "saved_attention='auto' knows no rates of {device}: name a device in Recipe.device_rates ({known}), or set "
    "saved_attention to True or False"
)
STEEP = "a steep function of it in the backward"


def encode_saved(split: PartitionedGraph, ctx: Context) -> Notes:
    """Store every saved activation as codes, or say why not."""
    judge = _Judge(split, ctx)
    ours = [edge for edge in split.edges if saves_itself(split, edge)]
    decided = [(edge, judge.decide(edge)) for edge in ours]  # on one graph, for all
    notes = Notes()
    for edge, decision in decided:
        if isinstance(decision, Encoding):
            notes += Notes(saved=_codes_of_a_matmul(edge, decision))
        elif isinstance(decision, str):
            notes += Notes(skips=(Skip(edge.info, decision),))
        elif decision is not None:
            storage_root(edge.forward).meta[SAVED_AS_CODES] = True
            if ctx.recipe.limits_memory:
                move_views_to_their_operand(edge.forward)
            notes += Notes(saved=(_encode(split, edge, decision),))
    return notes


def predicted_bytes(split: PartitionedGraph, ctx: Context) -> dict[Node, int]:
    """For each storage that ``encode_saved`` would store as codes, the bytes that these take."""
    judge = _Judge(split, ctx)
    decided = [(edge, judge.decide(edge)) for edge in split.edges if saves_itself(split, edge)]
    codes = [(edge, decision) for edge, decision in decided if isinstance(decision, Stored)]
    return {storage_root(edge.forward): stored.nbytes(numel(edge.forward.meta["val"])) for edge, stored in codes}


def _format_name(edge: SavedTensor, recipe: Recipe) -> str:
    return recipe.attention_format if _belongs_to_attention(edge) else recipe.saved_format


def codec_for(edge: SavedTensor, recipe: Recipe) -> tuple[Codec, str]:
    """The storage that the recipe names for this tensor (few bits: "auto"), and why where that depends on the tensor."""
    name = _format_name(edge, recipe)
    if name == "best_of_two":
        return GroupwiseBest(recipe.group_size), ""
    by_name = {"e4m3": (E4M3, ""), "int8": (INT8, "")}
    fmt, why = by_name.get(name) or format_by_use(edge.forward, edge.backward)
    return Groupwise(fmt, recipe.group_size), why


class _Judge:
    """Knows both graphs; decides how one saved tensor is stored, or why it must stay as it is."""

    def __init__(self, split: PartitionedGraph, ctx: Context) -> None:
        self.ctx = ctx
        self.sources = sources(split.fw.graph, split.static)
        self.user_fp32 = user_fp32(split.fw.graph, split.static)
        self.sensitivity = Sensitivity(split)

    def decide(self, edge: SavedTensor) -> Encoding | Stored | str | None:
        """The encoding a matmul's operand already has; or how it is stored; or the reason to leave it; None: no entry."""
        if encoding := encoding_of(edge.forward):
            return encoding
        if self.ctx.is_scales(edge.forward):
            return None
        is_amax = (
            SPLICED in edge.forward.meta and EXACT not in storage_root(edge.forward).meta and _statistic(edge.forward)
        )
        if not self.ctx.recipe.stores_saved or is_amax:
            return None  # the amax of a matmul's operand belongs to its codes
        if reason := self._reason_to_leave(edge):
            return reason
        found = self._codec(edge)
        return found if isinstance(found, str) else self._stored(edge, *found)

    def _stored(self, edge: SavedTensor, codec: Codec | FewBits, why: str) -> Stored:
        """With what is known of the value besides, where the backward answers to sizes alone."""
        if isinstance(codec, FewBits):
            return Stored(codec, why)
        dim, tokens = softmax_dim(edge.forward), tokens_of(edge.forward)
        if not is_read_by_attention(edge.backward) or _formats(codec) != (INT8,):
            tokens = None  # E4M3 is chosen for what counts by its own size, not by its distance from another value
        if dim is None and tokens is None:
            return Stored(codec, why)
        if not all(self.sensitivity.needs_no_range(edge.backward, fmt) for fmt in _formats(codec)):
            return Stored(codec, why)
        return Stored(codec, why, dim, tokens)

    def _codec(self, edge: SavedTensor) -> tuple[Codec | FewBits, str] | str:
        """The recipe's codec if the backward answers its errors with small ones; else E4M3's, if it may be chosen."""
        recipe = self.ctx.recipe_at(_path(edge))
        codec, why = codec_for(edge, recipe)
        formats = _formats(codec)
        reasons = [reason for fmt in formats if (reason := self.sensitivity.reason_to_stay_exact(edge.backward, fmt))]
        name = _format_name(edge, recipe)
        if not reasons and name in FEW_BITS and formats == (INT8,):
            asked = (FEW_BITS[name], recipe.group_size)
            few, why = few_bits_of(edge.backward, *asked, self.sensitivity, _belongs_to_attention(edge))
            return few or codec, why
        if not reasons:
            return codec, why
        by_use = name == "auto" or name in FEW_BITS
        if not by_use or formats == (E4M3,) or self.sensitivity.reason_to_stay_exact(edge.backward, E4M3):
            return reasons[0]
        return Groupwise(E4M3, recipe.group_size), STEEP

    def _reason_to_leave(self, edge: SavedTensor) -> str | None:
        return (
            (EXACT in storage_root(edge.forward).meta and "the backward computes the logits again from it")
            or self._not_an_activation(edge)
            or self._left_by_recipe(edge)
            or (_statistic(edge.forward) and "a statistic: small beside its tensor, and everything depends on it")
            or (
                WIDENED in storage_root(edge.forward).meta
                and "in an FP32 island: its range is what the island is for"
            )
            or (edge.forward in self.user_fp32 and "the user computes this in FP32 inside a 16-bit model")
            or _higher_order_use(edge.backward)
            or None
        )

    def _not_an_activation(self, edge: SavedTensor) -> str | None:
        made, value = edge.forward, edge.forward.meta["val"]
        if not private.is_plain_fake(value):
            return f"a {type(value).__name__}, not a plain tensor"
        if not value.dtype.is_floating_point and not value.dtype.is_complex:
            return f"{dtype_text(value)}: integers, masks, indices and RNG states are exact"
        if value.dtype not in ENCODABLE:
            return f"{dtype_text(value)} is left alone"
        if numel(value) < (least := self.ctx.recipe_at(_path(edge)).min_saved_numel):
            return f"fewer than {least} elements"
        source = self.sources[made]
        if not is_activation(source):
            return "made from parameters alone" if Source.PARAMETER in source else "a table or mask: no data in it"
        return None

    def _left_by_recipe(self, edge: SavedTensor) -> str | None:
        path = _path(edge)
        if reason := self.ctx.skip_reason(path, "saved", ("skip",)):
            return reason
        recipe = self.ctx.recipe_at(path)
        if recipe.saved_attention is True or not _belongs_to_attention(edge):
            return None
        return _does_not_pay(edge, recipe) if recipe.saved_attention else "Recipe.saved_attention is off"


def _formats(codec: Codec) -> tuple[Format, ...]:
    return (codec.format,) if isinstance(codec, Groupwise) else (E4M3, INT8)


def _path(edge: SavedTensor) -> str:
    """The module the value was made in, as the report names it."""
    return edge.info.origin.module


def _statistic(made: Node) -> bool:
    """Whether a value is a pointwise function of a reduction's result, of that result's own size."""
    node, size = made, numel(made.meta["val"])
    while node.op == "call_function":
        parent = node.args[0] if node.args else None
        if node.target is private.getitem and isinstance(parent, Node) and _gives_statistics(parent):
            return bool(node.args[1] != 0)  # the first is the result of attention or of a norm
        if opname(node) in STATISTICS:
            return _largest_operand(node) > size
        same = [n for n in node.all_input_nodes if not is_tensor(n) or numel(n.meta["val"]) == size]
        if not same:
            return False
        node = same[0]
    return False


def _gives_statistics(node: Node) -> bool:
    return is_attention(node) or opname(node) in FUSED_NORMS


def _largest_operand(node: Node) -> int:
    return max(
        (numel(n.meta["val"]) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)), default=0
    )


def _belongs_to_attention(edge: SavedTensor) -> bool:
    """Whether a tensor is an operand or the result of fused attention, or of the batched matmuls it is made of."""
    return is_of_attention(storage_root(edge.forward)) or _feeds_attention(edge.backward)


def _does_not_pay(edge: SavedTensor, recipe: Recipe) -> str | None:
    """Why a tensor of attention's is not stored under "auto"; None where storing it pays."""
    device = edge.forward.meta["val"].device
    rates = rates_for(device, recipe)
    if rates is None:
        return UNKNOWN.format(device=device_name(device), known=", ".join(RATES))
    price = price_of(edge, recipe.group_size, rates)
    return None if price.pays else price.reason(rates.name)


def _feeds_attention(value: Node) -> bool:
    users = [
        u for u in value.users if u.target not in BATCHED or SPLICED not in u.meta
    ]  # what we turn is no attention
    return any(is_of_attention(u) or u.target in BATCHED or (is_view(u) and _feeds_attention(u)) for u in users)


def _higher_order_use(value: Node) -> str | None:
    for user in value.users:
        if isinstance(user.target, torch._ops.HigherOrderOperator):
            return f"operand of the higher-order operator {user.target}"
    return None


def _encode(split: PartitionedGraph, edge: SavedTensor, stored: Stored) -> Saved:
    value = edge.forward.meta["val"]
    order, dtype, shape = memory_order(value), value.dtype, value.shape

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        return stored.encode(x, order)

    def decode(*parts: Tensor) -> Tensor:
        return stored.decode(parts, order, shape, dtype)

    made = splice(split.fw.graph, encode, edge.forward, before=insertion_point_after(edge.forward))
    used = [split.placeholder(edge, node, part) for node, part in zip(made, stored.parts, strict=True)]
    decoded = splice(split.bw.graph, decode, *used, before=edge.in_order[0])
    edge.backward.replace_all_uses_with(decoded)
    shared = "" if edge.forward.meta.get(NO_VERSION_CHECK) else split.belongs_to(edge.forward)
    split.replace(edge, *zip(made, used, strict=True))
    after = sum(nbytes(n.meta["val"]) for n in made)
    return Saved(edge.info, after, stored.name, shared)


def _codes_of_a_matmul(edge: SavedTensor, encoding: Encoding) -> tuple[Saved, ...]:
    """Codes that quantize_linears made and only matmuls need: saved as they are. Their scale has no entry of its own."""
    if edge.forward.meta["val"].dtype not in OPERANDS:
        return ()
    exact = dataclasses.replace(edge.info, dtype=encoding.dtype, nbytes=encoding.nbytes)
    return (Saved(exact, edge.info.nbytes, f"{encoding.codec}, a matmul's operand", is_operand=True),)
