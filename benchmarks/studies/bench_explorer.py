"""How fast the explorer's page is: a report of Llama-2-7B's layers, opened and moved about in a headless Chromium.

    python benchmarks/studies/bench_explorer.py --json benchmarks/results/explorer-cpu.json

The model is explained without memory (on the meta device, BF16, 2 x 2048 tokens), by the default recipe of a CPU and with FP8
linears emulated. Goals are in ``GOALS``; a page that misses one makes the exit status 1.

    bytes           of the file
    interactive     seconds from navigation until a mouse click has selected the first box and that frame is on the screen, by
                    the page's own clock: the median and the worst of the openings, each in a new browser context. The click
                    is sent when the page says that it is ready, so that messages to the browser are in it
    wall            the same by a clock outside, from before the page is asked for
    near            frames a second, all boxes open, while the wheel pans, then zooms from where all of the width is seen:
                    1 / the time between animation frames, of the median, of one in twenty and of the longest
    far             the same further out, where each frame draws ``VISIBLE`` boxes or more

Requests to anything but the file and errors in the console are counted; both must be 0. Chromium and Playwright are needed
(``pip install fp8compile[test]``). Without a GPU the canvas is drawn by the CPU, so that a desktop has more frames.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.llama import LLAMA2_7B, Llama, rotary_tables
from benchmarks.harness.output import write_json

RECIPES: Mapping[str, Mapping[str, Any] | None] = {"default": None, "FP8 linears": {"linears.emulate": True}}
BATCH, LENGTH = 2, 2048
OPENINGS, MOVING_MS, VISIBLE = 7, 4000, 2000
GOALS: Mapping[int, Mapping[str, float]] = {  # by layers; bytes and seconds at most, frames a second at least
    12: {"bytes": 3e6, "interactive": 2.0, "frames": 30.0},
    60: {"interactive": 4.0, "frames": 30.0},
}
FIRST_BOX = """() => { const v = X.app.view, s = v.scene.view, b = v.canvas.getBoundingClientRect();
    const i = v.layout.items.find(i => !i.open && !i.node && i.x > s.x && i.y > s.y);
    return [b.left + (i.x + i.w / 2 - s.x) * s.scale, b.top + (i.y + i.h / 2 - s.y) * s.scale]; }"""
SHOWN = """() => new Promise(done => { const look = () => { if (!X.app.view.selected) return requestAnimationFrame(look);
    requestAnimationFrame(() => setTimeout(() => done(performance.now() / 1000))); }; look(); })"""
OPEN_ALL = """() => { const v = X.app.view; for (const key of v.tree.byKey.keys()) if (key) v.open.add(key);
    v.relayout(); v.fit(); v.scene.paint(); return v.layout.items.filter(i => !i.open).length; }"""
# To the middle, out until a quarter more than ``least`` boxes are in sight: further than the wheel goes in a tall graph.
FAR = """least => { const v = X.app.view, s = v.scene.view, w = v.canvas.clientWidth, h = v.canvas.clientHeight;
    do { s.scale *= 0.97; s.x = (v.layout.width - w / s.scale) / 2; s.y = (v.layout.height - h / s.scale) / 2;
        v.scene.paint(); } while (v.scene.drawn < 1.25 * least && s.scale > 1e-4); }"""
# There and back in two seconds, by a sine: one wheel event a frame (with the control key it zooms), or far away, where the
# wheel would not zoom, the view itself.
MOVE = """([milliseconds, zooms, isFar]) => new Promise(done => {
    const v = X.app.view, c = v.canvas, b = c.getBoundingClientRect();
    const between = [], scale = v.scene.view.scale; let least = Infinity, first = 0, last = 0;
    const middle = { clientX: b.left + b.width / 2, clientY: b.top + b.height / 2, cancelable: true };
    const wheel = turn => c.dispatchEvent(new WheelEvent("wheel", { ...middle, ctrlKey: zooms, deltaX: zooms ? 0 : 3 * turn,
        deltaY: zooms ? turn : 12 * turn }));
    const far = turn => { const s = v.scene.view; if (!zooms) return v.pan(3 * turn, turn);
        const y = s.y + b.height / s.scale / 2; s.scale *= Math.exp(-0.002 * turn);
        s.y = y - b.height / s.scale / 2; v.scene.draw(); };
    const step = now => {
        if (last) { between.push(now - last); least = Math.min(least, v.scene.drawn); } else first = now;
        last = now;
        if (now - first > milliseconds) return done({ between, least, scale });
        (isFar ? far : wheel)(Math.sin((now - first) / 1000 * Math.PI));
        requestAnimationFrame(step);
    };
    requestAnimationFrame(step); })"""


def make_page(layers: int, recipe: str, path: Path) -> None:
    """Explain a Llama of ``layers`` layers on the meta device and write its page."""
    shape, device, dtype = dataclasses.replace(LLAMA2_7B, layers=layers), torch.device("meta"), torch.bfloat16
    with device:
        model, tokens = Llama(shape).to(dtype), torch.zeros(BATCH, LENGTH + 1, dtype=torch.long)
    tables = rotary_tables(shape, LENGTH, device, dtype)
    torch._dynamo.reset()
    fp8compile.explain(model, (tokens, *tables), recipe=RECIPES[recipe]).to_html(path)


def opening(browser: Any, address: str) -> tuple[float, float, Any]:
    """Seconds until the first box is selected, by the page's clock and by ours; and the page with what it logged."""
    from tests.support.browser import opened

    begin = time.perf_counter()
    context = opened(browser, address, viewport={"width": 1280, "height": 800})
    seen = context.__enter__()
    seen.page.wait_for_selector("body[data-ready=yes]")
    seen.page.mouse.click(*seen.page.evaluate(FIRST_BOX))
    inside = seen.page.evaluate(SHOWN)
    return inside, time.perf_counter() - begin, (context, seen)


def moving(page: Any, zooms: bool, is_far: bool) -> dict[str, Any]:
    """Frames a second while the graph is moved, and the least number of boxes in sight."""
    found = page.evaluate(MOVE, [MOVING_MS, zooms, is_far])
    between = sorted(found["between"])
    return {
        "scale": found["scale"],
        "frames": len(between),
        "median": 1000 / statistics.median(between),
        "one_in_twenty_below": 1000 / between[int(0.95 * len(between))],
        "worst": 1000 / between[-1],
        "visible": found["least"],
    }


def measured(browser: Any, path: Path) -> dict[str, Any]:
    """The figures of one page."""
    inside, outside, errors, requests = [], [], 0, 0
    found: dict[str, Any] = {"bytes": path.stat().st_size}
    for number in range(OPENINGS):
        *seconds, (context, seen) = opening(browser, path.as_uri())
        inside.append(seconds[0])
        outside.append(seconds[1])
        if number == OPENINGS - 1:
            found["boxes"] = seen.page.evaluate(OPEN_ALL)
            found["near"] = [moving(seen.page, zooms, False) for zooms in (False, True)]
            seen.page.evaluate(FAR, VISIBLE)
            found["far"] = [moving(seen.page, zooms, True) for zooms in (False, True)]
        errors, requests = errors + len(seen.errors), requests + len(seen.requests)
        context.__exit__(None, None, None)
    for name, each in (("interactive", inside), ("wall", outside)):
        found[name] = {"median": statistics.median(each), "worst": max(each)}
    return found | {"errors": errors, "requests": requests}


def missed(layers: int, found: Mapping[str, Any]) -> list[str]:
    """The goals that a page does not reach; a second counts by its median, as a frame does."""
    goals = GOALS.get(layers, {})
    reached = {
        "bytes": found["bytes"] <= goals.get("bytes", float("inf")),
        "interactive": found["interactive"]["median"] < goals.get("interactive", float("inf")),
        "frames": min(each["median"] for each in (*found["near"], *found["far"])) >= goals.get("frames", 0.0),
        "visible": min(each["visible"] for each in found["far"]) >= VISIBLE,
        "errors": found["errors"] == 0,
        "requests": found["requests"] == 0,
    }
    return [name for name, is_reached in reached.items() if not is_reached]


def chromium() -> str:
    """The path of the browser; the program ends with what is missing."""
    if importlib.util.find_spec("playwright") is None:
        raise SystemExit("bench_explorer needs Playwright: pip install playwright")
    from tests.support.browser import MISSING, installed

    return installed() or sys.exit(f"bench_explorer: {MISSING}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=list(GOALS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--pages", type=Path, help="a folder of pages; one that is there is not made again")
    parser.add_argument("--json", type=Path)
    values, where = parser.parse_args(words), chromium()
    from tests.support.browser import launched

    found: dict[str, Any] = {**environment(), "pages": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = values.pages or Path(temporary)
        paths = [(n, r, folder / f"{n}-{r.replace(' ', '-')}.html") for n in values.layers for r in values.recipes]
        for layers, recipe, path in paths:
            if not path.exists():
                make_page(layers, recipe, path)
        with launched(where) as browser:
            found["browser"] = f"Chromium {browser.version}"
            for layers, recipe, path in paths:
                row = {"layers": layers, "recipe": recipe, **measured(browser, path.resolve())}
                found["pages"].append(row | {"missed": missed(layers, row)})
    print(json.dumps(found, indent=1))
    if values.json:
        write_json(values.json, found)
    return int(any(row["missed"] for row in found["pages"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
