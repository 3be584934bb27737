"""Two figures of a results file: where kernels lie under the roofline, and our times against the peers'.

roofline   left: laps that move bytes, GB/s, the roof being the copy measured in the same process
           right: products, operations per second over operations per byte, under min(rate, copy * intensity)
peers      reference seconds over each arm's, in one group a row: above 1 the arm is faster
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import markdown, reference_of, seconds
from benchmarks.harness.results import Results
from fp8compile.reporting.figure import empty_figure

COLOURS = {
    "ours": "tab:green",
    "inductor": "tab:blue",
    "eager": "tab:gray",
    "torch": "black",
    "copy": "lightgray",
    "bf16": "tab:cyan",
    "fp8": "tab:olive",
    "act-quant": "tab:brown",
    "torchao": "tab:orange",
    "liger": "tab:red",
    "flashoptim": "tab:pink",
}


def plots(results: Results) -> list[Path]:
    """Write what can be drawn beside the results; none where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'fp8compile[demo]')")
        return []
    drawn = (("roofline", _roofline), ("peers", _bars))
    return [path for name, draw in drawn if (path := _drawn(results, name, draw))]


def _drawn(results: Results, name: str, draw: Any) -> Path | None:
    made = draw(results)
    if made is None:
        return None
    path = results.path.with_name(f"{results.path.stem}-{name}.png")
    tiny = ", toy sizes: not a measurement of speed" if results.head["tiny"] else ""
    made.suptitle(f"{results.head['device']}{tiny}", fontsize=9)
    made.savefig(path, dpi=110)
    return path


def laps_of(results: Results) -> Iterator[tuple[str, dict[str, float]]]:
    """Every lap with counted work, and its arm."""
    for row in results.rows.values():
        for arm, laps in row.get("arms", {}).items():
            yield from ((_kind(arm), lap) for lap in laps.values() if lap.get("bytes"))


def _roofline(results: Results) -> Any:
    found = list(laps_of(results))
    rates = [row["rates"] for row in results.rows.values() if "rates" in row]
    if not found:
        return None
    made, grid = empty_figure(1, 2, 11, 4.5)
    moved = [(arm, lap["bytes"], lap["bytes"] / lap["seconds"] / 1e9) for arm, lap in found if not lap.get("flops")]
    multiplied = [
        (arm, lap["flops"] / lap["bytes"], lap["flops"] / lap["seconds"] / 1e12)
        for arm, lap in found
        if lap.get("flops")
    ]
    _scatter(grid[0, 0], moved, "least bytes of a lap", "GB/s")
    _scatter(grid[0, 1], multiplied, "operations per byte", "TFLOP/s")
    grid[0, 0].axhline(max(each["copy"] for each in rates) / 1e9, color="black", linewidth=0.8)
    _draw_roofs(grid[0, 1], rates, [x for _, x, _ in multiplied])
    return made


def _draw_roofs(axes: Any, rates: list[dict[str, float]], xs: list[float]) -> None:
    if not xs:
        return
    span = [min(xs) * (max(xs) / min(xs) * 1.1) ** (k / 100) for k in range(101)]
    copy = max(each["copy"] for each in rates)
    for unit, style in (("bf16", "-"), ("fp8", "--")):
        reached = [each[unit] for each in rates if unit in each]
        if reached:
            roof = [min(max(reached), copy * x) / 1e12 for x in span]
            axes.plot(span, roof, style, color="black", linewidth=0.8, label=f"{unit} roof")
    axes.legend(frameon=False, fontsize=8)


def _scatter(axes: Any, found: list[tuple[str, float, float]], x: str, y: str) -> None:
    for kind in dict.fromkeys(arm for arm, _, _ in found):
        xs, ys = zip(*((a, b) for arm, a, b in found if arm == kind), strict=True)
        axes.scatter(xs, ys, s=16, color=COLOURS.get(kind, "tab:purple"), label=kind, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    if found:
        axes.legend(frameon=False, fontsize=8)


def _bars(results: Results) -> Any:
    groups = {key: ratios for key, row in results.rows.items() if len(ratios := _ratios(row)) > 1}
    if not groups:
        return None
    bars = [(f"{key}: {arm}", _kind(arm), ratio) for key, ratios in groups.items() for arm, ratio in ratios.items()]
    made, grid = empty_figure(1, 1, 9, 1 + 0.17 * len(bars))
    axes = grid[0, 0]
    axes.barh([b[0] for b in bars], [b[2] for b in bars], color=[COLOURS.get(b[1], "tab:purple") for b in bars])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("times as fast as the reference (1: the reference itself)")
    return made


def _ratios(row: dict[str, Any]) -> dict[str, float]:
    reference = reference_of(row)
    if reference is None:
        return {}
    same = [arm for arm, laps in row["arms"].items() if laps.keys() == row["arms"][reference].keys()]
    base = seconds(row, reference) or 0.0
    return {arm: base / (seconds(row, arm) or 1.0) for arm in same}


def _kind(arm: str) -> str:
    return arm.split()[0].rstrip(",")


def written(results: Results) -> list[Path]:
    """Write the table and the plots of a results file; returns all that there is of it."""
    if not results.rows:
        return []
    text = results.path.with_suffix(".md")
    text.write_text(markdown(results))
    return [results.path, text, *plots(results)]
