"""The pipeline as it stands: names that switch off one pass each, and what each says of numbers."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from fp8compile import Recipe
from fp8compile import _torch as private
from fp8compile.compiler import pipeline
from fp8compile.compiler.pipeline import On, Pass, Situation
from fp8compile.recipe.context import Context, ScaleInput, StatsInputs

PASSES = pipeline.PIPELINE


def test_the_list_is_in_the_order_of_a_compilation() -> None:
    stages = [each.on for each in PASSES]
    assert stages == sorted(stages, key=[*On].index) and {*stages} == {*On}


def test_each_condition_is_one_of_the_situation() -> None:
    """Under every recipe alone, or where the recipe, the inputs or the graph ask for a pass."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten._grouped_mm.default, (x, x))
    graph.output(())
    plain = Situation(Context(Recipe.preset("off")), graph)
    assert [each.name for each in PASSES if each.when(plain)] == [
        *("spell_out_alpha", "share_casts", "quantize_linears", "chunk_logits"),
        *("sum_bias_gradients", "store_residuals", "store_sums"),
    ]
    everything = Context(
        Recipe(fp32={"keep": ("*norm*",)}, collectives="groupwise", memory={"offload": "auto"}, linears="delayed"),
        stats_inputs=StatsInputs(0, 1, ()),
        scale_input=ScaleInput(0, 1, True, ()),
    )
    with FakeTensorMode():
        x.meta |= {"val": torch.empty(1, device="cuda"), private.CHECKPOINT: 1}
    at = Situation(everything, graph, observed=True, overwrites=True)
    assert [each.name for each in PASSES if not each.when(at)] == ["cut_for_time", "mark_saved", "call_codecs"]
    measuring = dataclasses.replace(at, ctx=dataclasses.replace(everything, measures_saved=True))
    assert [each.name for each in PASSES if not each.when(measuring)] == [
        "cut_for_time",
        "encode_saved",
        "call_codecs",
    ]


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_no_pass_is_named_inside_another(each: Pass) -> None:
    """Inductor matches substrings where passes are switched off by name."""
    assert [other.name for other in PASSES if each.name in other.name] == [each.name]


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_the_first_line_says_whether_numbers_change(each: Pass) -> None:
    said = (sys.modules[each.run.__module__].__doc__ or "").split("\n")[0]
    assert said.startswith("Numbers change" if each.changes_numbers else "Numbers stay as they are")
