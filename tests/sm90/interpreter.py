"""Make Triton's interpreter (``TRITON_INTERPRET=1``) compute what an sm_90 GPU computes, on the CPU.

Raw, it cannot run what Inductor writes, or runs it wrongly; four fixes, process-wide like the mock:
    libdevice     its functions are stubs that return None: routed to NumPy (rsqrt in double, then rounded)
    conversions   to FP8 and BF16 are rounded wrongly: routed to torch's casts, which are nearest even; those
                  to FP8 saturate and keep NaN, as PTX's ``cvt.rn.satfinite`` does
    reductions    with a combine function (Inductor's NaN-propagating max) go element by element in Python:
                  folded over whole slices instead, in an order that is not the GPU's
    indices       triton 3.6 hands ``int`` an array of one element, which NumPy 2.4 refuses

Two things stay different from the GPU: division is exact here (``div.full.f32`` is good to 2 ulp), and no
multiply-add is contracted.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .fake_h100 import replace, require

_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "erf": lambda a: torch.erf(torch.from_numpy(np.ascontiguousarray(a))).numpy(),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fast_expf": np.exp,
    "floor": np.floor,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "rint": np.rint,
    "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "fmod": np.fmod,
    "ldexp": lambda a, b: np.ldexp(a, b.astype(np.int32)),
    "pow": np.power,
    "copysign": np.copysign,
}
_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "lg2": np.log2,
    "ex2": np.exp2,
    "sqrt": lambda x: np.sqrt(np.maximum(x, 2.0**-126)),
    "div": np.divide,
    "rcp": np.reciprocal,
}


def interpreting() -> bool:
    """Whether the process has ``TRITON_INTERPRET=1``, which Triton reads when a kernel is decorated."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def install() -> None:
    """Fix the interpreter of this process."""
    if not interpreting():
        raise RuntimeError("start the process with TRITON_INTERPRET=1")
    _route_libdevice()
    _route_instructions()
    _fix_conversions()
    _fix_reductions()
    _fix_indices()


class _Libdevice:
    """Stands for the ``libdevice`` module: each function works on the interpreter's tensors through NumPy."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _UNARY:
            return lambda x, _semantic=None: _elementwise(_UNARY[name], x)
        if name in _BINARY:
            return lambda x, y, _semantic=None: _elementwise(_BINARY[name], x, y)
        raise NotImplementedError(f"libdevice.{name}: give it a NumPy equivalent in {__name__}")


def _elementwise(function: Callable[..., Any], *args: Any) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    semantic = triton_interpreter.interpreter_semantic
    tensors = [semantic.to_tensor(arg) for arg in args]
    if len(tensors) == 2:
        tensors = list(semantic.broadcast_impl_value(*tensors))
    first = tensors[0]
    with np.errstate(all="ignore"):
        data = np.asarray(function(*(tensor.handle.data for tensor in tensors)))
    handle = triton_interpreter.TensorHandle(data.astype(first.handle.data.dtype), first.handle.dtype)
    return tl.core.tensor(handle, first.type)


def _route_libdevice() -> None:
    from torch._inductor.runtime import triton_compat, triton_helpers

    for module in (triton_helpers, triton_compat):
        replace(module, "libdevice", _Libdevice())


def _route_instructions() -> None:
    """Inline assembly of a short form of a function of FP32."""
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    def create_inline_asm(
        self: Any, asm: str, constraints: str, handles: list[Any], types: Any, pure: bool, pack: int
    ) -> Any:
        with np.errstate(all="ignore"):
            data = np.asarray(_instruction(asm)(*(handle.data for handle in handles)))
        as_bits = constraints.startswith("=r")
        result = data.astype(np.float32).view(np.int32) if as_bits else data.astype(np.float32)
        handle = triton_interpreter.TensorHandle(result, tl.int32 if as_bits else tl.float32)
        return SimpleNamespace(get_result=lambda i: handle)

    triton_interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


def _instruction(asm: str) -> Callable[..., Any]:
    """What a short form computes: one instruction, or bounds (and a sum behind them), whose numbers stand in it."""
    numbers = [struct.unpack(">f", bytes.fromhex(digits))[0] for digits in re.findall(r"0f([0-9A-F]{8})", asm)]
    if asm.startswith("{.reg .f32 y; max."):
        least, most, *added = map(np.float32, numbers)
        cut = np.trunc if "add.rz" in asm else np.asarray

        def bounded(x: Any) -> Any:
            x = x if "max.NaN" in asm else np.where(np.isnan(x), least, x)
            return np.add(cut(np.clip(x, least, most)), *(added or [np.float32(0)]))

        return bounded
    if "and.b32" in asm:  # two factors, and which bits are kept between: dither.truncated
        mask = np.int32(re.findall(r"and\.b32 b, b, (-\d+)", asm)[0])
        down, up = map(np.float32, numbers)
        return lambda x: ((x * down).view(np.int32) & mask).view(np.float32) * up
    return _INSTRUCTIONS[asm.partition(".approx")[0].split()[-1]]


def _fix_conversions() -> None:
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    torch_dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
    }
    require(triton_interpreter, "_convert_float")
    upstream = triton_interpreter._convert_float

    def convert(bits: Any, source: Any, destination: Any, rounding: Any) -> Any:
        if source not in torch_dtypes or destination not in torch_dtypes:
            return upstream(bits, source, destination, rounding)
        flat = np.ascontiguousarray(bits).reshape(-1)
        return _cast_bits(flat, torch_dtypes[source], torch_dtypes[destination]).reshape(bits.shape)

    replace(triton_interpreter, "_convert_float", convert)


def _cast_bits(flat: Any, source: torch.dtype, destination: torch.dtype) -> Any:
    """``flat``, bit patterns of ``source`` in any NumPy type of that size, cast to ``destination``."""
    x = torch.from_numpy(flat).view(source)
    x = x if source == torch.float64 else x.float()
    if destination.itemsize == 1:
        limit = torch.finfo(destination).max
        x = x.clamp(-limit, limit)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[destination.itemsize]
    return x.to(destination).view(signed).numpy().view(f"uint{8 * destination.itemsize}")


def _fix_reductions() -> None:
    from triton.runtime import interpreter as triton_interpreter

    def generic_reduce(self: Any, inputs: Any) -> list[Any]:
        tensors, axis = self.unravel(inputs, self.axis)
        dtypes = [tensor.dtype for tensor in tensors]
        slices = _folded(self, [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors], dtypes)
        ndim = inputs[0].handle.data.ndim
        return [
            self.to_tensor(_shaped(data, self.axis, ndim, self.keep_dims), dtype)
            for data, dtype in zip(slices, dtypes, strict=True)
        ]

    replace(triton_interpreter.ReduceOps, "generic_reduce", generic_reduce)


def _fix_indices() -> None:
    from triton.runtime import interpreter as triton_interpreter

    require(triton_interpreter, "_patch_lang_tensor")
    upstream = triton_interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        upstream(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    replace(triton_interpreter, "_patch_lang_tensor", patch)


def _folded(ops: Any, data: list[Any], dtypes: list[Any]) -> list[Any]:
    """Each array reduced along its first axis: upper half onto lower half until one slice is left."""
    while (n := data[0].shape[0]) > 1:
        half = n // 2
        low = [ops.to_tensor(d[:half], t) for d, t in zip(data, dtypes, strict=True)]
        high = [ops.to_tensor(d[half : 2 * half], t) for d, t in zip(data, dtypes, strict=True)]
        result = ops.combine_fn.fn(*low, *high)
        result = result if isinstance(result, tuple) else (result,)
        data = [
            np.concatenate([r.handle.data.reshape(l.handle.data.shape), d[2 * half :]])
            for r, l, d in zip(result, low, data, strict=True)
        ]
    return [d[0] for d in data]


def _shaped(data: Any, axis: int | None, ndim: int, keep_dims: bool) -> Any:
    """A reduced slice in the shape ``tl.reduce`` gives it: scalars are plain numbers to the interpreter."""
    if keep_dims:
        return data.reshape((1,) * ndim) if axis is None else np.expand_dims(data, axis)
    return data.item() if axis is None or data.ndim == 0 else data
