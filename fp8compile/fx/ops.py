"""Sets of operators, and what one node is: a view, a cast, pointwise, a reduction, a matmul."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fp8compile import _torch as private

aten, prims = torch.ops.aten, torch.ops.prims

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
CAST = prims.convert_element_type.default
CASTS = (CAST, aten._to_copy.default)

# Views that keep every element once, and their order.
RESHAPES = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
TRANSPOSES = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
PARTS = frozenset({aten.diagonal.default, aten.select.int, aten.slice.Tensor, aten.unfold.default})
VIEWS = RESHAPES | TRANSPOSES | PARTS | {aten.as_strided.default, aten.expand.default}

FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"  # the matmuls of a linear (analysis/linears.py)

# Matmuls and convolutions, by name: kernels that are called, not generated.
MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_int_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "convolution",
    "convolution_backward",
)


def opname(node: Node) -> str:
    """``mm`` for aten.mm.default, without the overload; "" for a node that calls no operator."""
    return getattr(node.target, "_opname", "")


def argument_of(node: Node, name: str, default: Any = None) -> Any:
    """An operator's argument by the name that its schema gives it; ``default`` where it is not given."""
    return arguments_of(node).get(name, default)


def arguments_of(node: Node) -> dict[str, Any]:
    """What an operator is given, by the names of its schema; without what is left to its default."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def is_collective(node: Node) -> bool:
    """Whether a node exchanges values with other ranks, or waits for them."""
    return getattr(node.target, "namespace", "") == private.COLLECTIVES


def is_matmul(node: Node) -> bool:
    """Whether a node multiplies matrices or convolves."""
    return opname(node) in MATMULS


def is_attention(node: Node) -> bool:
    """Whether a node is fused attention or its backward, on any device."""
    return "attention" in opname(node)


def is_mutating(node: Node) -> bool:
    """Whether an operation changes one of its operands in place."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable)


def draws_random_numbers(node: Node) -> bool:
    """Whether a second call of an operation has another result, since a generator moves on. Attention without dropout draws
    none, whatever its schema says."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not (is_attention(node) and argument_of(node, "dropout_p", 0.0) == 0.0)


def is_random_state(node: Node) -> bool:
    """Whether a node is the state of a generator, which a checkpoint keeps for a random operation that it repeats.

    A vector of bytes. Its length is the generator's own: symbolic where Dynamo traces it, and the same in every run.
    """
    made = node.args[0] if node.target is private.getitem and node.args[1] == 0 else None
    return isinstance(made, Node) and made.target is torch.ops.higher_order.run_and_save_rng_state


def is_of_attention(node: Node) -> bool:
    """Whether a node is attention, also as a higher-order operator (flex), or one of its results."""
    while node.target is private.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return "attention" in str(node.target)


def contracts(node: Node) -> bool:
    """Whether a node is a matmul, a convolution or attention: a kernel that is not generated."""
    return is_matmul(node) or is_attention(node)


def is_view(node: Node) -> bool:
    """Whether the node shares its (first) argument's storage."""
    return node.op == "call_function" and node.target in VIEWS


# Numbers that no tensor is read for: one that is alike has the same value.
CONSTANTS = (aten.full.default, aten.scalar_tensor.default)

# Lowered as pointwise by Inductor, though not tagged so.
POINTWISE = {
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.embedding.default,
    aten.full.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.scalar_tensor.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.view.dtype,
    prims.iota.default,
    prims.inductor_lookup_seed.default,
    prims.inductor_random.default,
    prims.inductor_seed.default,
    prims.inductor_seeds.default,
}

# With its seed kept, dropout's random numbers are a pure function of it, in the code that Inductor generates and node by node
# (fp8compile/compiler/seeded_random.py).
SEEDED = frozenset({prims.inductor_lookup_seed.default, prims.inductor_random.default})

REDUCTIONS = ("prepare_softmax_online", "var_mean", "argmax", "argmin")

# The reductions in norms, softmax and variances: each gives one number that a whole row depends on.
STATISTICS = ("sum", "mean", "amax", "amin", "var_mean", "var", "logsumexp", "prepare_softmax_online")
# Norms as one operation, in graphs that are not decomposed: the result, then the statistics of its rows.
FUSED_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm")

# Operations that add up or multiply many elements, and so leave FP16's range first.
ACCUMULATIONS = (
    "sum",
    "mean",
    "prod",
    "cumsum",
    "cumprod",
    "norm",
    "linalg_vector_norm",
    "var",
    "index_put",
    "scatter_add",
)

SPLITS = ("split", "split_with_sizes", "unbind", "chunk")  # tuples of views


def is_split(node: Node) -> bool:
    """Whether a node is a tuple of views."""
    return opname(node) in SPLITS


def is_pointwise(node: Node) -> bool:
    """Whether each element of the result depends on one element of each operand."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or node.target in POINTWISE)


def is_reduction(node: Node) -> bool:
    """Whether the operation sums, or takes the largest, along dimensions."""
    return torch.Tag.reduction in getattr(node.target, "tags", ()) or opname(node) in REDUCTIONS


def is_generated(node: Node) -> bool:
    """Whether Inductor generates a kernel for an operation, which may hold others too."""
    return is_pointwise(node) or is_reduction(node)


def computed_from(node: Node, *, parts: bool = False) -> Iterator[Node]:
    """What a value is computed from through pointwise operations and views, up to and including the first that is neither.

    ``parts``: through parts of tuples of views too.
    """
    passes = is_view_or_part if parts else is_view
    seen, open_ = {node}, [node]
    while open_:
        for parent in open_.pop().all_input_nodes:
            if parent not in seen:
                yield parent
                open_ += [parent] if is_pointwise(parent) or passes(parent) else []
            seen.add(parent)


def readers(node: Node) -> Iterator[Node]:
    """The nodes that read a value, through views and parts of tuples."""
    for user in node.users:
        if is_view(user) or user.target is private.getitem:
            yield from readers(user)
        else:
            yield user


def is_read_from_memory(node: Node, but: Node | None = None) -> bool:
    """Whether a value has a reader, other than ``but``, that does not recompute it: a matmul, for example, or the caller."""
    readers = (u for u in node.users if u is not but)
    return any(is_read_from_memory(u, but) if is_view_or_part(u) else not is_generated(u) for u in readers)


def is_view_or_part(node: Node) -> bool:
    parent = node.args[0] if node.args else None
    return is_view(node) or is_split(node) or (isinstance(parent, Node) and is_split(parent))
