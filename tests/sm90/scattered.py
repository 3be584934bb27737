"""Which codes a generated kernel stores a byte here and a byte there.

Memory is written in sectors of 32 bytes. Where neighbours in memory are stored by one instruction a store costs its bytes;
where the kernel takes one row at a time and stores across rows, each byte costs a sector, which no count of bytes shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .kernel import Kernel
from .lowering import load_kernel

SECTOR = 32
_SIGNATURE = re.compile(r"'(\w+)': '\*fp8\w*'")
_STORE = re.compile(r"\bstore\((\w+) \+ \(([^,]*)\)")
_BLOCK = re.compile(r"(\w+): tl\.constexpr = (\d+)")
_TERM = re.compile(r"(?:(\d+)\*)?(x|y|z|r0_|r1_)\d*")  # an index variable as it is, or so many times


def scattered_stores(kernel: Kernel) -> list[str]:
    """The pointers of codes that a kernel stores in runs under a sector, in every configuration that the tuner has."""
    autotuner = load_kernel(kernel.name, kernel.source)
    fixed = {name: int(size) for name, size in _BLOCK.findall(kernel.source)}
    blocks = [{**fixed, **config.kwargs} for config in autotuner.configs]
    return [name for name, index in _stores_of_codes(kernel.source) if all(_run(index, b) < SECTOR for b in blocks)]


def _stores_of_codes(source: str) -> Iterator[tuple[str, str]]:
    codes = set(_SIGNATURE.findall(source))
    return ((name, index) for name, index in _STORE.findall(source) if name in codes)


def _run(index: str, blocks: Mapping[str, int]) -> int:
    """How many neighbours in memory one block of threads stores at once: those of the variable that is added as it is, and
    of the next one where its steps are as long as that one's block."""
    terms = (term.strip("() ") for term in index.split(" + "))
    found = [term for term in map(_TERM.fullmatch, terms) if term]
    steps = {int(term.group(1) or 1): blocks[f"{term.group(2).upper()}BLOCK"] for term in found}
    if 1 not in steps:
        raise AssertionError(f"no variable of {index!r} is consecutive in memory")
    return steps[1] * steps.get(steps[1], 1) if steps[1] > 1 else 1
