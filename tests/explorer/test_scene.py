"""What the canvas draws and what the mouse is on, beside a search of everything there is."""

from __future__ import annotations

from typing import Any

OPEN_ALL = "const v = X.app.view; for (const k of v.tree.byKey.keys()) if (k) v.open.add(k); v.relayout();"


def test_a_frame_looks_at_all_that_is_in_sight_and_not_at_all_there_is(shown: Any) -> None:
    """Beside a search of everything, in stretches of several heights; each thing comes once."""
    looked, missing, twice, all_things = shown.evaluate(f"""() => {{ {OPEN_ALL}
        const s = v.scene, top = i => i.top ?? i.y, bottom = i => i.bottom ?? i.y + i.h;
        let looked = 0, missing = 0, twice = 0, all = 0;
        for (const [shelves, things] of [[s.open, v.layout.items.filter(i => i.open)], [s.edgesAt, s.edges],
                [s.closed, v.layout.items.filter(i => !i.open)], [s.ribbonsAt, s.ribbons]])
            for (const h of [0, 40, 700, 3000]) for (let y = -100; y < v.layout.height + 100; y += 97) {{
                const found = shelves.within(y, y + h), once = new Set(found);
                looked += found.length; twice += found.length - once.size; all += things.length;
                missing += things.filter(i => bottom(i) >= y && top(i) <= y + h && !once.has(i)).length;
            }}
        return [looked, missing, twice, all]; }}""")
    assert (missing, twice) == (0, 0)
    assert 0 < looked < 0.7 * all_things


def test_what_the_mouse_is_on_is_the_innermost_box(shown: Any) -> None:
    """Beside a search of everything, at points of a grid over the whole graph."""
    found = shown.evaluate(f"""() => {{ {OPEN_ALL} const s = v.scene; s.view = {{ x: 0, y: 0, scale: 1 }};
        const kinds = {{ node: 0, open: 0, none: 0, wrong: 0 }};
        for (let x = 0; x < v.layout.width; x += 23) for (let y = 0; y < v.layout.height; y += 17) {{
            const on = v.layout.items.filter(i => x >= i.x && x <= i.x + i.w && y >= i.y && y <= i.y + i.h);
            const best = on.find(i => !i.open) || on.pop() || null, is = s.at(x, y);
            kinds[!best ? "none" : best.open ? "open" : "node"] += 1;
            if (best ? is !== best : is && !is.ribbon) kinds.wrong += 1;
        }}
        return kinds; }}""")
    assert found.pop("wrong") == 0 and min(found.values()) > 20


def test_from_afar_lines_are_cut_at_the_sight_and_drawn_once(shown: Any) -> None:
    """All of one edge, of which a part is in sight, three times; and another edge."""
    lines = shown.evaluate("""() => { const lines = [], c = { moveTo: (x, y) => lines.push([x, y]),
            lineTo: (x, y) => lines[lines.length - 1].push(x, y) };
        const edge = (x1, y1, x2, y2) => ({ x1, y1, x2, y2, left: Math.min(x1, x2), right: Math.max(x1, x2),
            top: Math.min(y1, y2), bottom: Math.max(y1, y2) });
        const long = edge(0, -1000, 200, 3000), out = edge(0, 5000, 10, 6000);
        traceAll(c, [long, { ...long }, { ...long }, edge(50, 900, 60, 100), out],
            { left: 0, top: 0, right: 500, bottom: 1000 }, 0.1);
        return lines; }""")
    assert lines == [[50, 0, 100, 1000], [50, 900, 60, 100]]
