"""The page of a run in a browser: what a reader does with it, a run that goes on, and text that is no markup."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fp8compile
from fp8compile.amp import LossScaler
from fp8compile.amp import watch as hooks
from fp8compile.extras.watching.folder import runs_of
from fp8compile.extras.watching.lines import SCHEMA, line_of_step, text_of
from fp8compile.extras.watching.page import snapshot
from fp8compile.extras.watching.server import Server
from tests.support.browser import Seen, opened
from tests.support.written import batch, chain, loss_of, sgd

NASTY = "</script><img src=x onerror=window.bad=1>\"'&"
HEADER = text_of({"schema": SCHEMA, "model": "Net", "parameters": 1, "world": 1, "rank": 0})
SPOILT = 14


def write_run(folder: Path) -> None:
    """Twenty steps in FP16. The loss scale is too large for the first; in step ``SPOILT`` the weights of "mid" are."""
    model, scaler = chain("up", "mid", "down"), LossScaler("dynamic", init_scale=2.0**24)
    hooks(model)
    optimizer = sgd(model)
    with fp8compile.extras.watching.watch(model, scaler, optimizer, folder) as watcher:
        for step in range(1, 21):
            weight = model.mid.weight.detach().clone()
            model.mid.weight.data.mul_(1e5 if step == SPOILT else 1)
            loss = loss_of(model, batch(step))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            model.mid.weight.data.copy_(weight)
            watcher.log(loss=loss, tokens=4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("run")
    write_run(where)
    (where / "run.html").write_text(snapshot("run", runs_of(where)))
    return where


@pytest.fixture
def shown(chromium: Any, folder: Path) -> Iterator[Any]:
    """The page of a run, drawn; at the end it must have logged no error and asked for nothing."""
    with opened(chromium, (folder / "run.html").as_uri(), viewport={"width": 1360, "height": 900}) as seen:
        seen.page.wait_for_selector(".u-over")
        yield seen.page
        assert (seen.errors, seen.requests) == ([], [])


def listed(folder: Path) -> list[str]:
    """The steps in which an overflow began; those that look like the loss scale's stand behind the other."""
    (run,) = runs_of(folder)
    steps = [line.removeprefix("step ").partition(":")[0] for line in run.overflows]
    assert len(steps) > 2 and steps.count(str(SPOILT)) == 1
    return sorted(steps, key=lambda step: step != str(SPOILT))


def test_where_did_the_inf_of_a_step_begin(shown: Any, folder: Path) -> None:
    """One click: the step's entry in the list."""
    entries = shown.locator("#overflows button")
    assert [entries.nth(at).get_attribute("data-step") for at in range(entries.count())] == listed(folder)
    entries.first.click()
    record = shown.inner_text("#record")
    assert f"Step {SPOILT}" in record and "Began in mid (forward)" in record
    assert "loss nan" in entries.first.inner_text() or "loss inf" in entries.first.inner_text()
    assert shown.evaluate("location.hash") == f"#step={SPOILT}"
    assert entries.first.get_attribute("aria-current") == "true"


def test_the_button_and_its_key_go_from_one_to_the_next(shown: Any, folder: Path) -> None:
    seen, steps = list[str](), listed(folder)
    for _ in steps:
        shown.click("#overflow")
        seen.append(shown.input_value("#step"))
    shown.keyboard.press("f")
    assert [*seen, shown.input_value("#step")] == [*steps, steps[0]]


def test_a_click_on_a_chart_selects_the_step_under_it(shown: Any) -> None:
    over = shown.locator("[data-chart=loss] .u-over")
    box = over.bounding_box()
    at = shown.evaluate(f"uPlot.sync('run').plots[0].valToPos({SPOILT}, 'x')")
    shown.mouse.click(box["x"] + at, box["y"] + 20)
    assert f"Step {SPOILT}" in shown.inner_text("#record")
    shown.keyboard.press("ArrowRight")
    assert f"Step {SPOILT + 1}" in shown.inner_text("#record") and "Began" not in shown.inner_text("#record")
    shown.keyboard.press("Escape")
    assert "Click a chart" in shown.inner_text("#record")


def test_the_charts_and_the_last_step_are_the_run_s(shown: Any, folder: Path) -> None:
    steps = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()[1:]]
    assert shown.evaluate("uPlot.sync('run').plots[0].data") == [
        [step["step"] for step in steps],
        [step["loss"] for step in steps],
    ]
    drawn = [each.get_attribute("data-chart") for each in shown.query_selector_all(".chart:not([hidden])")]
    assert drawn == ["loss", "scale", "headroom", "tokens", "seconds", "memory"]
    assert f"{sum(step['skipped'] for step in steps)}\nsteps skipped" in shown.inner_text("#tiles")


@pytest.mark.parametrize("width", [390, 1360])
def test_charts_fill_their_cards(chromium: Any, folder: Path, width: int) -> None:
    """Above a plot stands its caption and below it the steps, with gaps of at most 16 pixels."""
    with opened(chromium, (folder / "run.html").as_uri(), viewport={"width": width, "height": 900}) as seen:
        seen.page.wait_for_selector(".u-over")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        gaps = seen.page.evaluate("""() => { const at = (e) => e.getBoundingClientRect(), all = [];
            for (const card of document.querySelectorAll('.chart:not([hidden])')) {
                const plot = at(card.querySelector('.u-over')), axis = at(card.querySelector('.u-axis'));
                all.push([plot.top - at(card.querySelector('figcaption')).bottom, at(card).bottom - axis.bottom]); }
            return all; }""")
    assert all(0 <= gap <= 16 for pair in gaps for gap in pair), gaps


@contextmanager
def served(chromium: Any, folder: Path, **options: Any) -> Iterator[Seen]:
    with Server(folder, milliseconds=30, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with opened(chromium, server.address) as seen:
                yield seen
                assert seen.errors == []
                assert all(asked.startswith(server.address) for asked in seen.requests)
        finally:
            server.shutdown()
            thread.join()


def append(folder: Path, text: str) -> None:
    with (folder / "rank0.jsonl").open("a") as file:
        file.write(text)


def step(number: int, **others: Any) -> str:
    return line_of_step({"step": number, "loss": 1 / number, **others})


def test_a_run_that_is_being_written(chromium: Any, tmp_path: Path) -> None:
    with served(chromium, tmp_path) as seen:
        page = seen.page
        page.locator("#message", has_text="no run in this folder yet").wait_for()
        append(tmp_path, HEADER + step(1) + step(2)[:10])
        page.locator("#runs", has_text="rank01 step").wait_for()
        layer = {"module": "up", "direction": "forward", "op": "mm", "inf": 1, "nan": 0, "of": 2, "dtype": "f16"}
        append(tmp_path, step(2)[10:] + "no JSON\n" + step(3, overflow={"line": "x", "count": 1, "layers": [layer]}))
        page.click("[data-step='3']")
        assert "Began in up (forward)" in page.inner_text("#record")
        append(tmp_path, HEADER + step(2))  # it goes on from a checkpoint
        page.locator("#runs", has_text="2 steps, 1 corrupt line left out").wait_for()
        assert page.locator("[data-step='3']").count() == 0
        assert page.inner_text("#status") == "live"


def test_a_button_stays_where_it_is_while_the_run_goes_on(chromium: Any, tmp_path: Path) -> None:
    """One that is made anew between press and release takes no click."""
    begun = {"line": "x", "count": 0, "layers": []}
    append(tmp_path, HEADER + step(1, overflow=begun) + step(2))
    with served(chromium, tmp_path) as seen:
        seen.page.wait_for_selector("#overflows button")
        seen.page.evaluate(
            "window.kept = [document.querySelector('#overflows button'), document.querySelector('#runs input')]"
        )
        append(tmp_path, step(3))
        seen.page.locator("#runs", has_text="3 steps").wait_for()
        assert seen.page.evaluate("window.kept.every((each) => each.isConnected)")


def test_of_a_long_run_the_last_part_is_read_and_said(chromium: Any, tmp_path: Path) -> None:
    append(tmp_path, HEADER + "".join(map(step, range(1, 1001))))
    with served(chromium, tmp_path, tail=2000) as seen:
        seen.page.locator("#runs", has_text="left out").wait_for()
        said = seen.page.inner_text("#runs")
        assert "of a long run the last 1.95 KiB" in said and "corrupt" not in said
        first, last = seen.page.evaluate("(([x]) => [x[0], x[x.length - 1]])(uPlot.sync('run').plots[0].data)")
        assert last == 1000 and first > 900
        assert "Net" in seen.page.inner_text("#about"), "the header stands before what is left out"
        append(tmp_path, step(1001))
        seen.page.locator("#tiles", has_text="1,001").wait_for()
        assert seen.page.evaluate("uPlot.sync('run').plots[0].data[0].at(-1)") == 1001
        assert seen.page.inner_text("#status") == "live"


def test_names_with_html_and_quotes_are_text(chromium: Any, tmp_path: Path) -> None:
    layer = {
        "module": NASTY,
        "direction": NASTY,
        "op": NASTY,
        "inf": 1,
        "nan": 1,
        "of": 2,
        "dtype": NASTY,
        "source": NASTY,
    }
    overflow = {"line": NASTY, "count": 9, "layers": [layer]}
    append(
        tmp_path, text_of({"schema": SCHEMA, "model": NASTY, "recipe": NASTY, "versions": {NASTY: NASTY}, "world": 2})
    )
    nasty = step(
        1, overflow=overflow, nearest=NASTY, remark=NASTY, sqnr={NASTY: 1.0}, sqnr_of=NASTY, **{NASTY: NASTY}
    )
    append(tmp_path, nasty + step(2))
    where = tmp_path / "run.html"
    where.write_text(snapshot(NASTY, runs_of(tmp_path)))
    with opened(chromium, where.as_uri()) as seen:
        seen.page.click("#overflow")
        for card in ("#record", "#overflows", "#about", "#message", "#title"):
            assert NASTY in seen.page.inner_text(card)
        assert seen.page.evaluate("window.bad") is None and seen.page.locator("img").count() == 0
        assert (seen.errors, seen.requests) == ([], [])


def test_lines_of_another_version_say_so(chromium: Any, tmp_path: Path) -> None:
    append(tmp_path, text_of({"schema": "fp8compile.run/9"}) + step(1))
    with served(chromium, tmp_path) as seen:
        seen.page.locator("#message", has_text="fp8compile.run/9").wait_for()
