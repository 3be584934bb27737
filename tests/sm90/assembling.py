"""Compile generated kernels to sm_90 cubins with the ptxas that Triton runs, and read what it made of them.

Registers that do not fit are spilled to the thread's stack frame: ``STACK`` in cuobjdump's report is what
``ptxas -v`` calls spill bytes, and what CUDA calls local memory. ``LOCAL`` in that report stays 0 whatever is
spilled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from . import checked, fake_h100
from .kernel import Kernel
from .lowering import load_kernel

BYTES_PER_REGISTER = 4
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Cubin:
    """One kernel under one autotune configuration, as assembled.

    Attributes:
        registers: per thread.
        spill_bytes: stack frame plus local memory per thread; above 0, registers did not suffice.
        timed: whether Inductor's tuner would time it; it drops one that spills over ``spill_threshold``.
        ptx: what ptxas was given.
        code: the binary.
    """

    kernel: str
    blocks: dict[str, int]
    num_warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    timed: bool
    ptx: str
    code: bytes


def assemble(kernels: Iterable[Kernel]) -> Iterator[Cubin]:
    """Every configuration in which Inductor's tuner compiles each kernel. A failure to compile raises."""
    for kernel in kernels:
        autotuner = load_kernel(kernel.name, kernel.source)
        if kernel.stores("fp8"):  # those of the parent are checked beside them
            yield from _with_halved_blocks(kernel)[: len(autotuner.configs)]
            continue
        for config in autotuner.configs:
            yield _assembled(kernel.name, autotuner, config)


def assemble_as_parent(kernels: Iterable[Kernel]) -> Iterator[Cubin]:
    """``assemble``, and the configurations that Inductor's parent process adds: reductions with half their block, where that
    saves registers."""
    for kernel in kernels:
        yield from _with_halved_blocks(kernel)


def _with_halved_blocks(kernel: Kernel) -> list[Cubin]:
    autotuner, made = load_kernel(kernel.name, kernel.source), list[Cubin]()

    def compiled(config: Any) -> Any:
        made.append(_assembled(kernel.name, autotuner, config))
        return SimpleNamespace(config=config, kernel=SimpleNamespace(n_regs=made[-1].registers))

    for name, value in (("_precompile_config", compiled), ("_make_launchers", lambda: None)):
        fake_h100.replace(autotuner, name, value)
    autotuner.compile_results = [compiled(config) for config in autotuner.configs]
    autotuner._dynamic_scale_rblock()
    return made


def compile_all(kernel: Kernel) -> int:
    """Compile every configuration that the tuner has, looking at none; how many these are."""
    autotuner = load_kernel(kernel.name, kernel.source)
    return len([_compiled(autotuner, config) for config in autotuner.configs])


def _compiled(autotuner: Any, config: Any) -> Any:
    import triton
    from triton.compiler import ASTSource

    meta = autotuner._create_compile_meta(config)
    source = ASTSource(autotuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = autotuner._create_compile_options(config, meta)
    return triton.compile(source, target=fake_h100.target(), options=options)


def _assembled(name: str, autotuner: Any, config: Any) -> Cubin:
    compiled = _compiled(autotuner, config)
    checked.check(f"{name} {config}", compiled.asm["ptx"], compiled.asm["cubin"])
    registers, stack, shared, local = resource_usage(compiled.asm["cubin"])
    spill_bytes = stack + local
    return Cubin(
        kernel=name,
        blocks=dict(config.kwargs),
        num_warps=config.num_warps,
        registers=registers,
        shared_bytes=max(shared, compiled.metadata.shared),
        spill_bytes=spill_bytes,
        timed=spill_bytes // BYTES_PER_REGISTER <= autotuner.inductor_meta["spill_threshold"],
        ptx=compiled.asm["ptx"],
        code=compiled.asm["cubin"],
    )


def resource_usage(cubin: bytes) -> tuple[int, int, int, int]:
    """Registers, and bytes of stack, static shared and local memory, of the one kernel in a cubin."""
    report = _dumped(cubin, "-res-usage")
    match = _USAGE.search(report)
    assert match, f"cuobjdump reports in another form: {report}"
    registers, stack, shared, local = map(int, match.groups())
    return registers, stack, shared, local


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([checked.tool("cuobjdump"), what, file.name], text=True)
