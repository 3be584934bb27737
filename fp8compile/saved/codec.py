"""Which codec the recipe names for a saved value."""

from __future__ import annotations

from torch.fx import Node

from fp8compile.analysis.linears import BATCHED
from fp8compile.fx.graph import SPLICED, storage_root
from fp8compile.fx.ops import is_of_attention, is_view
from fp8compile.fx.partition import SavedTensor
from fp8compile.numerics import E4M3, INT8, Groupwise
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.format import format_by_use
from fp8compile.saved.rows import row_dims_of


def format_name(edge: SavedTensor, recipe: Recipe) -> str:
    """What the recipe names for a value's format."""
    return recipe.saved.attention_format if belongs_to_attention(edge) else recipe.saved.format


def codec_for(edge: SavedTensor, recipe: Recipe) -> tuple[Groupwise, str]:
    """The storage that the recipe names for this tensor (few bits: "auto"), and why where that depends on the tensor."""
    name = format_name(edge, recipe)
    by_name = {"e4m3": (E4M3, ""), "int8": (INT8, "")}
    fmt, why = by_name.get(name) or format_by_use(edge.forward, edge.backward)
    return Groupwise(fmt, recipe.saved.group_size, row_dims=row_dims_of(edge)), why


def belongs_to_attention(edge: SavedTensor) -> bool:
    """Whether a tensor is an operand or the result of fused attention, or of the batched matmuls it is made of."""
    return is_of_attention(storage_root(edge.forward)) or _feeds_attention(edge.backward)


def _feeds_attention(value: Node) -> bool:
    users = [
        u for u in value.users if u.target not in BATCHED or SPLICED not in u.meta
    ]  # what we transpose is no attention
    return any(is_of_attention(u) or u.target in BATCHED or (is_view(u) and _feeds_attention(u)) for u in users)
