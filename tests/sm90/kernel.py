"""What a generated Triton kernel's source tells: the buffers that a launch takes, and the bytes that it moves."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

_NUM_GB = re.compile(r"'kernel_num_gb': ([\d.e+-]+)")
COMBINED = "ComboKernelGrid"  # in the source of a kernel that combines several
_SIGNATURE = re.compile(r"'signature': \{(.*?)\}")
_POINTER = re.compile(r"'(\w+)': '\*\w+'")
_ARGUMENT = re.compile(r"arg_\d+ = rand_strided\(\((.*?)\), \((.*?)\), device='cuda:0', dtype=torch\.(\w+)\)")


@dataclass(frozen=True)
class Kernel:
    """One generated Triton kernel."""

    name: str
    source: str

    @property
    def num_bytes(self) -> int:
        """What one launch reads and writes: each buffer once per direction in which the source uses it.

        A kernel that combines several names no buffers in its source; Inductor's estimate has to do. It does too where it
        is smaller, for a kernel that reads a part of a buffer, such as every 32nd row.
        """
        if COMBINED in self.source:
            return self.estimated_bytes
        whole = sum(num_bytes * directions(self.source, name) for name, num_bytes in self._buffers())
        return min(whole, self.estimated_bytes)

    @property
    def estimated_bytes(self) -> int:
        """Inductor's ``kernel_num_gb``. Too high where it counts a buffer that fusion removed, or counts
        twice one that is only written (a scale that takes over its amax's buffer). Torch 2.11 has none for kernels that
        combine several: 0."""
        match = _NUM_GB.search(self.source)
        if not match and COMBINED in self.source:
            return 0
        assert match, f"{self.name} carries no kernel_num_gb: lower under `lowering_config`"
        return round(float(match.group(1)) * 1e9)

    def stores(self, dtype: str) -> int:
        """How many of its buffers of a Triton ``dtype``, e.g. ``fp8`` for both formats, a launch writes."""
        pointers = re.findall(rf"'(\w+)': '\*{dtype}\w*'", self.source)
        return sum(bool(re.search(rf"\bstore\({name}\b", self.source)) for name in pointers)

    def _buffers(self) -> list[tuple[str, int]]:
        """The pointers a launch takes and the bytes behind each, from the example arguments in the source."""
        signature = _SIGNATURE.search(self.source)
        assert signature, f"{self.name} has another kind of signature"
        pointers, arguments = _POINTER.findall(signature.group(1)), _ARGUMENT.findall(self.source)
        names = [name for name in pointers if not name.startswith("ws_ptr")]  # partial sums of a few blocks
        assert len(names) == len(arguments), f"{self.name}: {names} do not match {arguments}"
        return [(name, tensor_bytes(*argument)) for name, argument in zip(names, arguments, strict=True)]


def directions(source: str, pointer: str) -> int:
    both = bool(re.search(rf"\batomic_\w+\({pointer}\b", source))
    return sum(both or bool(re.search(rf"\b{verb}\({pointer}\b", source)) for verb in ("load", "store"))


def tensor_bytes(size: str, stride: str, dtype: str) -> int:
    sizes, strides = ([int(n) for n in text.split(",") if n.strip()] for text in (size, stride))
    numel = math.prod(n for n, step in zip(sizes, strides, strict=True) if step)
    return int(numel * getattr(torch, dtype).itemsize)
