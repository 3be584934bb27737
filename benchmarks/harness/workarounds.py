"""Two workarounds: for a torchvision that does not load, and for CPUs that multiply BF16 slowly."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []  # what is registered lives as long as its Library


@functools.cache
def mend_torchvision() -> None:
    """Make torchvision importable where its C++ operators cannot load (a CUDA build beside a CPU torch).

    timm and transformers import it, and at import it registers fake kernels for two operators of its own,
    which must then be defined, whether or not they are ever called. No model here calls them: bare
    definitions are enough.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return  # transformers does without
    except RuntimeError:  # operator torchvision::nms does not exist
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _libraries.append(library)
        importlib.import_module("torchvision")


def bf16_products_in_fp32() -> bool:
    """Run BF16 products on the CPU as FP32 products, rounded once at the end; says whether there was need.

    A CPU without BF16 instructions multiplies BF16 matrices some 20 times slower than FP32 ones. What
    hardware does is the product in FP32 with one rounding, and that is what this computes: products of
    BF16 numbers are exact in FP32. It replaces the CPU kernels of this process, whoever calls them:
    eager, both code generators, forward and backward.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or _libraries_of("aten"):
        return False
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is the purpose
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            _replace_kernel(library, name)
            _replace_kernel(library, f"{name}.out")
        _replace_kernel(library, "convolution")
        _replace_kernel(library, "convolution_backward")
    _libraries.append(library)
    return True


def _libraries_of(namespace: str) -> list[torch.library.Library]:
    return [library for library in _libraries if library.ns == namespace]


def _replace_kernel(library: torch.library.Library, name: str) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")  # type: ignore[attr-defined,unused-ignore]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            given = {**kwargs, "out": out} if out is not None else kwargs
            return kernel.call_boxed(keys, *args, **given)
        wide = [a.float() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in args]
        if out is not None:
            result = kernel.call_boxed(keys, *wide, **kwargs, out=torch.empty_like(out, dtype=torch.float32))
            return out.copy_(result)
        result = kernel.call_boxed(keys, *wide, **kwargs)
        if isinstance(result, Tensor):
            return result.to(torch.bfloat16)
        return tuple(None if r is None else r.to(torch.bfloat16) for r in result)

    library.impl(name, run, "CPU")  # type: ignore[no-untyped-call]


def bf16_in_fp32() -> bool:
    """Whether ``bf16_products_in_fp32`` had need to do its work."""
    return bool(_libraries_of("aten"))
