"""What the generated wrapper hands to the kernels that Inductor did not generate: products and attention.

The wrapper itself runs, on uninitialised CPU tensors of the real sizes, with nothing launched and no product computed; each
extern call is written down with the dtypes, shapes and strides that it is given.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .lowering import LoweredGraph, recording

aten = torch.ops.aten
EXTERNS = (
    aten.mm.out,
    aten.addmm.out,
    aten._scaled_mm.out,
    aten._int_mm.out,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._foreach_norm.Scalar,
)
AMAXES = "_foreach_norm"  # of all weights (fp8compile/linears/weight_amaxes.py)


@dataclass(frozen=True)
class Operand:
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class ExternCall:
    """One call: its tensors in the order of the arguments, then its results; other arguments by name."""

    name: str
    operands: tuple[Operand | None, ...]
    results: tuple[Operand, ...]
    options: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Every operand read once and every result written once."""
        return sum(operand.num_bytes for operand in (*self.operands, *self.results) if operand)


class _Recorder(TorchDispatchMode):
    """Writes down extern calls, and answers them with uninitialised tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ExternCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in EXTERNS:
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        results = _uncomputed(func, args, kwargs) if out is None else out
        written = tuple(_operand(t) for t in tree_leaves(results) if isinstance(t, Tensor))
        flat = (each for a in args for each in (a if isinstance(a, list) else [a]))
        operands = tuple(_operand(a) for a in flat if a is None or isinstance(a, Tensor))
        options = {name: str(value) for name, value in kwargs.items()}
        self.calls.append(ExternCall(func.overloadpacket.__name__, operands, written, options))
        return results


def _uncomputed(func: Any, args: Any, kwargs: Any) -> Any:
    shapes = tree_map(lambda a: a.to("meta") if isinstance(a, Tensor) else a, (args, kwargs))
    results = func(*shapes[0], **shapes[1])
    return tree_map(lambda r: torch.empty_like(r, device="cpu") if isinstance(r, Tensor) else r, results)


def _operand(t: Tensor | None) -> Any:
    return None if t is None else Operand(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride())


def extern_calls(graph: LoweredGraph) -> list[ExternCall]:
    """The extern calls of a lowered graph, in order."""
    with _on_cpu(graph) as wrapper, _Recorder() as recorder:
        wrapper.call(wrapper.get_args())
    return recorder.calls


def bytes_and_calls(graph: LoweredGraph) -> tuple[int, list[ExternCall]]:
    """Bytes that generated kernels and amaxes of weights move, and the other extern calls."""
    calls = extern_calls(graph)
    amaxes = sum(call.num_bytes for call in calls if call.name == AMAXES)
    return graph.num_bytes + amaxes, [call for call in calls if call.name != AMAXES]


@contextmanager
def _on_cpu(graph: LoweredGraph) -> Iterator[Any]:
    """The wrapper as a module whose inputs and buffers are CPU tensors and whose kernels do nothing."""

    def strided(size: Any, stride: Any, dtype: Any = torch.float32, device: Any = None, **_: Any) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    wrapper: Any = types.ModuleType(f"wrapper_{id(graph)}")
    idle = SimpleNamespace(run=lambda *args, **kwargs: None)
    testing = "torch._dynamo.testing.rand_strided"
    with recording(LoweredGraph(), lambda kernel: idle), mock.patch(testing, strided):
        sys.modules[wrapper.__name__] = wrapper
        exec(graph.wrapper, vars(wrapper))
        yield wrapper
