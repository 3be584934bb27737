"""How one saved value is stored, or why it stays as it is: what ``encode_saved`` places, decided on both graphs.

exact    masks as bits, integers that are proven to be small in fewer bytes
left     no floating-point activation, small, a statistic, in FP32 on purpose, without an argument that gradients answer
         its error with a small one (``fp8compile/analysis/sensitivity``)
a byte   in the recipe's format, or by use (``format.py``)
fewer    what ``Recipe.saved.bits`` chose for the value, else what the recipe names for all (``bits_by_use.py``)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.analysis.dataflow import Source, is_activation, sources, user_fp32
from fp8compile.analysis.norms import itself
from fp8compile.analysis.sensitivity import OF_A_CODE, Sensitivity, Unbounded
from fp8compile.analysis.sensitivity.foreign import higher_order_use
from fp8compile.analysis.softmax import softmax_dim
from fp8compile.analysis.statistics import is_statistic
from fp8compile.fx.graph import (
    EXACT,
    SPLICED,
    WIDENED,
    Encoding,
    computed_from_any,
    dtype_text,
    encoding_of,
    numel,
    storage_root,
)
from fp8compile.fx.ops import opname
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.numerics import E4M3, ENCODABLE, INT8, Groupwise
from fp8compile.numerics.few_bits import FEW_BITS, FewBits
from fp8compile.numerics.groups import Groups
from fp8compile.recipe.context import Context
from fp8compile.recipe.saved_bits import ONE_BYTE, WHOLE, SavedValue
from fp8compile.saved.about import About, about
from fp8compile.saved.attention_result import is_read_by_attention, tokens_of
from fp8compile.saved.bits_by_use import few_bits_of
from fp8compile.saved.codec import belongs_to_attention, codec_for, format_name
from fp8compile.saved.format import is_compared_with_zero
from fp8compile.saved.integers import in_fewer_bytes, is_wide_integer
from fp8compile.saved.keys import keys_of
from fp8compile.saved.masks import as_bits, is_mask
from fp8compile.saved.rows import row_dims_of
from fp8compile.saved.sides import Sides, sides_of
from fp8compile.saved.stored import Stored

ROUNDS = "a code would round it, and Recipe.saved.format is 'exact'"
STEEP = "a steep function of it in the backward"
ADDS = "adds {:.1e} to the gradients' error"
KEPT = "Recipe.saved.bits keeps it exact: 8 bits add {:.1e} to the gradients' error"
NOT_KEPT = "normalised with statistics that do not outlive the forward as they are"
SIGNS = "normalised, and its sign is taken in the backward: a code of its deviation does not keep it"
NOT_CHOSEN = "not among the values of Recipe.saved.bits"


@dataclass(frozen=True)
class Unencoded:
    """Of a saved tensor that stays as it is: the reason for the report, or the encoding that a matmul's operand has already;
    neither where another entry tells of it."""

    reason: str = ""
    operand: Encoding | None = None


class Judge:
    """Knows both graphs; decides how one saved tensor is stored, or why it must stay as it is."""

    def __init__(self, split: PartitionedGraph, ctx: Context) -> None:
        self.ctx = ctx
        self.sources = sources(split.fw.graph, split.static)
        self.user_fp32 = user_fp32(split.fw.graph, split.static)
        self.sensitivity = Sensitivity(split)
        self._edges: dict[Node, Sides | None] = {}
        self.keys = keys_of(split, ctx) if ctx.measures_saved or ctx.recipe.saved.bits != "off" else {}

    def decide(self, edge: SavedTensor) -> Stored | Unencoded:
        """How it is stored, or that it stays as it is."""
        if encoding := encoding_of(edge.forward):
            return Unencoded(operand=encoding)
        if self.ctx.is_scales(edge.forward):
            return Unencoded()
        is_amax = (
            SPLICED in edge.forward.meta
            and EXACT not in storage_root(edge.forward).meta
            and (is_statistic(edge.forward) or opname(edge.forward) == "scatter_reduce")
        )
        if not self.ctx.recipe.stores_saved or is_amax:
            return Unencoded()  # the amax of a matmul's operand belongs to its codes
        if (exactly := self._exactly(edge)) is not None:
            return exactly
        if reason := self._reason_to_leave(edge):
            return Unencoded(reason)
        found = self._in_a_byte(edge)
        stored = found if isinstance(found, str) else self._stored_as(edge, *found)
        return Unencoded(stored) if isinstance(stored, str) else stored

    def choices(self, edge: SavedTensor) -> dict[str, Stored]:
        """Every way to store a value, by name, from the fewest bits on; none where it stays as it is in any case."""
        decided = self.decide(edge)
        if not isinstance(decided, Stored) or decided.is_exact:
            return {}
        found = self._in_a_byte(edge)
        assert isinstance(found, tuple)
        if (known := self._about(edge)) is not None and known.scale is not None:
            return {}  # an error that is measured beside other values of a group says nothing of one in deviations
        few = {name: self._in_few(edge, found[0], bits) for name, bits in sorted(FEW_BITS.items())}
        made = {name: Stored(codec) for name, (codec, _) in few.items() if codec and codec.bits == FEW_BITS[name]}
        # Measured beside other values of a group: what statistics and sides add to that is left out.
        return {**made, ONE_BYTE: dataclasses.replace(self._in_groups(edge, *found), about=None, sides=None)}

    def was_chosen(self, edge: SavedTensor) -> SavedValue | None:
        """What ``Recipe.saved.bits`` says of a value; None where it says nothing."""
        bits = self.ctx.recipe_at(_path(edge)).saved.bits
        return None if bits == "off" or edge.forward not in self.keys else bits.find(self.keys[edge.forward])

    def _stored_as(self, edge: SavedTensor, codec: Groupwise, why: str) -> Stored | str:
        """In the bits that are chosen for this value, or for all; the reason where codes take too long."""
        recipe, chosen = self.ctx.recipe_at(_path(edge)), self.was_chosen(edge)
        if chosen is not None and chosen.chosen == WHOLE:
            return KEPT.format(dict(chosen.choices)[ONE_BYTE].error)
        name = chosen.chosen if chosen else format_name(edge, recipe)
        note = ADDS.format(chosen.error) if chosen else NOT_CHOSEN if recipe.saved.bits != "off" else ""
        few, more = self._in_few(edge, codec, FEW_BITS[name]) if name in FEW_BITS else (None, "")
        note = more if chosen and more else _joined(more, note)
        return Stored(few, note, about=self._about(edge)) if few else self._in_groups(edge, codec, _joined(why, note))

    def _in_few(self, edge: SavedTensor, codec: Groupwise, bits: int) -> tuple[FewBits | None, str]:
        """The codec of so many bits or the fewest above that the value may have, and why it has more; None: a byte."""
        if codec.format is not INT8:
            return None, ""
        groups = Groups(self.ctx.recipe_at(_path(edge)).saved.group_size, row_dims_of(edge))
        return few_bits_of(edge.backward, bits, groups, self.sensitivity, belongs_to_attention(edge))

    def _in_groups(self, edge: SavedTensor, codec: Groupwise, why: str) -> Stored:
        """In a byte, about its statistics, or, where the backward answers to sizes alone, with what else is known of it."""
        sides = self._sides(edge, codec)
        if (known := self._about(edge)) is not None:
            return Stored(codec, why, about=known, sides=sides)
        dim, tokens = softmax_dim(edge.forward), tokens_of(edge.forward)
        if not is_read_by_attention(edge.backward) or codec.format is not INT8:
            tokens = None  # E4M3 is chosen for what counts by its own size, not by its distance from another value
        if dim is None and tokens is None:
            return Stored(codec, why, sides=sides)
        if not self.sensitivity.needs_no_range(edge.backward, codec.format):
            return Stored(codec, why, sides=sides)
        return Stored(codec, why, dim, tokens)

    def _in_a_byte(self, edge: SavedTensor) -> tuple[Groupwise, str] | str:
        """The first codec whose errors the backward answers with small ones, and why that; else the first one's reason."""
        reasons = []
        for codec, why in self._codecs(edge):
            if (reason := self._reason_against(edge, codec)) is None:
                return codec, why
            reasons.append(reason)
        return reasons[0]

    def _codecs(self, edge: SavedTensor) -> Iterator[tuple[Groupwise, str]]:
        """The recipe's codec; then E4M3's, if the recipe leaves the choice."""
        recipe = self.ctx.recipe_at(_path(edge))
        name = format_name(edge, recipe)
        codec, why = codec_for(edge, recipe)
        if self._is_about_a_mean(edge) and name != "e4m3":
            codec, why = Groupwise(INT8, recipe.saved.group_size, row_dims=row_dims_of(edge)), ""
        yield codec, why
        if (name == "auto" or name in FEW_BITS) and codec.format is not E4M3:
            yield Groupwise(E4M3, recipe.saved.group_size, row_dims=row_dims_of(edge)), STEEP

    def _reason_against(self, edge: SavedTensor, codec: Groupwise) -> str | None:
        """Why a value must not be stored so.

        About a mean, E4M3 is no way out for what is steep: its errors are larger than INT8's, and not relative to the value.
        """
        if self._is_about_a_mean(edge) and not self._keeps_signs(edge, codec):
            return SIGNS
        error = OF_A_CODE if (known := self._about(edge)) is None else known.error
        return self.sensitivity.reason_to_stay_exact(edge.backward, codec.format, error)

    def _reason_to_leave(self, edge: SavedTensor) -> str | None:
        return (
            (EXACT in storage_root(edge.forward).meta and "the backward computes the logits again from it")
            or self._not_an_activation(edge)
            or self._left_by_recipe(edge)
            or (not self.ctx.recipe_at(_path(edge)).saved.rounds and ROUNDS)
            or (is_statistic(edge.forward) and "a statistic: small beside its tensor, and everything depends on it")
            or (
                WIDENED in storage_root(edge.forward).meta
                and "in an FP32 island: its range is what the island is for"
            )
            or self._no_norm_s_storage(edge)
            or (edge.forward in self.user_fp32 and "the user computes this in FP32 inside a 16-bit model")
            or higher_order_use(edge.backward)
            or None
        )

    def _no_norm_s_storage(self, edge: SavedTensor) -> str | None:
        try:
            self._about(edge)
        except Unbounded as reason:
            return str(reason)
        return None

    def _about(self, edge: SavedTensor) -> About | None:
        norm = self.sensitivity.norms.get(itself(edge.forward))
        if norm is None:
            return None
        found = about(norm, edge.forward, Groups(self.ctx.recipe_at(_path(edge)).saved.group_size, row_dims_of(edge)))
        split = self.sensitivity.split
        given = [
            root for node in (found.statistics if found else ()) if (root := storage_root(node)).op == "placeholder"
        ]
        if not all(map(split.costs_nothing_to_keep, given)):
            raise Unbounded(NOT_KEPT)  # the caller's statistics, which the backward would read changed, or as codes
        return found

    def _is_about_a_mean(self, edge: SavedTensor) -> bool:
        return (known := self._about(edge)) is not None and known.mean is not None

    def _keeps_signs(self, edge: SavedTensor, codec: Groupwise) -> bool:
        """Whether all signs that the backward takes of a value are kept, though its zero is no code's."""
        sides = self._sides(edge, codec)
        return not is_compared_with_zero(edge.backward, sides.comparisons if sides else ())

    def _sides(self, edge: SavedTensor, codec: Groupwise) -> Sides | None:
        """The edges whose side this codec's codes keep: INT8's, found once for a value."""
        if codec.format is not INT8:
            return None

        def of_others() -> set[Node]:
            return computed_from_any(value for value in self._maybe_codes if value is not edge.backward)

        if edge.backward not in self._edges:
            self._edges[edge.backward] = sides_of(edge.backward, of_others, self.sensitivity.recomputed)
        return self._edges[edge.backward]

    @cached_property
    def _maybe_codes(self) -> list[Node]:
        """The backward's inputs that may be codes: all but those that are left for what they are."""
        ours = (edge for edge in self.sensitivity.split.edges if edge.is_tensor)
        return [e.backward for e in ours if encoding_of(e.forward) or not self._reason_to_leave(e)]

    def _not_an_activation(self, edge: SavedTensor) -> str | None:
        made, value = edge.forward, edge.forward.meta["val"]
        if not private.is_plain_fake(value):
            return f"a {type(value).__name__}, not a plain tensor"
        if not value.dtype.is_floating_point and not value.dtype.is_complex:
            return f"{dtype_text(value)}: integers that nothing bounds and RNG states are exact"
        if value.dtype not in ENCODABLE:
            return f"{dtype_text(value)} is left alone"
        if few := self._has_few(edge):
            return few
        source = self.sources[made]
        if not is_activation(source):
            return "made from parameters alone" if Source.PARAMETER in source else "a table or mask: no data in it"
        return None

    def _has_few(self, edge: SavedTensor) -> str | None:
        least = self.ctx.recipe_at(_path(edge)).saved.min_numel
        return f"fewer than {least} elements" if numel(edge.forward.meta["val"]) < least else None

    def _exactly(self, edge: SavedTensor) -> Stored | Unencoded | None:
        """Masks, as bits or with the reason; integers that are proven to be small; None for all else."""
        if not private.is_plain_fake(edge.forward.meta["val"]) or not (is_mask(edge) or is_wide_integer(edge)):
            return None
        if reason := self._left_by_recipe(edge) or self._has_few(edge):
            return Unencoded(reason)
        stored = as_bits(edge) if is_mask(edge) else in_fewer_bytes(edge, self.sensitivity.forward_ranges)
        return Unencoded(stored) if isinstance(stored, str) else stored

    def _left_by_recipe(self, edge: SavedTensor) -> str | None:
        path = _path(edge)
        if reason := self.ctx.skip_reason(path, "saved.format", ("skip",)):
            return reason
        if self.ctx.recipe_at(path).saved.attention or not belongs_to_attention(edge):
            return None
        return "Recipe.saved.attention is off"


def _joined(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def _path(edge: SavedTensor) -> str:
    """The module the value was made in, as the report names it."""
    return edge.info.origin.module
