"""The picture of Concepts: where a tensor goes between forward and backward. Needs nothing but Python.

python docs/pictures/make.py          writes docs/pictures/tensor.svg
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("tensor.svg")
WIDTH, HEIGHT = 860, 350
PLAIN, OURS, LINE = "#eef2f7", "#d9efdc", "#44546a"
BOXES = (  # x, y, width, label, second line, whether fp8compile puts it there
    (20, 60, 120, "x", "BF16, from a kernel", False),
    (200, 60, 130, "encode", "amax, scale, round", True),
    (390, 60, 120, "codes", "1 byte, and scales", True),
    (570, 60, 120, "linear", "FP8 x FP8 matmul", True),
    (750, 60, 90, "y", "BF16", False),
    (390, 210, 120, "codes", "saved for backward", True),
    (200, 210, 130, "decode", "code * inv_scale", True),
    (20, 210, 120, "x'", "in the same kernel", False),
    (570, 210, 120, "wgrad", "FP8 x FP8 matmul", True),
    (750, 210, 90, "dW", "BF16", False),
)
ARROWS = (  # from and to: x, y
    ((140, 85), (200, 85)),
    ((330, 85), (390, 85)),
    ((510, 85), (570, 85)),
    ((690, 85), (750, 85)),
    ((450, 110), (450, 210)),
    ((390, 235), (330, 235)),
    ((200, 235), (140, 235)),
    ((510, 235), (570, 235)),
    ((690, 235), (750, 235)),
)
NOTES = (
    (20, 35, "forward"),
    (20, 185, "backward"),
    (20, 285, "operations that need x (a norm, SwiGLU) read x'; linears read codes"),
    (
        20,
        308,
        "scales: one per tensor for what linears alone read; else one per 128 elements, and wgrad encodes x' again",
    ),
    (20, 331, "green: what the passes put into the graph; Inductor fuses it into the kernels beside it"),
)


def svg() -> str:
    """The picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(_arrow(*each) for each in ARROWS),
        *(_box(*each) for each in BOXES),
        *(f'<text x="{x}" y="{y}" fill="{LINE}">{text}</text>' for x, y, text in NOTES),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _box(x: int, y: int, width: int, label: str, second: str, ours: bool) -> str:
    middle = x + width / 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="50" rx="6" fill="{OURS if ours else PLAIN}" stroke="{LINE}"/>'
        f'<text x="{middle:g}" y="{y + 21}" text-anchor="middle" font-weight="bold">{label}</text>'
        f'<text x="{middle:g}" y="{y + 39}" text-anchor="middle" font-size="10">{second}</text>'
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"/>'
    )


if __name__ == "__main__":
    FILE.write_text(svg())
