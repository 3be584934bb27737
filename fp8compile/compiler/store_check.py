"""A test of generated code on a GPU, where torch and triton are a pair that nobody has tested: once a process, milliseconds.

The assembler of triton 3.8 corrupts an FP8 value that one kernel for sm_90 stores both contiguous and transposed, beside
``min.NaN`` and ``max.NaN`` (triton issue 11111). Kernels of FP8 linears do that. So such a kernel is run and compared with
eager before the first compiled graph runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from fp8compile._version import release_of
from fp8compile.numerics import E4M3, Tensorwise

Release = tuple[int, int]

TESTED: tuple[tuple[Release, Release], ...] = (((2, 11), (3, 6)), ((2, 13), (3, 7)), ((2, 15), (3, 9)))
WRONG = (
    "torch {} with triton {} generates wrong code for {}: of {} FP8 values that a kernel stores contiguous and transposed, "
    "{} are not what they should be (triton issue 11111). Fix: install a pair that was tested: {}"
)
SHAPE = (256, 512)


def check_stores_first(compiled: Callable[..., Any], example_inputs: Iterable[object]) -> Callable[..., Any]:
    """``compiled``, before whose first call the test runs; itself where nothing runs on a GPU or the pair was tested.

    Its first call raises RuntimeError where the test fails.
    """
    devices = {v.device for v in example_inputs if isinstance(v, Tensor) and v.device.type == "cuda"}
    if not devices or is_tested(torch.__version__, triton_version()):
        return compiled

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        for device in devices:
            check_stores(device)
        return compiled(*args)

    return run


def is_tested(torch_version: str, triton_version: str) -> bool:
    return (release_of(torch_version), release_of(triton_version)) in TESTED


@functools.cache
def triton_version() -> str:
    """The version of the installed triton; "0.0" without one."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "0.0"


@functools.cache
def check_stores(device: torch.device) -> None:
    """Raise RuntimeError where generated code for ``device`` stores other codes than eager."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    with torch.no_grad():
        differing = _differing(torch.compile(_stored_twice)(x), _stored_twice(x))
    if differing:
        tested = ", ".join(f"torch {a}.{b} with triton {c}.{d}" for (a, b), (c, d) in TESTED)
        raise RuntimeError(
            WRONG.format(torch.__version__, triton_version(), device, 2 * x.numel(), differing, tested)
        )


def _stored_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, _ = Tensorwise(E4M3).encode(x)
    return codes, codes.t().contiguous()


def _differing(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    pairs = zip(ours, expected, strict=True)
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
