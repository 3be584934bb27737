"""The suite as CPUs of other kinds would run it: once for each vector instruction set that this one has.

    python -m tests.capabilities [--list] [pytest's arguments]

Four libraries choose their code by the CPU: ATen, and Inductor's C++ after it (ATEN_CPU_CAPABILITY); MKL, whose products sum
in another order; oneDNN; and NumPy, which computes log2 and exp2 for the interpreted kernels. All are told alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import numpy

NEEDS = {"default": (), "avx2": ("avx2", "fma"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}
MKL = {"default": "SSE4_2", "avx2": "AVX2"}
ONEDNN = {"default": "SSE41", "avx2": "AVX2"}


def has(capability: str, flags: frozenset[str]) -> bool:
    return flags.issuperset(NEEDS[capability])


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The CPU's flags; none where the system does not say."""
    try:
        with open(path) as file:
            return frozenset(next((line.split() for line in file if line.startswith("flags")), ()))
    except OSError:
        return frozenset()


def numpy_features() -> list[str]:
    """What NumPy can be told to leave alone: everything that it looks for at run time."""
    core = getattr(numpy, "_core", None) or numpy.core  # its name before NumPy 2
    return list(core._multiarray_umath.__cpu_dispatch__)


def environment(capability: str) -> dict[str, str]:
    """Environment variables under which the libraries use no more than ``capability``."""
    found = {"ATEN_CPU_CAPABILITY": capability}
    if capability in MKL:
        above = ("AVX512", "X86_V4") if capability == "avx2" else ("",)  # of the names that NumPy has had
        left = [each for each in numpy_features() if each.startswith(above)]
        found |= {"MKL_ENABLE_INSTRUCTIONS": MKL[capability], "ONEDNN_MAX_CPU_ISA": ONEDNN[capability]}
        found["NPY_DISABLE_CPU_FEATURES"] = " ".join(left)
    return found


def main(arguments: Sequence[str]) -> int:
    flags = cpu_flags()
    runs = [each for each in NEEDS if has(each, flags)]
    print(
        f"capabilities: {', '.join(runs)}; not on this CPU: {', '.join(set(NEEDS) - set(runs)) or 'none'}", flush=True
    )
    if "--list" in arguments:
        return 0
    ended = {}
    for capability in runs:
        print(f"\n== {capability}: {environment(capability)}", flush=True)
        command = [sys.executable, "-m", "pytest", *arguments]
        ended[capability] = subprocess.run(command, env=os.environ | environment(capability)).returncode
    print(
        "\n"
        + "\n".join(
            f"{name}: {'passed' if not status else f'pytest ended with {status}'}" for name, status in ended.items()
        )
    )
    return max(ended.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
