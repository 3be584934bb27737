"""Each kernel with FP8 codes that this package assembles is looked at for stale bytes (byte_flow.py), as it is assembled.

It is looked at as the ptxas in force made it. Where that one is refused on a device (compiler/ptxas.py), it is looked
at as the one makes it that Triton ships for Blackwell. What was found right is remembered by its PTX, from process to
process: ``MEMORY``.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from fp8compile.compiler import ptxas

from . import byte_flow

MEMORY = "SM90_CHECKED"  # the folder, where this is set (subprocesses.py)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_CODES = re.compile(r"\bcvt\.rn\.satfinite\.\S*e[45]m[23]x2\b")


def check(name: str, ptx: str, cubin: bytes, arch: str = "sm_90a") -> bool:
    """Whether this one was looked at: not if it has no FP8 codes, was found right before, or no ptxas is right.

    Raises:
        AssertionError: it stores stale bytes.
    """
    if not _CODES.search(ptx):
        return False
    release, other = _in_force(), None
    if ptxas.is_wrong(release):
        other, release = tool("ptxas-blackwell"), _release_for_blackwell()
        if release is None or ptxas.is_wrong(release):
            return False
    known = _remembered(f"{release} {arch} {ptx}")
    if known is not None and known.exists():
        return False
    stale = byte_flow.stale_stores(disassembled(_assembled(other, ptx, arch) if other else cubin))
    assert not stale, f"ptxas {release} makes {name} store stale bytes: {'; '.join(map(str, stale[:4]))}"
    if known is not None:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    return True


def disassembled(cubin: bytes) -> str:
    """The SASS of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([tool("cuobjdump"), "-sass", file.name], text=True)


def instructions(cubin: bytes) -> collections.Counter[str]:
    """How often each instruction stands in the one kernel of a cubin; what only fills up does not count."""
    found = collections.Counter(_INSTRUCTION.findall(disassembled(cubin)))
    del found["NOP"]
    return found


def tool(name: str) -> Path:
    """One of NVIDIA's programs that Triton ships."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _assembled(by: Path, ptx: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([by, f"--gpu-name={arch}", source, "-o", target], check=True, capture_output=True)
        return target.read_bytes()


def _remembered(what: str) -> Path | None:
    folder = os.environ.get(MEMORY)
    return Path(folder) / hashlib.sha256((_rules() + what).encode()).hexdigest() if folder else None


@functools.cache
def _rules() -> str:
    return Path(byte_flow.__file__).read_text()


@functools.cache
def _in_force() -> ptxas.Release | None:
    return ptxas.ptxas_in_force()


@functools.cache
def _release_for_blackwell() -> ptxas.Release | None:
    path = tool("ptxas-blackwell")
    return ptxas.release_in(subprocess.check_output([path, "--version"], text=True)) if path.exists() else None
