"""Other people's systems, where they are installed: imported when asked for, left out with the reason where they are not.

act-quant     PyTorch's own pass that keeps activations in FP8 (Inductor's activation_quantization_aten_pass), with the
              scales that its backward leaves out by default, and without its threshold of 100 MB
torchao       float8 linears (convert_to_float8_training), low-bit optimizers
liger         Triton kernels of Liger-Kernel
flashoptim    FlashAdamW
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.harness.timing import reason
from fp8compile.linears.device import fp8_unsupported_reason

T = TypeVar("T")


@dataclass(frozen=True)
class Peer:
    """A package: how it is imported and installed, and whether it needs a GPU."""

    module: str
    install: str
    needs_gpu: bool = False


PEERS = {
    "torchao": Peer("torchao", "pip install torchao"),
    "liger": Peer("liger_kernel", "pip install liger-kernel", needs_gpu=True),
    "flashoptim": Peer("flashoptim", "pip install flashoptim", needs_gpu=True),
}


def why_not(arm: str, device: torch.device) -> str | None:
    """Why an arm, whose first word may be a peer, cannot run here; None if it can."""
    peer = PEERS.get(arm.split()[0])
    if peer is None:
        return None
    if peer.needs_gpu and device.type != "cuda":
        return "its kernels need a GPU"
    try:
        importlib.import_module(peer.module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == peer.module
        return f"not installed ({peer.install})" if missing else reason(error)
    return None


def built(factories: Mapping[str, Callable[[], T]], device: torch.device) -> tuple[dict[str, T], dict[str, str]]:
    """What each factory makes, and the reasons of those that cannot here."""
    made: dict[str, T] = {}
    left_out: dict[str, str] = {}
    for name, factory in factories.items():
        if why := why_not(name, device):
            left_out[name] = why
            continue
        try:
            made[name] = factory()
        except Exception as error:
            if name.split()[0] not in PEERS:
                raise
            left_out[name] = reason(error)
    return made, left_out


def act_quant(model: Callable[..., Any]) -> Callable[..., Any]:
    """``model`` compiled by Inductor with PyTorch's pass on."""
    own = {"use_scaling": True, "size_in_mb": 0, "quant_type": "torch.float8_e5m2"}
    return torch.compile(
        model,
        dynamic=False,
        options={"post_grad_fusion_options": {"activation_quantization_aten_pass": own}},
    )


def torchao_float8(model: nn.Module) -> Callable[..., Any]:
    """``model``, whose linears torchao replaces in place, compiled by Inductor; emulated where nothing multiplies FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device = next(model.parameters()).device
    config = Float8LinearConfig(emulate=fp8_unsupported_reason(device) is not None)
    return torch.compile(convert_to_float8_training(model, config=config), dynamic=False)


def ours(model: Callable[..., Any], device: torch.device, **options: Any) -> Callable[..., Any]:
    """``model`` compiled by fp8compile; FP8 linears are emulated where nothing multiplies FP8."""
    from fp8compile.extras.demo.compiling import our_backend

    emulated = {} if fp8_unsupported_reason(device) is None else {"linears.emulate": True}
    return torch.compile(model, backend=our_backend(), dynamic=False, options={**emulated, **options})


def inductor(model: Callable[..., Any]) -> Callable[..., Any]:
    """``model`` compiled by plain Inductor."""
    return torch.compile(model, dynamic=False)
