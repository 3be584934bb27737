"""The page in a browser: what a reader does with it, by mouse and keyboard; no request is made, and nothing fails."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fp8compile.explorer.content import Bars, PageContent, PageFrontier, PageGraph, PageRow, PageTable
from fp8compile.explorer.page import ASSETS, SCRIPTS, page
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.snapshot import PassStep, Snapshot
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.report import Report
from tests.support.browser import opened
from tests.support.explored import explained

SELECTED = (
    "X.app.view.selected && (X.app.view.selected.node ? X.app.view.selected.node.key : X.app.view.selected.box.key)"
)
PLACE = """key => { const v = X.app.view, i = v.layout.items.find(i => !i.node && i.box.key === key), s = v.scene.view,
    b = v.canvas.getBoundingClientRect();
    return [b.left + (i.x + i.w / 2 - s.x) * s.scale, b.top + (i.y + Math.min(i.h, 26) / 2 - s.y) * s.scale]; }"""


def click_box(shown: Any, key: str, times: int = 1) -> None:
    x, y = shown.evaluate(PLACE, key)
    shown.mouse.click(x, y, click_count=times)


def test_it_loads_and_says_what_was_done(shown: Any) -> None:
    report = explained()
    assert f"{report.saved_bytes / report.saved_bytes_plain:.0%}".replace("%", " %") in shown.inner_text("#figures")
    assert "How to read the graph" in shown.inner_text("#panel")
    drawn = shown.evaluate("X.app.view.stage.nodes.length")
    assert drawn == sum(len(part.lines) for part in report.graphs[0].steps[-1].after.parts)
    seen = shown.evaluate("[...X.app.view.layout.rep.keys()].length")  # each is drawn: as itself, or in a closed box
    assert seen == drawn


def test_a_click_selects_a_box_and_tells_why(shown: Any) -> None:
    click_box(shown, "layers.1")
    assert shown.evaluate(SELECTED) == "layers.1"
    shown.click("#tree [data-key='layers.1']")
    shown.click("#tree [data-key='layers.1.down']")
    text = shown.inner_text("#panel")
    assert "Recipe.linears.skip: module 'layers.1.down' matches 'layers.1.down'" in text
    assert "Left as it was" in text


def test_a_double_click_opens_a_box_and_closes_it(shown: Any) -> None:
    shown.evaluate("X.app.view.open.delete('layers.0'); X.app.view.relayout()")
    closed = shown.evaluate("X.app.view.layout.items.length")
    click_box(shown, "layers.0", 2)
    assert shown.evaluate("X.app.view.open.has('layers.0')")
    assert shown.evaluate("X.app.view.layout.items.length") > closed
    click_box(shown, "layers.0", 2)
    assert shown.evaluate("X.app.view.layout.items.length") == closed


def test_no_two_boxes_overlap_when_all_are_open(shown: Any) -> None:
    overlapping = shown.evaluate("""() => { const v = X.app.view; for (const k of v.tree.byKey.keys()) if (k) v.open.add(k);
        v.relayout(); const all = v.layout.items.filter(i => !i.open); let n = 0;
        for (const a of all) for (const b of all) if (a !== b && a.x < b.x + b.w && b.x < a.x + a.w
            && a.y < b.y + b.h && b.y < a.y + a.h) n++;
        return [n, all.length]; }""")
    assert overlapping[0] == 0 and overlapping[1] == shown.evaluate("X.app.view.stage.nodes.length")


def test_search_finds_modules_operations_and_reasons(shown: Any) -> None:
    for words, expected in (("layers.2 down", "layers.2.down"), ("linears.skip layers.1", "layers.1.down")):
        shown.fill("#search", words)
        assert shown.locator("#found [role=option]").first.is_visible()
        shown.press("#search", "Enter")
        assert expected in shown.inner_text("#panel")
    shown.fill("#search", "rsqrt forward")
    shown.fill("#search", "aten.rsqrt")
    assert "rsqrt" in shown.inner_text("#found")
    shown.fill("#search", "no such thing")
    assert "nothing has all these words" in shown.inner_text("#found")


def test_a_pass_before_and_after(shown: Any) -> None:
    shown.select_option("#pass", "encode_saved")
    step = next(s for s in explained().graphs[0].steps if s.name == "encode_saved")
    names = [{(p.title, n.name) for p in s.parts for n in p.lines} for s in (step.before, step.after)]
    assert shown.evaluate("X.app.view.stage.nodes.length") == len(names[1])
    assert shown.evaluate("X.app.view.stage.nodes.filter(n => n.diff === 'added').length") > 10
    assert shown.evaluate("X.app.view.sums") == {
        "added": len(names[1] - names[0]),
        "removed": len(names[0] - names[1]),
        "changed": sum(
            (old.op, old.value, old.arguments) != (new.op, new.value, new.arguments)
            for p, q in zip(step.before.parts, step.after.parts, strict=True)
            for old in p.lines
            for new in q.lines
            if old.name == new.name and old.kind != "output"
        ),
    }
    assert "added" in shown.inner_text("#summary")
    shown.click("#before")
    assert shown.evaluate("X.app.view.stage.nodes.length") == len(names[0])
    assert "encode_saved.before" in shown.evaluate("decodeURIComponent(location.hash)")
    shown.select_option("#pass", next(s.name for s in explained().graphs[0].steps if s.before == s.after))
    assert "changes nothing" in shown.inner_text("#summary")


def test_tables_sort_filter_and_become_csv(shown: Any) -> None:
    shown.click("#tab-tables")
    shown.click("#tables-tabs >> text=Saved as codes")
    shown.click("#tables-body th >> text=as codes")
    expected = sorted((s.bytes_after for s in explained().saved), reverse=True)
    assert [row["cells"][4] for row in shown.evaluate("X.app.tables.rows()")] == expected
    assert shown.get_attribute("th:has-text('as codes')", "aria-sort") == "descending"
    shown.fill("#filter", "layers.0")
    rows = [s for s in explained().saved if "layers.0" in s.origin.module]
    assert shown.locator("#tables-body tbody tr").count() == len(rows) > 0
    read = list(csv.reader(io.StringIO(shown.evaluate("X.app.tables.csv()"))))
    assert len(read) == 1 + len(rows) and read[0][0] == "module"
    with shown.expect_download() as download:
        shown.click("#csv")
    assert download.value.suggested_filename == "fp8compile-saved.csv"


def test_the_peak_is_the_reports(shown: Any) -> None:
    graph = explained().graphs[0]
    assert graph.picture is not None
    shown.click("#tab-memory")
    for name, line in (("ours", graph.picture.ours), ("plain", graph.picture.plain)):
        section = shown.locator(f"[data-name={name}]")
        assert section.get_attribute("data-peak") == str(max(line.alive))
        assert line.at_peak[0].value in section.inner_text()
    shown.locator("[data-name=ours] .alive button").first.click()
    assert shown.evaluate("document.body.dataset.tab") == "graph"


def test_the_waterfall_is_the_reports(shown: Any) -> None:
    shown.click("#tab-bytes")
    amounts = explained().waterfall
    changes = [a.nbytes for a in amounts.changes]
    assert [int(e.get_attribute("data-bytes")) for e in shown.query_selector_all(".less, .more")] == changes
    assert (
        sum(int(e.get_attribute("data-bytes")) for e in shown.query_selector_all(".part")) == explained().saved_bytes
    )


def test_a_link_leads_where_it_was_made(chromium: Any, page_file: Path, shown: Any) -> None:
    shown.click("#tree [data-key='layers']")
    shown.fill("#search", "layers.0.up")
    shown.press("#search", "Enter")
    address = shown.evaluate("location.href")
    assert "layers.0.up" in address
    with opened(chromium, address) as seen:
        assert seen.page.evaluate(SELECTED) == shown.evaluate(SELECTED)
    with opened(
        chromium, f"{page_file.as_uri()}#node=fw:gone&pass=none.after&tab=x&graph=9"
    ) as seen:  # of another file
        assert seen.page.evaluate("document.body.dataset.ready") == "yes" and seen.errors == []


def test_the_keyboard_reaches_everything(shown: Any) -> None:
    shown.focus("#canvas")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        shown.keyboard.press(key)
    assert shown.evaluate(SELECTED) is not None
    assert shown.inner_text("#live") != ""
    shown.keyboard.press("Escape")
    assert shown.evaluate(SELECTED) is None
    shown.keyboard.press("/")
    assert shown.evaluate("document.activeElement.id") == "search"
    shown.focus("#tree [tabindex='0']")
    for key in ("ArrowDown", "Enter"):
        shown.keyboard.press(key)
    assert shown.evaluate(SELECTED) is not None
    nameless = shown.evaluate("""() => [
        ...document.querySelectorAll('button, input, select, canvas, [role=tree], [role=treeitem]')]
        .filter(e => !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label'))).map(e => e.outerHTML)""")
    assert nameless == []


def test_dark_and_light(chromium: Any, page_file: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with opened(chromium, page_file.as_uri(), color_scheme="dark") as seen:
        dark = seen.page.evaluate(colour)
        seen.page.click("#theme")
        light = seen.page.evaluate(colour)
    with opened(chromium, page_file.as_uri(), color_scheme="light") as seen:
        assert seen.page.evaluate(colour) == light != dark
        seen.page.click("#theme")
        assert seen.page.evaluate(colour) == dark


def test_the_width_of_a_phone(chromium: Any, page_file: Path) -> None:
    with opened(chromium, page_file.as_uri(), viewport={"width": 390, "height": 780}, has_touch=True) as seen:
        wide = "document.documentElement.scrollWidth"
        assert seen.page.evaluate(wide) <= 390
        assert not seen.page.is_visible("#tree")
        seen.page.click("#menu")
        seen.page.click("#tree [data-key='layers']")
        assert seen.page.is_visible("#panel") and not seen.page.is_visible("#tree")
        seen.page.click("#shut")
        assert not seen.page.is_visible("#panel")
        for tab in ("memory", "bytes", "tables"):
            seen.page.click(f"#tab-{tab}")
            assert seen.page.evaluate(wide) <= 390
        broken = seen.page.evaluate("""() => [...document.querySelectorAll("#tables-body td")].filter(cell => {
            const range = document.createRange(), text = cell.textContent;
            range.selectNodeContents(cell);
            return /^\\w{1,12}$/.test(text) && range.getBoundingClientRect().height > 24; }).map(cell => cell.textContent)""")
        assert broken == []  # a number or a word stands in one line
        assert seen.errors == []


NASTY = "</script><img src=x onerror=window.bad=1>\"'&"


def nasty() -> PageContent:
    nodes = (
        Line("x", "input", "input", "f32[2]", "", "", ()),
        Line(NASTY, "other", NASTY, "f32[2]", f"x, '{NASTY}'", "", ("x",), module=NASTY, source=NASTY),
        Line("output", "output", "output", "", NASTY, "", (NASTY,)),
    )
    shot = Snapshot((GraphPart("", nodes),))
    table = PageTable(
        "skips",
        NASTY,
        (("module", "text"), (NASTY, "text"), ("source", "text"), ("runs", "number")),
        (PageRow(0, NASTY, (NASTY, "=1+1", NASTY, 1)),),
    )
    frontier = PageFrontier(0, NASTY, 10, 0, ((1, 9, 0.0), (0, 8, 5.0)))
    bars = Bars(10, 5, ((NASTY, -5, 1),), ((NASTY, 5, 1),))
    return PageContent(
        NASTY,
        (NASTY,),
        (PageGraph("inference", steps=(PassStep(NASTY, shot, shot),)),),
        (table,),
        bars,
        (frontier,),
        (NASTY,),
    )


def test_names_with_html_and_quotes_are_text(chromium: Any, tmp_path: Path) -> None:
    where = tmp_path / "nasty.html"
    where.write_text(page(nasty()))
    with opened(chromium, where.as_uri()) as seen:
        seen.page.wait_for_selector("body[data-ready=yes]")
        seen.page.fill("#search", "onerror")
        seen.page.press("#search", "Enter")
        for tab in ("memory", "bytes", "tables", "graph"):
            seen.page.click(f"#tab-{tab}")
        assert NASTY in seen.page.text_content("#panel") and NASTY in seen.page.text_content("#bars")
        assert seen.page.evaluate("X.app.tables.csv()").splitlines()[1].count("'=1+1") == 1
        assert seen.page.evaluate("window.bad") is None and seen.page.locator("img").count() == 0
        assert (seen.errors, seen.requests) == ([], [])


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            Report((GraphReport("training", saved_bytes=8, saved_bytes_plain=16),)).page_content,
            "This report has no graph to draw.",
        ),
        (Report().page_content, "The report has no graph."),
    ],
)
def test_a_report_without_a_graph_says_so(chromium: Any, tmp_path: Path, told: PageContent, said: str) -> None:
    where = tmp_path / "empty.html"
    where.write_text(page(told))
    with opened(chromium, where.as_uri()) as seen:
        assert said in seen.page.inner_text("#empty")
        for tab in ("memory", "bytes", "tables"):
            seen.page.click(f"#tab-{tab}")
        assert (seen.errors, seen.requests) == ([], [])


def test_data_of_another_version_says_so(chromium: Any, page_file: Path, tmp_path: Path) -> None:
    where = tmp_path / "other.html"
    where.write_text(
        page_file.read_text()
        .replace("fp8compile.explorer/1", "fp8compile.explorer/9", 1)
        .replace('X.SCHEMA = "fp8compile.explorer/9"', 'X.SCHEMA = "fp8compile.explorer/1"')
    )
    with opened(chromium, where.as_uri()) as seen:
        assert 'the version "fp8compile.explorer/9"' in seen.page.inner_text("#trouble")
        assert seen.errors == []


def chain(layers: int, ops: int) -> PageContent:
    """A graph of ``layers * ops`` operations, made by hand."""
    lines, before = [Line("x", "input", "input", "f32[2]", "", "", ())], "x"
    for at in range(layers):
        for n in range(ops):
            name = f"n{at}_{n}"
            lines.append(
                Line(
                    name,
                    "other",
                    "aten.mul.Tensor",
                    "f32[2]",
                    f"{before}, 2",
                    "",
                    (before,),
                    module=f"layers.{at}.part.{n % 5}",
                )
            )
            before = name
    shot = Snapshot((GraphPart("", (*lines, Line("output", "output", "output", "", before, "", (before,)))),))
    return PageContent("chain", (), (PageGraph("inference", steps=(PassStep("none", shot, shot),)),), (), Bars(0, 0))


def test_fifty_thousand_nodes_open_at_the_level_of_modules(chromium: Any, tmp_path: Path) -> None:
    where = tmp_path / "large.html"
    where.write_text(page(chain(100, 500)))
    with opened(chromium, where.as_uri()) as seen:
        seen.page.wait_for_selector("body[data-ready=yes]")
        assert seen.page.evaluate("X.app.view.stage.nodes.length") == 50_002
        assert seen.page.evaluate("X.app.view.layout.items.length") < 200
        seen.page.click("#tree [data-key='layers'] .twist")
        assert seen.errors == []


def test_every_script_is_in_the_page_and_short() -> None:
    assert {path.name for path in ASSETS.glob("*.js")} == set(SCRIPTS)
    assert all(len((ASSETS / name).read_text().splitlines()) <= 300 for name in SCRIPTS)
    assert not any("innerHTML" in (ASSETS / name).read_text() for name in SCRIPTS)


def test_model_explorer_has_every_node_and_every_edge(tmp_path: Path) -> None:
    where = tmp_path / "graph.json"
    explained().to_model_explorer(where)
    [graph] = json.loads(where.read_text())["graphs"]
    parts = explained().graphs[0].steps[-1].after.parts
    known = {node["id"] for node in graph["nodes"]}
    assert len(known) == len(graph["nodes"]) == sum(len(part.lines) for part in parts)
    edges = [edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]]
    assert set(edges) <= known
    picture = explained().graphs[0].picture
    assert picture is not None
    assert len(edges) == sum(len(line.reads) for part in parts for line in part.lines) + len(picture.kept)
    with pytest.raises(ValueError, match="has no graphs to draw"):
        Report().to_model_explorer(where)


def test_a_notebook_shows_the_bytes_without_a_script() -> None:
    html = explained()._repr_html_()
    assert "plain Inductor" in html and "<script" not in html
    nasty_html = dataclasses.replace(explained(), recipe="<b>")._repr_html_()
    assert "<b>" not in nasty_html and "&lt;b&gt;" in nasty_html
