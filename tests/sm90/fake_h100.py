"""Pretend that this process has one H100: Inductor then lowers fake cuda tensors to Triton source for sm_90.

What is mocked, and why:
    torch.cuda.*                   Inductor asks it whether there is a device, which, and what it can do
    torch._C._cuda_get*            absent from a CPU build; generated wrappers call them
    torch.accelerator              absent: dynamo would follow its streams (torch 2.15)
    dynamo's CudaInterface         holds its own references to the functions above, taken at import
    FakeTensorMode                 would initialise the CUDA context for every fake cuda tensor
    FakeTensor.contiguous, copy_   would enter the tensor's device; so would looking up a seed
    _conv_determine_backend...     would know of no cuDNN, which computes channels last where either operand is
    torch.cuda.default_generators  would be empty, where attention in a checkpointed region hands its state on
    triton's active driver         answers "sm_90, warps of 32" where the real one loads libcuda
    triton_helpers.set_driver_*    would put the real driver back

Process-wide and for good: Inductor and Triton cache the answers, so there is no uninstall. ``install``
refuses to run under pytest; a test calls a script in a subprocess instead. Every name that is replaced must
exist first (those that only a CUDA build has excepted): a torch or triton that renamed one is reported by
name, not by a crash further on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

# The pairs that the harness works with: each torch with the triton that its CUDA wheel pins. Exact figures in the tests are
# MADE_FOR's, and where another pair has others, they stand beside them (``figures``). Bounds hold with all.
MADE_FOR = {"torch": "2.13.0", "triton": "3.7.1"}
OLDEST = {"torch": "2.11.0", "triton": "3.6.0"}
NEWEST = {"torch": "2.15.0", "triton": "3.9.0"}
WORKS_WITH = (MADE_FOR, OLDEST, NEWEST)
CAPABILITY = (9, 0)
WARP_SIZE = 32
MAX_SHARED_BYTES = 232_448

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3 (mocked)",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 * 2**30,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=WARP_SIZE,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=MAX_SHARED_BYTES,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 * 2**20,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
    uuid="mocked",
)


def installed() -> dict[str, str]:
    """The pair of this process."""
    return {package: version(package).split("+")[0] for package in MADE_FOR}


def known_pairs() -> str:
    return "; ".join(", ".join(f"{package} {known}" for package, known in pair.items()) for pair in WORKS_WITH)


def figures(
    made_for: Mapping[Any, Any], *, oldest: Mapping[Any, Any], newest: Mapping[Any, Any] = MappingProxyType({})
) -> dict[Any, Any]:
    """The exact figures for the installed pair, by case: ``made_for`` with those that are others on the oldest or newest."""
    others = {OLDEST["torch"]: oldest, NEWEST["torch"]: newest}.get(installed()["torch"], {})
    assert others.keys() <= made_for.keys()
    return {**made_for, **others}


class HarnessOutdated(RuntimeError):
    """A private name of torch or triton that the harness replaces is gone."""


def require(owner: Any, name: str) -> None:
    """Make sure that there is an ``owner.name`` to replace.

    Raises:
        HarnessOutdated: if there is none; the message says which, and what the harness was made for.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", None) or type(owner).__name__
        raise HarnessOutdated(
            f"{where}.{name} is gone (torch {torch.__version__}). The sm_90 harness was made for {known_pairs()}: "
            "see what took the name's place, adapt the harness, then add the pair to WORKS_WITH in fake_h100.py."
        )


def replace(owner: Any, name: str, value: Any, *, may_be_absent: bool = False) -> None:
    """Set ``owner.name`` for good, having made sure that there is such a name."""
    if not may_be_absent:
        require(owner, name)
    setattr(owner, name, value)


def install() -> None:
    """Turn this process into one with an H100, for good."""
    if "pytest" in sys.modules:
        raise RuntimeError("mocking torch.cuda is process-wide: run a script in a subprocess instead")
    # Imported before anything is replaced: they take references to, or wrap, what they find.
    import torch._dynamo.device_interface
    import torch._inductor.compile_fx
    import torch._inductor.graph

    _mock_torch_cuda()
    _mock_device_interface()
    _mock_fake_tensors()
    _mock_triton_driver()
    replace(
        torch.backends.cpu, "get_cpu_capability", _always("DEFAULT")
    )  # no C++ is generated: its vectors are not tried


class _NoGuard:
    """Stands for ``torch.cuda.device`` and its like: entering a device is a no-op."""

    def __init__(self, *args: object) -> None: ...

    def __enter__(self) -> _NoGuard:
        return self

    def __exit__(self, *args: object) -> None: ...


class _Generator(torch.Generator):
    """Stands for the device's generator, whose states are handed to what a checkpointed region draws twice."""

    device = torch.device("cuda", 0)

    def clone_state(self) -> _Generator:
        return _Generator()

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self


def _always(value: Any) -> Any:
    """A function of anything that returns ``value``."""
    return lambda *args, **kwargs: value


def _call(self: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """A method that calls ``operator``."""
    return operator(self, *args, **kwargs)


def _mock_torch_cuda() -> None:
    cuda = torch.cuda
    for name, value in (
        ("is_available", True),
        ("is_initialized", True),
        ("_is_compiled", True),
        ("_lazy_init", None),
        ("device_count", 1),
        ("current_device", 0),
        ("set_device", None),
        ("synchronize", None),
        ("get_device_properties", PROPERTIES),
        ("get_device_capability", CAPABILITY),
        ("get_device_name", PROPERTIES.name),
        ("get_arch_list", ["sm_90"]),
        ("is_bf16_supported", True),
        ("is_tf32_supported", True),
        ("memory_allocated", 0),
        ("manual_seed_all", None),
        ("set_rng_state", None),
        ("is_current_stream_capturing", False),
        ("_exchange_device", 0),
        ("_maybe_exchange_device", 0),
    ):
        replace(cuda, name, _always(value))
    replace(cuda, "default_generators", (_Generator(),))
    replace(cuda, "get_rng_state", lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8))
    for name in ("get_rng_state", "set_rng_state"):
        replace(cuda.random, name, getattr(cuda, name))
    for name in ("device", "_DeviceGuard"):
        replace(cuda, name, _NoGuard)
    replace(torch._C, "_cuda_getDevice", _always(0), may_be_absent=True)
    replace(torch._C, "_cuda_getCurrentRawStream", _always(0), may_be_absent=True)
    replace(
        torch._C, "_cuda_cudaCachingAllocator_is_enabled", _always(True), may_be_absent=True
    )  # CUDA graphs need it
    replace(torch._C, "_cuda_isCurrentStreamCapturing", _always(False), may_be_absent=True)
    replace(torch.accelerator, "is_available", _always(False))
    replace(torch.version, "cuda", "12.9")


def _mock_device_interface() -> None:
    from torch._dynamo import device_interface

    interface = device_interface.CudaInterface
    for name in (
        "current_device",
        "set_device",
        "device_count",
        "synchronize",
        "get_device_properties",
        "is_bf16_supported",
        "exchange_device",
        "maybe_exchange_device",
    ):
        private = f"_{name}" if name.endswith("exchange_device") else name
        replace(interface, name, staticmethod(getattr(torch.cuda, private)))
    # Defined only if torch._C had the function when dynamo was imported.
    replace(interface, "get_raw_stream", staticmethod(_always(0)))
    device_interface.init_device_reg()


def _mock_fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    # torch.tensor(..., device="cuda") under a fake mode is made on the CPU first: no CUDA can make it.
    replace(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True))
    replace(fake_tensor, "init_gpu_context", _always(None))
    # These methods enter the tensor's device, for which a CPU build has no guard; the operators do not.
    for name, packet in {"contiguous": "contiguous", "copy_": "copy_", "__invert__": "bitwise_not"}.items():
        operator = getattr(torch.ops.aten, packet).default
        replace(fake_tensor.FakeTensor, name, functools.partialmethod(_call, operator))
    _mock_seeds()
    _mock_cudnn()


def _mock_seeds() -> None:
    import torch._inductor.inductor_prims
    from torch._prims import TensorMeta

    lookup = torch.ops.prims.inductor_lookup_seed.default
    replace(lookup, "prim_meta_impl", lambda seeds, index: TensorMeta(torch.ops.aten.select.int(seeds, 0, index)))


def _mock_cudnn() -> None:
    """The order in memory in which a convolution answers: cuDNN's rule (``cudnn_conv_suggest_memory_format``)."""
    on_cpu = torch._C._conv_determine_backend_memory_format

    def answered_in(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        if x.device.type != "cuda":
            return on_cpu(x, weight, backend)
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
        wanted = {torch._prims_common.suggest_memory_format(each) for each in (x, weight)}
        return last if last in wanted and x.dtype != torch.float64 else torch.contiguous_format

    replace(torch._C, "_conv_determine_backend_memory_format", answered_in)


class _Driver:
    """What Triton and Inductor ask of a driver when nothing is ever launched."""

    utils = SimpleNamespace(
        get_device_properties=_always(
            {
                "max_shared_mem": MAX_SHARED_BYTES,
                "multiprocessor_count": PROPERTIES.multi_processor_count,
                "warpSize": WARP_SIZE,
                "max_num_regs": PROPERTIES.regs_per_multiprocessor,
                "sm_clock_rate": PROPERTIES.clock_rate,
                "mem_clock_rate": PROPERTIES.memory_clock_rate,
                "mem_bus_width": PROPERTIES.memory_bus_width,
            }
        )
    )

    def get_current_target(self) -> Any:
        return target()

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    get_current_device = staticmethod(_always(0))
    set_current_device = staticmethod(_always(None))
    get_current_stream = staticmethod(_always(0))
    get_device_capability = staticmethod(_always(CAPABILITY))
    is_active = staticmethod(_always(True))
    map_python_to_cpp_type = staticmethod(lambda ty: ty)


def target() -> Any:
    """Triton's name for an H100."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], WARP_SIZE)


def _mock_triton_driver() -> None:
    from torch._inductor.runtime import triton_helpers
    from triton.runtime import driver

    require(driver, "set_active")
    driver.set_active(_Driver())
    replace(triton_helpers, "set_driver_to_gpu", _always(None))
    replace(triton_helpers, "set_driver_to_cpu", _always(None))
