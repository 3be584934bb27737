"""A test of generated code on a GPU, before the first compiled graph runs there: once a process and device.

Some assemblers corrupt an FP8 value that one kernel for sm_90 stores both contiguous and transposed. ptxas below 13.0 does so
with E5M2 in loops, and is refused. The assembler of triton 3.8 does so beside ``min.NaN`` and ``max.NaN`` (triton issue
11111). Kernels of FP8 linears are of both kinds. So two such kernels are run and compared with eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.compiler import ptxas
from fp8compile.numerics import E4M3, E5M2, Tensorwise
from fp8compile.numerics.delayed import partial_statistics, quantize_under

WRONG = (
    "ptxas {} generates wrong code for {}: of {} FP8 values that a kernel stores contiguous and transposed, {} are not what "
    "they should be. Fix: let TRITON_PTXAS_PATH name another ptxas, of release 13.0 or 13.4, before torch is imported"
)
REFUSED = (
    "ptxas {} corrupts FP8 values that one kernel stores contiguous and transposed, for {}. Fix: install a torch that ships "
    "ptxas 13.0 or newer (CUDA 13), or let TRITON_PTXAS_PATH name one, before torch is imported"
)
IN_FORCE = "generated kernels are assembled by ptxas {}"
SHAPE = (256, 512)
LOOPED = (512, 8192)  # rows too long for one block: Inductor loops over them
INV_SCALE = 2.0**-10  # a power of two: products are exact


def prepare_ptxas(example_inputs: Iterable[object]) -> None:
    """Where a graph runs on a GPU, assemble in this process with the ptxas of Inductor's workers."""
    if _cuda_devices(example_inputs):
        ptxas.use_the_workers_ptxas()


def ptxas_remarks(example_inputs: Iterable[object]) -> tuple[str, ...]:
    """For the report: which ptxas assembles what is generated, where a graph runs on a GPU that it assembles for."""
    if not any(map(_takes_ptxas, _cuda_devices(example_inputs))):
        return ()
    return (IN_FORCE.format(_named(ptxas.ptxas_in_force())),)


def check_stores_first(compiled: Callable[..., Any], example_inputs: Iterable[object]) -> Callable[..., Any]:
    """``compiled``, before whose first call the test runs; itself where nothing runs on a GPU.

    Its first call raises RuntimeError where the assembler is known to be wrong, or the test fails.
    """
    devices = _cuda_devices(example_inputs)
    if not devices:
        return compiled

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        for device in devices:
            refuse_wrong_ptxas(device)
            check_stores(device)
        return compiled(*args)

    return run


@functools.cache
def refuse_wrong_ptxas(device: torch.device) -> None:
    """Raise RuntimeError where the ptxas in force is one that is known to corrupt FP8 stores on ``device``."""
    if not _takes_ptxas(device):
        return
    release = ptxas.ptxas_in_force()
    if ptxas.is_wrong(release):
        raise RuntimeError(REFUSED.format(_named(release), device))


@functools.cache
def check_stores(device: torch.device) -> None:
    """Raise RuntimeError where generated code for ``device`` stores other codes than eager."""
    for stored, shape in ((_stored_twice, SHAPE), (stored_twice_in_a_loop, LOOPED)):
        x = values_to_store(device, shape)
        with torch.no_grad():
            wrong = differing(torch.compile(stored)(x), stored(x))
        if wrong:
            release = _named(ptxas.ptxas_in_force())
            raise RuntimeError(WRONG.format(release, device, 2 * x.numel(), wrong))


def _stored_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, _ = Tensorwise(E4M3).encode(x)
    return codes, codes.t().contiguous()


def values_to_store(device: torch.device, shape: tuple[int, int]) -> Tensor:
    """BF16 of ``shape``, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


def stored_twice_in_a_loop(x: Tensor) -> tuple[Tensor, ...]:
    """What a gradient under a delayed scale does: E5M2 codes in both layouts, and statistics of each row.

    The order counts: with the transposed codes written second, ptxas 12.8 is right (tests/sm90/run_byte_flow.py).
    """
    inv_scale = x.new_full((), INV_SCALE, dtype=torch.float32)
    statistics = partial_statistics(x, inv_scale.reciprocal(), E5M2)
    transposed = quantize_under(x.t(), inv_scale, E5M2).contiguous()
    return transposed, quantize_under(x, inv_scale, E5M2), *statistics


def _cuda_devices(values: Iterable[object]) -> set[torch.device]:
    return {v.device for v in values if isinstance(v, Tensor) and v.device.type == "cuda"}


def _takes_ptxas(device: torch.device) -> bool:
    """Whether it is no GPU of another assembler: AMD's, or Blackwell."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) < (10, 0)


def _named(release: ptxas.Release | None) -> str:
    return "of unknown release" if release is None else f"{release[0]}.{release[1]}"


def differing(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """How many bytes of ``ours`` are not those of ``expected``."""
    pairs = zip(ours, expected, strict=True)
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
