"""Numbers stay as they are but for the order of sums. Logits are computed in chunks and never exist as a whole, in any dtype.

At 1x8192 tokens the logits of 128k words are 2.1 GB in BF16, their gradient as much again. Between the two nothing is needed
but a few numbers a row: the largest logit, the sum of exponentials, the target's logit. So

    forward   chunks of rows: logits -> these numbers, for all rows             (fp8compile/memory/chunked_rows.py)
    backward  chunks of columns: logits again -> their gradient -> dh, dW, db   (fp8compile/memory/chunked_columns.py)
              before, where the gradient needs a sum over all columns, as an entropy's does:
              chunks of rows: logits again -> these sums, for all rows          (fp8compile/memory/chunked_sums.py)

Price: one more matmul of the head, a third of the head's FLOPs; two where there are such sums. Computing the gradient in the
forward would save it, but needs dW as an FP32 sum over chunks of rows, twice the bytes of dW in BF16, read and written once a
chunk; gradients that are linear in a scalar; and in FP16 gradients that the loss scale has not yet lifted. Here the gradient
of the loss comes first.

No form of a loss is recognised: operations between the logits and what reads them are copied as they stand, so shift, upcast,
scaling, soft-cap, bias, cross-entropy with its options, z-loss, log-probabilities of given tokens and entropies are cases of
one rule (fp8compile/analysis/logits.py). Logits that take no gradient, as a reference model's, have no backward.
Each row's numbers are those of the whole, dW and db too; dh is summed over chunks in FP32 and rounded once.

Legality: every reader of the logits and of what is computed from them is known. Otherwise they stay, with the reason. On the
joint graph, since there the backward's chunks can be tied to the gradient of the loss: the cut cannot move them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.dataflow import Source, is_activation, sources
from fp8compile.analysis.logit_rows import Declined
from fp8compile.analysis.logits import Logits, candidates, logits_of
from fp8compile.fx.aot import is_training
from fp8compile.fx.graph import is_tensor, nbytes
from fp8compile.fx.provenance import TensorInfo, module_path
from fp8compile.memory.chunked_columns import ColumnChunks
from fp8compile.memory.chunked_one_hot import spell_out
from fp8compile.memory.chunked_rows import RowChunks
from fp8compile.memory.chunked_sums import RowSums
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import LOGITS, Chunked, Notes, Skip

CHUNK_BYTES = 2**28  # of logits; a matmul of this size still fills a GPU
LEAST_BYTES = 2**29  # with "auto": logits of fewer bytes are left
MOST_CHUNKS = 64
TILE = 128  # rows and columns of a chunk, as far as there are so many

OFF = "Recipe.memory.chunk_logits is off: with 'auto' they would be computed in {chunks} chunks"


def chunk_logits(graph: Graph, ctx: Context) -> Notes:
    """Compute logits in chunks, or say why not."""
    notes = Notes()
    for product in candidates(graph) if is_training(graph) else ():
        chunks = _chunks(product, ctx)
        if chunks is None:
            continue
        try:
            notes += _of(product, chunks, ctx.parameters_of(graph))
        except Declined as reason:
            notes += Notes(skips=(Skip(TensorInfo.of(product), str(reason), LOGITS),))
    return notes


def _chunks(product: Node, ctx: Context) -> int | None:
    """How many chunks the recipe asks for; negative where it asks for none, but "auto" would; None where that would not."""
    asked = ctx.recipe_at(module_path(product)).memory.chunk_logits
    if isinstance(asked, int):
        return asked
    size = nbytes(product.meta["val"])
    auto = min(-(-size // CHUNK_BYTES), MOST_CHUNKS) if size >= LEAST_BYTES else None
    return -auto if auto and asked == "off" else auto


def _of(product: Node, chunks: int, parameters: set[Node]) -> Notes:
    """What is done to the result of a matmul: nothing, where it is not read as logits are.

    Raises:
        Declined: it is, but cannot be computed in chunks.
    """
    gradient = _gradient(sources(product.graph, parameters))
    logits = logits_of(product, gradient)
    if logits is None:
        return Notes()
    if logits.columns < 2:
        raise Declined("they are of one class")
    by_rows, _ = RowChunks(logits), RowSums(logits, gradient)
    if logits.results:
        ColumnChunks(logits, gradient)
    if chunks < 0:
        raise Declined(OFF.format(chunks=-chunks))
    return _rewrite(logits, by_rows, chunks, parameters)


def _gradient(found: Mapping[Node, Source]) -> set[Node]:
    return {node for node, source in found.items() if Source.GRADIENT in source}


def _rewrite(logits: Logits, by_rows: RowChunks, chunks: int, parameters: set[Node]) -> Notes:
    info, graph = TensorInfo.of(logits.product), logits.product.graph
    rows, columns = _step(by_rows.count, chunks), _step(logits.columns, chunks)
    forward, _ = by_rows.insert(rows)
    sums, backward, made = _backward(logits, rows, columns, parameters) if logits.results else (0, 0, [])
    private.stable_topological_sort(graph)
    whole = {*logits.axis, *logits.statistics, *logits.sums, *logits.results}
    gone = [n for n in graph.nodes if n in whole]
    for node in reversed(gone):
        graph.erase_node(node)
    spell_out(graph, made)
    private.stable_topological_sort(graph)
    share = max(rows / by_rows.count, columns / logits.columns if backward else 0)
    members = tuple(node.name for node in gone)
    return Notes(chunked=(Chunked(info, forward, backward, int(info.nbytes * share), logits.form, members, sums),))


def _backward(logits: Logits, rows: int, columns: int, parameters: set[Node]) -> tuple[int, int, list[Node]]:
    """Put the backward's chunks in: how many of rows and of columns there are, and what else these have made in chunks."""
    graph = logits.product.graph
    private.stable_topological_sort(graph)
    found = sources(graph, parameters)
    first = RowSums(logits, _gradient(found))
    chunks, sums = first.insert_sums(rows, lambda node: _is_kept(node, found[node]))
    private.stable_topological_sort(graph)
    known = sources(graph, parameters)
    by_columns = ColumnChunks(logits, _gradient(known))
    backward = by_columns.insert(columns, lambda node: _is_kept(node, known[node]), sums)
    return chunks, backward, [*by_columns.axis]


def _is_kept(node: Node, source: Source) -> bool:
    """Whether a value of the forward is rounded where it is saved as codes: hidden states, statistics."""
    is_value = is_tensor(node) and node.meta["val"].is_floating_point()
    return is_value and is_activation(source) and Source.GRADIENT not in source


def _step(size: int, chunks: int) -> int:
    """Rows or columns of a chunk."""
    step = -(-size // chunks)
    return -(-step // TILE) * TILE if step >= TILE else step
