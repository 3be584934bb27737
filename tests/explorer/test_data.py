"""The data of the page is the report's: every node, every byte of the waterfall, what is kept, what is alive."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fp8compile.explorer.data import SCHEMA, SCHEMA_FILE, explorer_data
from fp8compile.explorer.homes import homes_of
from fp8compile.explorer.layers import alike
from fp8compile.explorer.nodes import ranges
from fp8compile.explorer.picture import CALLERS, KINDS
from fp8compile.explorer.strings import Strings
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.snapshot import Snapshot
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.explored import bound_of
from fp8compile.reporting.report import Report
from tests.support.explored import explained, violations


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explained().to_explorer_json())
    return found


def lines_of(graph: dict[str, Any], number: int, strings: list[str]) -> list[tuple[str, ...]]:
    """The nodes of a stage as name, op, value, arguments and reads, as the page reads them."""
    nodes, found = graph["nodes"], []
    for part in graph["stages"][number]:
        for first, count in part["rows"]:
            for row in range(first, first + count):
                reads = [strings[n] for n in nodes["reads"][row]]
                arguments = strings[nodes["arguments"][row]]
                for at, name in reversed([*enumerate(reads)]):
                    arguments = arguments.replace(f"${at}", name)
                texts = (strings[nodes[c][row]] for c in ("name", "op", "value", "source"))
                found.append((part["title"], *texts, arguments, *reads))
    return found


def told_by(snapshot: Snapshot) -> list[tuple[str, ...]]:
    return [
        (p.title, n.name, n.op, n.value, n.source, n.arguments, *n.reads) for p in snapshot.parts for n in p.lines
    ]


def test_every_node_of_every_stage_is_that_of_the_report(data: dict[str, Any]) -> None:
    steps, graph = explained().graphs[0].steps, data["graphs"][0]
    assert [each["name"] for each in graph["passes"]] == [step.name for step in steps]
    for each, step in zip(graph["passes"], steps, strict=True):
        assert lines_of(graph, each["before"], data["strings"]) == told_by(step.before)
        assert lines_of(graph, each["after"], data["strings"]) == told_by(step.after)


def test_a_pass_that_changes_nothing_adds_nothing(data: dict[str, Any]) -> None:
    graph = data["graphs"][0]
    idle = [s.name for s in explained().graphs[0].steps if s.before == s.after]
    assert idle == [p["name"] for p in graph["passes"] if p["before"] == p["after"]] != []
    assert len(graph["nodes"]["name"]) < 0.7 * sum(
        count for stage in graph["stages"] for p in stage for _, count in p["rows"]
    )


def test_every_byte_of_the_waterfall(data: dict[str, Any]) -> None:
    report, found = explained(), data["waterfall"]
    amounts = report.waterfall
    assert (found["plain"], found["ours"]) == (report.saved_bytes_plain, report.saved_bytes)
    assert found["changes"] == [[a.label, a.nbytes, a.tensors] for a in amounts.changes]
    assert found["parts"] == [[a.label, a.nbytes, a.tensors] for a in amounts.parts]


def test_what_is_kept_sums_up_to_the_parts_of_the_waterfall(data: dict[str, Any]) -> None:
    kept, strings = data["graphs"][0]["kept"], data["strings"]
    storages = {
        strings[s]: (strings[n], size)
        for s, n, size in zip(kept["storage"], kept["label"], kept["nbytes"], strict=True)
    }
    sums: dict[str, int] = {}
    for label, size in storages.values():
        sums[label] = sums.get(label, 0) + size
    assert sums.pop(CALLERS, 0) == 0
    assert sums == {a.label: a.nbytes for a in explained().waterfall.parts}
    codes = {
        strings[s]: size
        for s, f, size in zip(kept["storage"], kept["fate"], kept["nbytes"], strict=True)
        if strings[f] == "stored"
    }
    assert sum(codes.values()) == sum(s.bytes_after for s in explained().saved if not s.is_operand)
    assert {strings[n] for n in kept["fate"]} == {"stored", "operand", "left", "callers"}


@pytest.mark.parametrize("name", ["ours", "plain"])
def test_the_most_bytes_alive_are_what_is_saved_and_the_workspace(name: str) -> None:
    graph = explained().graphs[0]
    assert graph.picture is not None
    line = getattr(graph.picture, name)
    ours = name == "ours"
    saved, working = (
        (graph.saved_bytes, graph.workspace_bytes) if ours else (graph.saved_bytes_plain, graph.workspace_bytes_plain)
    )
    assert line.alive[line.peak] == max(line.alive) == saved + working == sum(x.nbytes for x in line.at_peak)
    turn = line.forward - 1  # all that is saved is there when the forward ends
    kept = [x.nbytes for x in line.lifetimes if x.kind in KINDS[:2] and x.start <= turn < x.end]
    assert sum(kept) == saved


def test_it_is_as_the_schema_says(data: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    assert schema["$id"] == data["schema"] == SCHEMA
    assert list(violations(data, schema, schema["$defs"])) == []
    assert list(violations({**data, "head": 1}, schema, schema["$defs"])) == ["$.head is of type int, not array"]
    columns = data["graphs"][0]["nodes"]
    assert {len(column) for column in columns.values()} == {len(columns["name"])}


def test_tables_are_the_reports_entries(data: dict[str, Any]) -> None:
    report = explained()
    rows = {table["name"]: table["rows"] for table in data["tables"]}
    assert {name: len(each) for name, each in rows.items()} == {
        name: len(getattr(report, name))
        for name in ("linears", "saved", "skips", "recomputed")
        if getattr(report, name)
    }
    table = next(t for t in data["tables"] if t["name"] == "skips")
    reason = [column for column, _ in table["columns"]].index("reason")
    assert [data["strings"][row[reason]] for row in table["rows"]] == [skip.reason for skip in report.skips]


def test_bytes_of_a_graph_that_ran_three_times_count_three_times() -> None:
    one = explained()
    three = dataclasses.replace(one, graphs=(dataclasses.replace(one.graphs[0], places=(("", 3),)),))
    found = [next(t for t in r.page_content.tables if t.name == "saved").rows[0].cells for r in (one, three)]
    assert found[1][3] == 3 * found[0][3] and found[1][-1] == 3  # type: ignore[operator]


def test_layers_that_are_alike_are_a_run_and_one_that_was_left_is_not() -> None:
    last = explained(5).graphs[0].steps[-1].after
    assert explorer_data(explained(5).page_content)["graphs"][0]["alike"] == [
        ["layers", 2, 3]
    ]  # the first and the last have ends
    assert alike(last, [("layers.2", "left"), ("layers.3", "left")]) == [["layers", 2, 3]]
    assert alike(last, [("layers.2", "left")]) == []


def test_what_fp8compile_put_in_is_drawn_where_it_belongs() -> None:
    for part in explained().graphs[0].steps[-1].after.parts:
        homes = homes_of(part)
        for line in part.lines:
            assert not line.spliced or homes[line.name].module, line
        groups = {home.group for home in homes.values()} - {""}
        assert groups and all(group.startswith(("encode", "decode")) for group in groups)


def line(name: str, reads: tuple[str, ...] = (), module: str = "", **more: Any) -> Line:
    return Line(
        name,
        more.pop("kind", "other"),
        more.pop("op", "aten.mul.Tensor"),
        "f32[2]",
        "",
        "",
        reads,
        module=module,
        **more,
    )


def test_a_sum_of_gradients_belongs_to_the_module_whose_backward_just_ran() -> None:
    lines = (
        line("tangents_1", kind="input"),
        line("a", ("tangents_1",), "layers.1.norm"),
        line("b", ("a",), "layers.0.down"),
        line("sum", ("a", "b"), op="aten.add.Tensor"),
    )
    assert homes_of(GraphPart("backward", lines))["sum"].module == "layers"
    assert (
        homes_of(GraphPart("backward", (*lines[:2], line("b", ("a",), "head.in"), lines[3])))["sum"].module == "head"
    )


def test_an_island_is_one_group() -> None:
    lines = (
        line("a", module="m"),
        line("b", ("a",), "m", was="b0"),
        line("c", ("b",), "m", was="c0"),
        line("d", ("c",), "m"),
    )
    homes = homes_of(GraphPart("forward", lines))
    assert [homes[name].group for name in "abcd"] == ["", "FP32 island #b", "FP32 island #b", ""]


def test_ranges_and_strings() -> None:
    assert ranges([0, 1, 2, 7, 8, 3]) == [[0, 3], [7, 2], [3, 1]] and ranges([]) == []
    strings = Strings()
    assert [strings.number(text) for text in ("", "a", "b", "a")] == [0, 1, 2, 1] and strings.all == ["", "a", "b"]


@pytest.mark.parametrize(
    ("codec", "bound"),
    [
        ("int8 1x128", "amax/254"),  # half a step of 127 in each direction
        ("e4m3 tensorwise", "1/16 of the value; near 0, amax/458,752"),  # 2^-4; half of 2^-9, of 448
        ("best of e4m3|int8 1x128", ""),
    ],
)
def test_bounds_of_codecs(codec: str, bound: str) -> None:
    assert bound_of(codec) == bound


def test_a_report_without_graphs_and_one_without_anything() -> None:
    cached = Report((GraphReport("training", remarks=("from a cache",)),))
    found = explorer_data(cached.page_content)
    assert found["graphs"][0]["stages"] == [] and "from a cache" in found["head"]
    assert explorer_data(Report().page_content)["graphs"] == []
