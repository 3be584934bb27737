"""What a snapshot of a graph says: its text, the difference of two, and its picture."""

from __future__ import annotations

import itertools
import re

import torch
from expecttest import assert_expected_inline
from torch.fx import Graph

import fp8compile
from fp8compile import Recipe
from fp8compile.fx import snapshot
from fp8compile.fx.dot import quoted
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.snapshot import Snapshot, op_diff
from tests.support.dumped import CUT, NAMES, Gated, explained


def _without_places(text: str) -> str:
    """Without the lines of the model's source."""
    without = re.sub(r" +dumped\.py:\d+$", "", text, flags=re.MULTILINE)
    return re.sub(r" +#$", "", re.sub(r" {3,}# ", "  # ", without), flags=re.MULTILINE)


def test_golden_of_the_joint_graph() -> None:
    assert_expected_inline(
        _without_places(explained()[1].before.text),
        """\
primals_1: f32[64, 64] = input
primals_2: f32[128, 64] = input
primals_3: f32[64, 64] = input
tangents_1: f32[128, 64] = input
permute: f32[64, 64] = aten.permute.default(primals_1, [1, 0])  # gate
mm: f32[128, 64] = aten.mm.default(primals_2, permute)  # gate
tanh: f32[128, 64] = aten.tanh.default(mm)
permute_1: f32[64, 64] = aten.permute.default(primals_3, [1, 0])  # down
mm_1: f32[128, 64] = aten.mm.default(tanh, permute_1)  # down
permute_2: f32[64, 128] = aten.permute.default(tangents_1, [1, 0])  # down
mm_2: f32[64, 64] = aten.mm.default(permute_2, tanh)  # down
permute_4: f32[64, 64] = aten.permute.default(permute_1, [1, 0])  # down
mm_3: f32[128, 64] = aten.mm.default(tangents_1, permute_4)  # down
mul: f32[128, 64] = aten.mul.Tensor(tanh, tanh)
sub: f32[128, 64] = aten.sub.Tensor(1, mul)
mul_1: f32[128, 64] = aten.mul.Tensor(mm_3, sub)
permute_6: f32[64, 128] = aten.permute.default(mul_1, [1, 0])  # gate
mm_4: f32[64, 64] = aten.mm.default(permute_6, primals_2)  # gate
return mm_1, mm_4, None, mm_2
""",
    )


def test_golden_of_a_diff() -> None:
    """A table of what changed in numbers, then the lines, of which these are the changed ones."""
    table, lines = explained()[-1].diff.split("--- before", 1)
    assert re.search(r"^# backward\nop +before +after +change\n", table, re.MULTILINE)
    changed = [line for line in lines.split("\n") if re.match(r"[+-](?!\+\+)", line)]
    assert_expected_inline(
        _without_places("\n".join(changed)),
        """\
+view_4, convert_element_type_1: int8[128, 64], bf16[128, 1] = fp8.encode(tanh)  # INT8 per 64, 19 nodes
-return mm_1, primals_2, primals_3, tanh
+return mm_1, primals_2, primals_3, view_4, convert_element_type_1
-tanh: f32[128, 64] = input
+tanh_codes: int8[128, 64] = input
+tanh_inv_scale: bf16[128, 1] = input
-mm_2: f32[64, 64] = aten.mm.default(permute_2, tanh)  # down
+view_2: f32[128, 64] = fp8.decode(tanh_codes, tanh_inv_scale)  # INT8 per 64, 6 nodes
+mm_2: f32[64, 64] = aten.mm.default(permute_2, view_2)  # down
-mul: f32[128, 64] = aten.mul.Tensor(tanh, tanh)
+mul: f32[128, 64] = aten.mul.Tensor(view_2, view_2)""",
    )


def test_a_step_is_the_graph_as_it_will_be_left() -> None:
    """Edges are written into the graphs at the end; a snapshot in between shows them all the same, without dead code."""
    cut, sums, recomputed, softmax, normalised, budget, encoded = explained()[CUT:]
    found = (cut, sums, recomputed, softmax, normalised, budget, encoded)
    assert [s.name for s in found] == NAMES[CUT:]
    assert [p.title for p in cut.before.parts] == [""] and not cut.before.counts.keys() & {"input", "output"}
    assert cut.after == sums.before and sums.after == recomputed.before
    assert all(step.after == later.before for step, later in itertools.pairwise(found[2:]))
    forward, backward = encoded.after.parts
    codes = [line for line in forward.lines if line.value == "int8[128, 64]"]
    assert (
        codes
        and codes[-1].name in forward.lines[-1].reads
        and str(codes[-1]).endswith("  # fp8compile: encode(tanh)")
    )
    assert any(line.value.startswith("int8") and line.kind == "input" for line in backward.lines)
    for part in encoded.after.parts:
        read = {name for line in part.lines for name in line.reads}
        assert not [line.name for line in part.lines if line.kind in ("other", "spliced") and line.name not in read]
    assert encoded.after.counts["aten.mm.default"] == encoded.before.counts["aten.mm.default"] == 5


def test_what_the_results_do_not_need_is_left_out_as_by_dead_code_elimination() -> None:
    graph = Graph()
    x, unused = graph.placeholder("x"), graph.placeholder("unused")
    dead = graph.call_function(torch.ops.aten.exp.default, (unused,))
    graph.call_function(torch.ops.aten.add_.Tensor, (unused, 1))  # has an effect
    graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)), dead))
    part = snapshot._part("forward", graph, (next(n for n in graph.nodes if "neg" in n.name),))
    graph.output_node().args = ((list(graph.nodes)[4],),)
    graph.eliminate_dead_code()
    assert part.lines == snapshot._part("forward", graph).lines
    assert [line.name for line in part.lines][:2] == ["x", "unused"] and "exp" not in str(part)


def test_symbolic_shapes_are_text() -> None:
    x = torch.randn(128, 64)
    torch._dynamo.mark_dynamic(x, 0)
    report = fp8compile.explain(Gated(), (x,), recipe=Recipe(saved={"min_numel": 0}))
    assert re.search(
        r"^tanh: f32\[s\d+, 64\] = aten.tanh.default\(mm\) +# dumped.py:\d+$",
        report.graphs[0].steps[0].before.text,
        re.M,
    )


def test_arguments_of_every_kind_have_a_text_that_stays() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    kinds = [x, (x, None), 1.5, torch.float16, torch.device("cpu"), "text", {"a": x}, {3, 1}, slice(None, 2), object]
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, kinds), {"out": object()}))
    text = snapshot.snapshot(graph).text
    listed = "[x, [x, None], 1.5, torch.float16, cpu, 'text', {'a': x}, {1, 3}, None:2:None, <class 'object'>]"
    assert f"add_tensor = aten.add.Tensor(x, {listed}, out=<object object>)" in text
    assert text.startswith("x = input\n") and text.endswith("\nreturn add_tensor\n")


def test_diff_shows_what_changed_alone() -> None:
    def counted(*ops: str) -> Snapshot:
        return Snapshot(
            (GraphPart("", tuple(Line(f"n{i}", "other", op, "", "", "", ()) for i, op in enumerate(ops))),)
        )

    assert op_diff(counted("mm", "exp", "view"), counted("mm", "exp", "view")) == "no change\n"
    assert op_diff(counted("mm", "view", "view", "exp"), counted("mm", "add", "view", "exp", "exp")) == (
        "op    before  after  change\n"
        "add        0      1      +1\n"
        "exp        1      2      +1\n"
        "view       2      1      -1\n"
    )


def check_dot(text: str) -> None:
    """Braces balance outside of strings, strings end, and an edge has declared ends."""
    plain = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert plain.count("{") == plain.count("}") and '"' not in plain.replace('""', "")
    declared = set(re.findall(r'^ *("(?:[^"\\]|\\.)*") \[', text, re.M))
    edges = re.findall(r'^ *("(?:[^"\\]|\\.)*") -> ("(?:[^"\\]|\\.)*");$', text, re.M)
    assert edges and len(edges) == text.count(" -> ") and {end for edge in edges for end in edge} <= declared


def test_dot_is_sound() -> None:
    for step in explained():
        for expand in (False, True):
            check_dot(step.before.to_dot(expand))
            check_dot(step.after.to_dot(expand))
    assert "#c6ecc6" in step.after.to_dot() and "#fbd9a8" in step.after.to_dot(), "spliced and product"
    assert "#c6ecc6" not in step.before.to_dot()


def test_dot_escapes_what_would_end_a_string() -> None:
    names = ('a"b', "c\\", "d{\n}")
    lines = [Line(name, "other", 'op"', "f32[2]", "", 'module["x"]', names[:i]) for i, name in enumerate(names)]
    check_dot(Snapshot((GraphPart('the "title"', tuple(lines)),)).to_dot())
    assert quoted('say "hi"', "", "c:\\d") == r'"say \"hi\"\nc:\\d"'
