"""Graphs as pages: a codec's call is one line, unless something needs a result of it before its end."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn

import fp8compile
from fp8compile import Recipe
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.snapshot import PassStep
from fp8compile.fx.written import with_context, written
from tests.support.dumped import explained


def line(name: str, *reads: str, call: str = "", value: str = "f32[2]") -> Line:
    return Line(name, "spliced" if call else "other", "op", value, ", ".join(reads), "", reads, call)


def test_a_call_is_a_line_with_what_it_reads_and_what_is_read_of_it() -> None:
    call = "encode(x)"
    several = (line("a", "x", call=call), line("s", "a", call=call), line("c", "a", "s", call=call, value="int8[2]"))
    part = GraphPart("", (line("x"), *several, line("y", "c", "s"), line("z", "x")))
    assert_expected_inline(
        written(part),
        """\
x: f32[2] = op()
s, c: f32[2], int8[2] = fp8.encode(x)                                                                 # INT8 per 1, 3 nodes
y: f32[2] = op(c, s)
z: f32[2] = op(x)""",
    )


def test_a_result_that_is_needed_before_the_end_is_seen_to_be_made_there() -> None:
    call = "encode(x)"
    part = GraphPart("", (line("x"), line("s", "x", call=call), line("y", "s"), line("c", "s", call=call)))
    assert "fp8.encode" not in written(part) and written(part).count("\n") == 3


def test_a_call_of_one_node_says_what_it_is_of() -> None:
    part = GraphPart(
        "", (line("x"), Line("a", "spliced", "op", "f32[2]", "x", "fp8compile: doubled(x)", ("x",), "doubled(x)"))
    )
    assert written(part).endswith("# fp8compile: doubled(x)") and "fp8." not in written(part)


def test_equal_texts_have_no_diff() -> None:
    assert with_context("a\nb\n", "a\nb\n") == ""


def test_numbers_of_a_pass() -> None:
    encode: PassStep = explained()[-1]
    before, after = (sum(each.counts.values()) for each in (encode.before, encode.after))
    assert encode.numbers == (
        f"encode_saved: {before} -> {after} operations, 32,768 -> 8,448 bytes saved for backward"
    )
    assert explained()[1].numbers.endswith(" operations"), "nothing is saved before the cut"


def test_two_linears_behind_encode_saved_are_a_screen() -> None:
    """70 lines, with FP8 linears too; node by node they are 203."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    report = fp8compile.explain(
        model, (torch.randn(64, 64),), recipe=Recipe(saved={"min_numel": 0}, linears={"emulate": True})
    )
    after = report.graphs[0].steps[-1].after
    assert after.text.count("\n") <= 71 < 200 < after.full_text.count("\n")
