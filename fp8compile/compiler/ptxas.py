"""Which ptxas assembles generated kernels, and whether its FP8 stores can be relied on.

ptxas 12.8 and 12.9 corrupt E5M2 codes that one kernel for sm_90 stores both contiguous and transposed: bytes come from a
register of the loop's last iteration. 13.0.88 and 13.4 are right. The version of the assembler in force counts, not the
versions of torch and triton. Inductor's compile workers take the ptxas of torch's wheel, and its parent process Triton's,
unless told otherwise.
"""

from __future__ import annotations

import functools
import re
import subprocess

from fp8compile import _torch as private

Release = tuple[int, int]

FIRST_RIGHT: Release = (13, 0)
_RELEASE = re.compile(r"release (\d+)\.(\d+)")


def use_the_workers_ptxas() -> None:
    """Let this process assemble with the ptxas that Inductor's workers use: before Triton caches its version in its key."""
    if private.set_triton_ptxas_path is not None:
        private.set_triton_ptxas_path()


def ptxas_in_force() -> Release | None:
    """The release of the ptxas that Triton runs for GPUs before Blackwell; None where it cannot be read."""
    try:
        from triton import knobs

        text = _version_printed_by(knobs.nvidia.ptxas.path)
    except (ImportError, AttributeError, RuntimeError, OSError, subprocess.CalledProcessError):
        return None
    return release_in(text)


@functools.cache
def _version_printed_by(path: str) -> str:
    return subprocess.check_output([path, "--version"], text=True)


def release_in(text: str) -> Release | None:
    """The release that ``ptxas --version`` tells."""
    match = _RELEASE.search(text)
    return (int(match[1]), int(match[2])) if match else None


def is_wrong(release: Release | None) -> bool:
    """Whether this release is known to corrupt stores; an unknown one is left to the check of generated code."""
    return release is not None and release < FIRST_RIGHT
