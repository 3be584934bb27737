"""The most that the buffers of a generated wrapper take at one time: its text says where each is made, reused and dropped."""

from __future__ import annotations

import re

import torch

_MADE = re.compile(r"(\w+) = empty_strided_cuda\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)")
_REUSED = re.compile(r"(\w+) = .*; del (\w+)  # reuse")
_DROPPED = re.compile(r"del (\w+)")


def peak_bytes(wrapper: str) -> int:
    """Bytes of the buffers that a wrapper allocates, at the moment that most of them exist; its inputs are not counted."""
    alive: dict[str, int] = {}
    most = 0
    for line in map(str.strip, wrapper.splitlines()):
        if made := _MADE.match(line):
            alive[made[1]] = _bytes(*made.groups()[1:])
        elif (reused := _REUSED.match(line)) and reused[2] in alive:
            alive[reused[1]] = alive.pop(reused[2])
        elif dropped := _DROPPED.fullmatch(line):
            alive.pop(dropped[1], None)
        most = max(most, sum(alive.values()))
    return most


def _bytes(size: str, stride: str, dtype: str) -> int:
    sizes, strides = ([int(n) for n in text.split(",") if n.strip()] for text in (size, stride))
    last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return (last + 1) * int(getattr(torch, dtype).itemsize)
