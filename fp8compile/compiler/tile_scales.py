"""A tile of codes loads the scales of its groups once, and not for each element. Changes no numbers.

    codes [rows, columns], in tiles of 32 x 32         a group is 128 elements along a row, and has one scale
    load(scales + row * groups + column // 128)        32 x 32 loads, each with its address
    load(scales + row * groups + (offset // 128))      32: a tile begins at a multiple of 32, and never spans two groups

Inductor writes the first; Triton does not see that it is the same place throughout. In the kernel that makes codes of the
gradients of a gated MLP, in both orders, such loads and their addresses were 10 of 75 instructions an element, lowered for an
H100. Numbers of rows, as a norm's, are loaded once too where a block is within a row.

Sound where the quotient is one throughout each block of its axis: the block's size is known (``code_kernels.py``) and divides
what is divided by, and no block spans the end of what it counts. All other loads are Inductor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy

from fp8compile.fx.inductor_choices import loading

NAMES = "fp8compile_of_blocks"  # of a kernel: what it computes once a block, by how


def with_scales_of_tiles(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor whose kernels of known blocks load once what is the same throughout a block."""
    return loading(_once)(inner_compile)


def _once(theirs: Callable[..., Any], kernel: Any, name: str, index: Any) -> Any:
    return theirs(kernel, name, of_blocks(kernel, index))


def of_blocks(kernel: Any, index: Any) -> Any:
    """An index in which what is the same throughout a block is said so, axis by axis; as it was where it is not."""
    if not kernel.fixed_config or kernel.inside_reduction or kernel.is_combo_kernel:
        return index
    for tree in kernel.range_trees:
        name = f"{tree.prefix.upper()}BLOCK"
        if name in kernel.fixed_config:
            index = _of_blocks(kernel, index, tree, kernel.fixed_config[name])
    return index


def _of_blocks(kernel: Any, index: Any, tree: Any, block: int) -> Any:
    """An index that depends on one axis through quotients that are the same throughout a block of it."""
    own = {v: each for v, each in kernel.range_tree_nodes.items() if each.root is tree and v in index.free_symbols}
    known = {}
    for variable, entry in own.items():
        for quotient, divisor in _quotients(index, variable):
            if not _is_one_throughout(entry, divisor, block):
                return index
            known[quotient] = (entry, divisor)
    return index.xreplace({quotient: _named(kernel, *of, tree) for quotient, of in known.items()})


def _quotients(index: Any, variable: Any) -> Iterator[tuple[Any, int]]:
    """``(variable // divisor, divisor)`` for each that stands in an index; the variable itself is divided by 1."""
    floors = [
        each for each in index.atoms(sympy.Function) if each.func.__name__ == "FloorDiv" and each.args[0] == variable
    ]
    for each in floors:
        if each.args[1].is_Integer:
            yield each, int(each.args[1])
    if variable in index.xreplace({each: sympy.Integer(0) for each in floors}).free_symbols:
        yield variable, 1


def _is_one_throughout(entry: Any, divisor: int, block: int) -> bool:
    """Whether ``(axis // entry.divisor % entry.length) // divisor`` is one number for each block of the axis."""
    sizes = (entry.divisor, entry.length)
    if not all(sympy.sympify(each).is_Integer for each in sizes):
        return False
    step, length = map(int, sizes)
    return step * divisor % block == 0 and step * length % block == 0


def _named(kernel: Any, entry: Any, divisor: int, tree: Any) -> sympy.Symbol:
    """That number, which the kernel computes from where a block begins, as a symbol of no axis."""
    names: dict[str, sympy.Symbol] = vars(kernel).setdefault(NAMES, {})
    computed = f"{tree.prefix}offset // {int(entry.divisor)} % {int(entry.length)} // {divisor}"
    if computed not in names:
        # A name with an "i" is an index to Inductor: neither an axis, nor a size that it is given.
        names[computed] = sympy.Symbol(f"itile{len(names)}", integer=True, nonnegative=True)
        kernel.body.writeline(f"{names[computed]} = {computed}")
    return names[computed]
