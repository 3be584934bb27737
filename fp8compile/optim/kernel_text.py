"""A Triton kernel that Inductor wrote for one parameter, as one for many: pointers and sizes come from a row of a table.

    def one(in_ptr0, ..., xnumel, r0_numel, XBLOCK)       block b of a parameter, XBLOCK rows
    def optimizer_step(table, fresh, owners, XBLOCK)      block b of all: one(*row of its owner, ..., b - the owner's first)

    table   [parameters, arguments + 1] int64    addresses and sizes, and the number of the parameter's first block
    fresh   [parameters, several] int64          addresses of tensors that are new at every step
    owners  [blocks] int32                       which parameter each block belongs to

The text changes in one place: which block it is, is an argument.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

NAME = "optimizer_step"
ALIGNED = 16  # bytes that a pointer is a multiple of where loads are wide
_DECORATOR = re.compile(r"^@triton_heuristics\.\w+\(.*?^\)\n(?=@triton\.jit\n)", re.MULTILINE | re.DOTALL)
_FUNCTION = re.compile(r"^@triton\.jit\ndef (\w+)\(([^)]*)\):\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)
_SIGNATURE = re.compile(r"'signature': (\{.*?\})")
_DIVISIBLE = re.compile(r"'configs': \[(\{.*?\})\]")
_ROW = re.compile(r"\bR0_BLOCK: tl\.constexpr = (\d+)")
_BLOCK = "tl.program_id(0)"
_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64", "fp8e4nv": "float8e4nv"}
_TYPES |= {"fp8e5": "float8e5", "i1": "int1", "u8": "uint8"} | {f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class KernelText:
    """A kernel of Inductor's.

    Attributes:
        prefix: its imports.
        body: of the function, indented.
        parameters: as they stand in its head.
        names: of what it takes but for constants.
        types: of these: ``*bf16``, ``i32``.
        divisible: which of these, by number, are multiples of 16.
        row: how many elements a row holds; 1 where there is no reduction.
    """

    prefix: str
    body: str
    parameters: str
    names: tuple[str, ...]
    types: tuple[str, ...]
    divisible: frozenset[int]
    row: int


def parsed(source: str) -> KernelText | None:
    """The kernel in a source; None for one whose blocks are not numbered along one axis, or that loops along a row."""
    function, signature, divisible = (each.search(source) for each in (_FUNCTION, _SIGNATURE, _DIVISIBLE))
    decorated = _DECORATOR.search(source)
    if function is None or signature is None or divisible is None or decorated is None:
        return None
    _, parameters, body = function.groups()
    types = {name: kind for name, kind in ast.literal_eval(signature.group(1)).items() if kind != "constexpr"}
    names = [each.partition(":")[0].strip() for each in parameters.split(",")]
    known = all(kind.lstrip("*") in _TYPES for kind in types.values())
    one_axis = body.count("tl.program_id") == 1 and _BLOCK in body and "xnumel" in types
    if names != [*types, "XBLOCK"] or not (known and one_axis):
        return None
    row = _ROW.search(body)
    positions = frozenset(place for [place] in ast.literal_eval(divisible.group(1)))
    prefix = source[: decorated.start()]
    return KernelText(
        prefix, body, parameters, tuple(types), tuple(types.values()), positions, int(row.group(1)) if row else 1
    )


def same_pointers(kernel: KernelText, rows: Sequence[Sequence[Any]], fresh: Collection[int]) -> tuple[int, ...]:
    """What ``for_many`` takes as ``same``, of arguments by row. Those whose alignment is known differently stay two."""
    columns = [*zip(*rows, strict=True)]
    first: dict[Any, int] = {}
    return tuple(
        first.setdefault((columns[i], i in kernel.divisible), i) if kind.startswith("*") and i not in fresh else i
        for i, kind in enumerate(kernel.types)
    )


def for_many(kernel: KernelText, fresh: Collection[int], same: Sequence[int]) -> str:
    """Source of ``optimizer_step``.

    Args:
        fresh: the arguments, by number, whose addresses come from ``fresh``, in order.
        same: for each argument the first one that is the same pointer in every row; what is updated in place is two.
    """
    width, places = len(kernel.types) + 1, {argument: i for i, argument in enumerate(fresh)}
    lines = [
        f"    block, owner = {_BLOCK}, tl.load(owners + {_BLOCK}).to(tl.int64)",
        f"    row, new = table + owner * {width}, fresh + owner * {len(places)}",
    ]
    for i, kind in enumerate(kernel.types):
        if same[i] != i:
            continue
        place = f"new + {places[i]}" if i in places else f"row + {i}"
        wanted = f"tl.{_TYPES[kind.lstrip('*')]}"
        value = f"tl.load({place}).to({f'tl.pointer_type({wanted})' if kind.startswith('*') else wanted})"
        lines.append(f"    a{i} = " + (f"tl.multiple_of({value}, {ALIGNED})" if i in kernel.divisible else value))
    taken = ", ".join(f"a{i}" for i in same)
    lines.append(f"    one({taken}, block - tl.load(row + {width - 1}).to(tl.int32), XBLOCK)")
    body = kernel.body.rstrip().replace(_BLOCK, "block_of_it") + "\n"
    head, constant, _ = kernel.parameters.rpartition(", XBLOCK")
    one = f"@triton.jit\ndef one({head}, block_of_it{constant} : tl.constexpr):\n{body}"
    many = f"@triton.jit\ndef {NAME}(table, fresh, owners, XBLOCK: tl.constexpr):\n" + "\n".join(lines) + "\n"
    return f"{kernel.prefix}\n{one}\n\n{many}"
