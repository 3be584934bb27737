"""tile_scales: an index that is one throughout a block is computed once a block; all others are Inductor's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import sympy
from torch._inductor.codegen.triton import FixedTritonConfig
from torch.utils._sympy.functions import FloorDiv

from fp8compile.compiler.tile_scales import of_blocks

X, Y, OTHER = sympy.symbols("x0 y0 y1", integer=True, nonnegative=True)
ROW, TILE = 1024, MappingProxyType({"XBLOCK": 32, "YBLOCK": 32})


def kernel(
    blocks: Mapping[str, int] | None = TILE,
    y: tuple[tuple[sympy.Symbol, Any, Any], ...] = ((Y, 1, ROW),),
    reduces: bool = False,
    combo: bool = False,
) -> Any:
    """What is looked at of a kernel of Inductor; ``y``: variables of its second axis, with divisor and length."""
    axes = {"x": SimpleNamespace(prefix="x"), "y": SimpleNamespace(prefix="y")}
    entries = {v: SimpleNamespace(root=axes["y"], divisor=divisor, length=length) for v, divisor, length in y}
    entries[X] = SimpleNamespace(root=axes["x"], divisor=1, length=4096)
    lines: list[str] = []
    return SimpleNamespace(
        fixed_config=FixedTritonConfig(dict(blocks)) if blocks else None,
        inside_reduction=reduces,
        is_combo_kernel=combo,
        range_trees=list(axes.values()),
        range_tree_nodes=entries,
        body=SimpleNamespace(writeline=lines.append),
        lines=lines,
    )


SCALE = 8 * X + FloorDiv(Y, 128)


def test_the_scale_of_a_group() -> None:
    it = kernel()
    assert str(of_blocks(it, SCALE)) == "itile0 + 8*x0"
    assert it.lines == [f"itile0 = yoffset // 1 % {ROW} // 128"]


def test_one_name_for_one_number_and_another_for_another() -> None:
    it = kernel()
    of_blocks(it, SCALE)
    assert str(of_blocks(it, 3 * FloorDiv(Y, 128))) == "3*itile0"
    assert str(of_blocks(it, FloorDiv(Y, 64))) == "itile1" and len(it.lines) == 2


def test_a_variable_that_counts_whole_blocks() -> None:
    it = kernel(y=((OTHER, 128, 8),))
    assert str(of_blocks(it, 8 * X + OTHER)) == "itile0 + 8*x0"
    assert it.lines == ["itile0 = yoffset // 128 % 8 // 1"]


@pytest.mark.parametrize(
    "index",
    [
        Y + ROW * X,
        Y + FloorDiv(Y, 128),
        FloorDiv(Y, 48),
        FloorDiv(Y, 16),
        FloorDiv(Y, X),
        FloorDiv(Y + X, 128),
        sympy.Integer(3),
    ],
)
def test_what_differs_within_a_block_is_left(index: sympy.Expr) -> None:
    it = kernel()
    assert of_blocks(it, index) == index and not it.lines


@pytest.mark.parametrize("it", [
    kernel(None),
    kernel({"XBLOCK": 1024}),
    kernel({"XBLOCK": 32, "YBLOCK": 256}),
    kernel(reduces=True),
    kernel(combo=True),
    kernel(y=((Y, 1, 1000),)),  # a block spans the end of a row
    kernel(y=((Y, 1, sympy.Symbol("s0")),)),
])  # fmt: skip
def test_other_kernels_are_left(it: Any) -> None:
    assert of_blocks(it, SCALE) == SCALE and not it.lines


@pytest.mark.parametrize("block,length,divisor", [(32, 96, 32), (32, 128, 64), (8, 24, 8)])
def test_every_element_of_every_block_has_that_number(block: int, length: int, divisor: int) -> None:
    it = kernel({"XBLOCK": 32, "YBLOCK": block}, y=((Y, 1, length),))
    assert of_blocks(it, FloorDiv(Y, divisor)) != FloorDiv(Y, divisor)
    (line,) = it.lines
    for offset in range(0, 4 * length, block):
        found = eval(line.split(" = ")[1], {"yoffset": offset})
        assert {place % length // divisor for place in range(offset, offset + block)} == {found}
