"""The pipeline: which passes run on which graph, in which order, and why there.

Each pass is listed as one that ``preserves`` numbers or one that ``changes`` them; the first line of its own docstring says
the same (tests/compiler/test_pipeline.py). ``hooks.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fp8compile.passes.chunk_logits import chunk_logits
from fp8compile.passes.compress_collectives import compress_collectives
from fp8compile.passes.copy_overwritten import copy_overwritten
from fp8compile.passes.cut_for_bytes import cut_for_bytes
from fp8compile.passes.encode_saved import encode_saved
from fp8compile.passes.mark_saved import mark_saved
from fp8compile.passes.measure_operands import measure_operands
from fp8compile.passes.observe_forward import observe_forward
from fp8compile.passes.observe_gradients import observe_gradients
from fp8compile.passes.offload_codes import offload_codes
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.passes.recompute_for_budget import recompute_for_budget
from fp8compile.passes.recompute_kept import recompute_kept
from fp8compile.passes.saturate_gradients import saturate_gradients
from fp8compile.passes.save_normalised import save_normalised
from fp8compile.passes.save_sums import save_sums
from fp8compile.passes.share_casts import share_casts
from fp8compile.passes.spell_out_alpha import spell_out_alpha
from fp8compile.passes.store_residuals import store_residuals
from fp8compile.passes.sum_bias_gradients import sum_bias_gradients
from fp8compile.passes.widen_unsafe_ops import widen_unsafe_ops


class Pass(NamedTuple):
    """``run(graph, context)``, or ``run(split, context)`` on two halves; and whether it changes what a model computes."""

    run: Callable[..., Any]
    changes_numbers: bool

    @property
    def name(self) -> str:
        """The name that switches it off."""
        return self.run.__name__


def preserves(run: Callable[..., Any]) -> Pass:
    """A pass that leaves every number as it was."""
    return Pass(run, changes_numbers=False)


def changes(run: Callable[..., Any]) -> Pass:
    """A pass that changes some numbers: those it rounds, widens or clips."""
    return Pass(run, changes_numbers=True)


# On joint and inference graphs, before Inductor's own passes, under every recipe. A mend of Inductor, so nothing to report.
BEFORE_PATTERNS = (preserves(spell_out_alpha),)

# On a graph with 16-bit values, before all others: a value that is FP32 then is not watched for overflow, not computed by an
# FP8 linear, and not stored in FP8.
ISLANDS = (changes(widen_unsafe_ops),)

# On the joint graph, where forward and backward are both visible.
JOINT = (
    preserves(share_casts),  # before the linears, which encode every distinct operand
    changes(quantize_linears),  # before the cut, so that it sees codes, which are cheaper to save
    preserves(chunk_logits),  # behind the linears, whose report tells of the head's matmuls as the model has them
)

# On the joint graph where the recipe compresses collectives, before JOINT, whose linears encode what arrives.
WIRE = (changes(compress_collectives),)

# On a joint graph that has the extra inputs (fp8compile/observe/slot.py), before JOINT.
OBSERVE_JOINT = (
    changes(saturate_gradients),  # before a linear encodes what must be clipped
    preserves(observe_gradients),  # behind the clip, so that only one of the two values is stored
)

# Where a joint graph whose recipe rewrites anything is cut in two: what is saved is chosen.
CUT = preserves(cut_for_bytes)

# Then, on the two halves.
PARTITION = (
    preserves(save_sums),  # first, while the sum stands beside what was saved
    preserves(recompute_kept),  # on exact values: fewer tensors are left to encode
    preserves(save_normalised),  # then what would be computed again, from what are codes soon, and must not be
    changes(recompute_for_budget),  # what is still saved, at the bytes that it will take
    changes(encode_saved),  # last: whatever is still saved is stored as codes
)

# In the place of PARTITION's last where ``calibrate_bits`` measures.
MEASURED = preserves(mark_saved)  # what would be stored stays exact

# On the two halves where the recipe offloads, behind PARTITION: codes are what goes to the host.
OFFLOAD = (preserves(offload_codes),)

# On the two halves of a graph that overwrites its inputs, under every recipe, before PARTITION.
SOUND = (preserves(copy_overwritten),)  # what is recomputed must be made from values that were read

# Last of all on the two halves of a graph that OBSERVE_JOINT has marked, under every recipe.
OBSERVE_FORWARD = (preserves(observe_forward),)

# On the two halves of a graph that takes known scales, behind PARTITION, so that measuring has no say in what is saved.
DELAYED = (preserves(measure_operands),)

# On each half by itself, after Inductor's own post-grad passes: rewrites that fuse better, with nothing to report.
POST_GRAD = (
    preserves(sum_bias_gradients),
    preserves(store_residuals),  # last: it marks nodes, and the others would replace them
)
