"""The pipeline: one list of passes, read downwards. Which graph each runs on, when, and why there.

Each pass is listed as one that ``preserves`` numbers or one that ``changes`` them; the first line of its own docstring says
the same (tests/compiler/test_pipeline.py). ``hooks.py`` walks the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch.fx import Graph

from fp8compile.analysis.linears import GROUPED
from fp8compile.fx.checkpointed import has_regions
from fp8compile.fx.graph import is_tensor
from fp8compile.islands.upcast import holds_sixteen_bit
from fp8compile.passes.call_codecs import call_codecs
from fp8compile.passes.chunk_logits import chunk_logits
from fp8compile.passes.compress_collectives import compress_collectives
from fp8compile.passes.copy_overwritten import copy_overwritten
from fp8compile.passes.cut_for_bytes import cut_for_bytes
from fp8compile.passes.cut_for_time import cut_for_time
from fp8compile.passes.drop_random_states import drop_random_states
from fp8compile.passes.encode_saved import encode_saved
from fp8compile.passes.mark_saved import mark_saved
from fp8compile.passes.measure_operands import measure_operands
from fp8compile.passes.move_router_weights import move_router_weights
from fp8compile.passes.observe_forward import observe_forward
from fp8compile.passes.observe_gradients import observe_gradients
from fp8compile.passes.offload_codes import offload_codes
from fp8compile.passes.part_scales import part_scales
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.passes.recompute_for_budget import recompute_for_budget
from fp8compile.passes.recompute_kept import recompute_kept
from fp8compile.passes.saturate_gradients import saturate_gradients
from fp8compile.passes.save_normalised import save_normalised
from fp8compile.passes.save_softmax import save_softmax
from fp8compile.passes.save_statistics import save_statistics
from fp8compile.passes.save_sums import save_sums
from fp8compile.passes.share_casts import share_casts
from fp8compile.passes.share_sigmoids import share_sigmoids
from fp8compile.passes.shorten_codecs import shorten_codecs
from fp8compile.passes.spell_out_alpha import spell_out_alpha
from fp8compile.passes.store_parts import store_parts
from fp8compile.passes.store_residuals import store_residuals
from fp8compile.passes.store_sums import store_sums
from fp8compile.passes.store_tables import store_tables
from fp8compile.passes.sum_bias_gradients import sum_bias_gradients
from fp8compile.passes.widen_unsafe_ops import widen_unsafe_ops
from fp8compile.recipe.context import Context
from fp8compile.saved.allowance import counts_time


class On(Enum):
    """The graph that a pass runs on, in the order of a compilation."""

    PATTERNS = auto()  # a joint or an inference graph, before Inductor's own passes
    JOINT = auto()  # the same behind them; forward and backward are both visible
    CUT = auto()  # a joint graph that is cut in two
    HALVES = auto()  # forward and backward
    LOWERING = auto()  # each of them by itself, and inference graphs, where code is generated
    POST_GRAD = auto()  # the same, behind Inductor's own post-grad passes


@dataclass(frozen=True)
class Situation:
    """What decides whether a pass runs.

    Attributes:
        graph: the one at hand, the forward of two.
        observed: whether ``observe_gradients`` has marked its joint graph.
        overwrites: whether the forward overwrites some of its inputs.
    """

    ctx: Context
    graph: Graph
    observed: bool = False
    overwrites: bool = False


When = Callable[[Situation], bool]


@dataclass(frozen=True)
class Pass:
    """``run(graph, context)``, or ``run(split, context)`` on two halves; what it runs on and when; whether it changes what a
    model computes."""

    run: Callable[..., Any]
    on: On
    when: When
    changes_numbers: bool

    @property
    def name(self) -> str:
        """The name that switches it off."""
        return self.run.__name__


def always(_: Situation) -> bool:
    return True


def rewrites(at: Situation) -> bool:
    return at.ctx.recipe.rewrites_graph


def stores(at: Situation) -> bool:
    return rewrites(at) and not at.ctx.measures_saved


def saves_bytes(at: Situation) -> bool:
    """Whether it does not matter what that takes; elsewhere ``recompute_kept`` asks for each value."""
    return rewrites(at) and not counts_time(at.ctx, [at.graph])


def saves_time(at: Situation) -> bool:
    return rewrites(at) and not saves_bytes(at)


def measures(at: Situation) -> bool:
    return rewrites(at) and at.ctx.measures_saved


def rewrites_on_a_gpu(at: Situation) -> bool:
    """A graph of which an input is on an NVIDIA GPU."""
    return rewrites(at) and "cuda" in _devices_of_inputs(at) and not torch.version.hip


def rewrites_on_a_cpu(at: Situation) -> bool:
    """A graph of which an input is on a CPU, and none elsewhere."""
    return rewrites(at) and _devices_of_inputs(at) == {"cpu"}


def _devices_of_inputs(at: Situation) -> set[str]:
    inputs = at.graph.find_nodes(op="placeholder")
    return {node.meta["val"].device.type for node in inputs if is_tensor(node)}


def multiplies_groups(at: Situation) -> bool:
    """A graph with grouped matmuls, as experts have."""
    return rewrites(at) and any(node.target in GROUPED for node in at.graph.nodes)


def has_sixteen_bit(at: Situation) -> bool:
    """A graph with 16-bit values, or a recipe that asks for FP32."""
    return bool(at.ctx.recipe.fp32.keep) or holds_sixteen_bit(at.graph)


def takes_statistics(at: Situation) -> bool:
    """The joint graph has the inputs of fp8compile/observe/slot.py."""
    return at.ctx.stats_inputs is not None


def takes_scales(at: Situation) -> bool:
    return at.ctx.scale_input is not None


def delays_scales(at: Situation) -> bool:
    return rewrites(at) and at.ctx.recipe.delays_scales


def is_observed(at: Situation) -> bool:
    return at.observed


def overwrites(at: Situation) -> bool:
    return at.overwrites


def repeats_regions(at: Situation) -> bool:
    """A forward with regions that the user checkpoints."""
    return rewrites(at) and has_regions(at.graph)


def compresses(at: Situation) -> bool:
    return at.ctx.recipe.compresses_collectives


def offloads(at: Situation) -> bool:
    return at.ctx.recipe.offloads


def _pass(changes_numbers: bool, run: Callable[..., Any], on: On, when: When = always) -> Pass:
    return Pass(run, on, when, changes_numbers)


preserves = partial(_pass, False)  # a pass that leaves every number as it was
changes = partial(_pass, True)  # a pass that changes some numbers: those it rounds, widens or clips

PIPELINE = (
    preserves(spell_out_alpha, On.PATTERNS),  # a mend of Inductor, under every recipe
    # A value that is FP32 from here on is not watched for overflow, not computed by an FP8 linear, not stored in FP8.
    changes(widen_unsafe_ops, On.JOINT, has_sixteen_bit),
    changes(saturate_gradients, On.JOINT, takes_statistics),  # before a linear encodes what must be clipped
    preserves(observe_gradients, On.JOINT, takes_statistics),  # behind the clip: only one of the two values is stored
    changes(compress_collectives, On.JOINT, compresses),  # before the linears, which encode what arrives
    changes(
        move_router_weights, On.JOINT, multiplies_groups
    ),  # before the linears, which encode what the dgrad reads
    preserves(share_casts, On.JOINT),  # before the linears, which encode every distinct operand
    changes(quantize_linears, On.JOINT),  # before the cut, so that it sees codes, which are cheaper to save
    preserves(
        chunk_logits, On.JOINT
    ),  # behind the linears, whose report tells of the head's matmuls as the model has them
    preserves(cut_for_bytes, On.CUT, saves_bytes),  # what is saved is chosen
    preserves(cut_for_time, On.CUT, saves_time),
    preserves(
        drop_random_states, On.HALVES, repeats_regions
    ),  # what is repeated with them is not known to be the same
    preserves(copy_overwritten, On.HALVES, overwrites),  # what is recomputed must be made from values that were read
    preserves(save_sums, On.HALVES, rewrites),  # while the sum stands beside what was saved
    preserves(recompute_kept, On.HALVES, rewrites),  # on exact values: fewer tensors are left to encode
    preserves(save_softmax, On.HALVES, rewrites),  # of what is not made from something else
    # What would be computed again, from what are codes soon, and must not be.
    preserves(save_normalised, On.HALVES, rewrites),
    preserves(save_statistics, On.HALVES, repeats_regions),  # of what is saved by now
    changes(recompute_for_budget, On.HALVES, rewrites),  # what is still saved, at the bytes that it will take
    changes(encode_saved, On.HALVES, stores),  # whatever is still saved is stored as codes
    preserves(mark_saved, On.HALVES, measures),  # where calibrate_bits measures: what would be stored stays exact
    preserves(offload_codes, On.HALVES, offloads),  # codes are what goes to the host
    preserves(observe_forward, On.HALVES, is_observed),  # observing has no say in what is saved
    preserves(measure_operands, On.HALVES, takes_scales),  # and measuring neither
    preserves(part_scales, On.LOWERING, delays_scales),  # where all that looks for a scale by its slice has run
    preserves(call_codecs, On.LOWERING, rewrites_on_a_cpu),
    changes(share_sigmoids, On.LOWERING, rewrites_on_a_gpu),  # where all that looks for a SiLU has run
    changes(shorten_codecs, On.LOWERING, rewrites_on_a_gpu),  # behind all that looks for codecs by their operations
    preserves(sum_bias_gradients, On.POST_GRAD),  # rewrites that fuse better, with nothing to report
    preserves(store_parts, On.POST_GRAD, rewrites_on_a_gpu),
    preserves(store_tables, On.POST_GRAD, rewrites_on_a_gpu),
    preserves(store_residuals, On.POST_GRAD),  # behind others, which would replace the nodes that it marks
    preserves(store_sums, On.POST_GRAD),
)


def passes_on(on: On, situation: Situation) -> tuple[Pass, ...]:
    """Those that run there, in their order."""
    return tuple(each for each in PIPELINE if each.on is on and each.when(situation))
