"""Script: assemble kernels that store FP8 codes, in every configuration that Inductor compiles, and look for stale bytes
(byte_flow.py). Prints JSON.

``python -m tests.sm90.run_byte_flow check`` takes the kernels of the check at first use (compiler/store_check.py), any other
argument a layer in a pipeline (layers.py): ``"llama 2k, linears"``. With ``--blackwell`` the ptxas assembles that Triton
ships for Blackwell, else the one in force.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fp8compile.compiler import ptxas, store_check

from . import fake_h100
from .assembling import Cubin, assemble_as_parent
from .byte_flow import stale_stores
from .checked import disassembled, tool
from .layers import CASES
from .lowering import LoweredGraph, lower
from .measures import print_json
from .run_layers import backend_of, lowered_layer

CHECK = "check"


def graphs_of(case: str) -> list[LoweredGraph]:
    if case != CHECK:
        layer, pipeline = case.split(", ")
        return lowered_layer(CASES[layer], backend_of(pipeline))
    checks = (
        (store_check._stored_twice, store_check.SHAPE),
        (store_check.stored_twice_in_a_loop, store_check.LOOPED),
    )
    return [g for stored, shape in checks for g in lower(stored, torch.empty(shape, dtype=torch.bfloat16)).graphs]


def cubins_of(case: str) -> Iterator[Cubin]:
    """Of kernels with the same text, one."""
    kernels = {k.source.replace(k.name, ""): k for graph in graphs_of(case) for k in graph.kernels.values()}
    return assemble_as_parent(kernel for kernel in kernels.values() if kernel.stores("fp8"))


def report(cases: list[str]) -> dict[str, Any]:
    """``{"ptxas": release, "cases": {case: {"binaries": number, "wrong": {kernel and configuration: stores}}}}``."""
    fake_h100.install()
    found: dict[str, Any] = {}
    for case in cases:
        stale = {_name(cubin): [str(s) for s in stale_stores(disassembled(cubin.code))] for cubin in cubins_of(case)}
        found[case] = {"binaries": len(stale), "wrong": {name: stores for name, stores in stale.items() if stores}}
    return {"ptxas": ptxas.ptxas_in_force(), "cases": found}


def _name(cubin: Cubin) -> str:
    blocks = ", ".join(f"{name} {size}" for name, size in cubin.blocks.items())
    return f"{cubin.kernel}: {blocks}, {cubin.num_warps} warps"


if __name__ == "__main__":
    if "--blackwell" in sys.argv:
        os.environ["TRITON_PTXAS_PATH"] = str(tool("ptxas-blackwell"))
    print_json(lambda: report([each for each in sys.argv[1:] if each != "--blackwell"]))
