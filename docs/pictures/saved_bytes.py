"""The picture of the README: what a Llama layer saves for backward, from plain Inductor's bytes to ours, by rewrite.

The layer is that of the README's table (hidden 512, ffn 1376, 8 heads, 2 x 256 tokens, BF16), explained on this machine.

python docs/pictures/saved_bytes.py          writes docs/pictures/saved-bytes.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # a script's own folder is all that is there

import fp8compile  # noqa: E402
from tests.support.measure import llama_case  # noqa: E402

FILE = Path(__file__).with_name("saved-bytes.svg")
WIDTH, BAR, GAP, LEFT, RIGHT = 720, 26, 8, 250, 60
PLAIN, LESS, OURS = "#8497b0", "#c9d3e0", "#3f9c56"
TEXT = '<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#1f2a37">{text}</text>'


def bars() -> list[tuple[str, float, float, str]]:
    """Label, begin and end in U, colour: plain Inductor, each change, ours."""
    layer, args = llama_case()
    unit = args[0].numel() * 2
    report = fp8compile.explain(layer, args, recipe={"linears": "off"})
    at = report.saved_bytes_plain / unit
    found = [("plain Inductor, BF16", 0.0, at, PLAIN)]
    for change in report.waterfall.changes:
        found.append((change.label, at + change.nbytes / unit, at, LESS))
        at += change.nbytes / unit
    return [*found, ("fp8compile", 0.0, report.saved_bytes / unit, OURS)]


def svg(rows: list[tuple[str, float, float, str]]) -> str:
    scale = (WIDTH - LEFT - RIGHT) / max(end for _, _, end, _ in rows)
    height = len(rows) * (BAR + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="14" role="img">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for at, (label, begin, end, colour) in enumerate(rows):
        y = GAP + at * (BAR + GAP)
        x, width = LEFT + begin * scale, (end - begin) * scale
        sign = "\N{MINUS SIGN}" if colour == LESS else ""
        parts += [
            TEXT.format(x=LEFT - 10, y=y + 18, anchor="end", text=label),
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            TEXT.format(x=x + width + 6, y=y + 18, anchor="start", text=f"{sign}{end - begin:.2f} U"),
        ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    FILE.write_text(svg(bars()), encoding="utf-8")
