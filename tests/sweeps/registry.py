"""What an adversarial program is, and the list of all of them.

A program is one training step of something small: a model, its inputs, what is compiled (``call``) and how the step is made
(``drive``: by default forward, then backward of the output's projection on fixed weights). Everything that a step leaves
behind is compared with eager: outputs, gradients, buffers, parameters and inputs (which the step may have changed).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Maker = Callable[[], Any]
Values = dict[str, Any]


@dataclass
class Run:
    """A program under way: called, it is the program's call, compiled; ``compiled`` compiles anything else alike."""

    call: Callable[..., Any]
    compiled: Callable[[Any], Any]

    def __call__(self, *inputs: Any) -> Any:
        return self.call(*inputs)


Drive = Callable[..., Values]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: theme and name, unique.
        call: what is compiled: of the model and the inputs.
        model: makes the model; ``inputs`` make the inputs, afresh for every run, under the same seed.
        drive: makes the step: of the ``Run``, the model and the inputs; returns what there is to compare besides what is
            compared anyway.
        bar: the dB every value has to reach, or what the dtype's own noise (preset "off") reaches, less 3.
        argued: values that are let off (or "*"), each with the argument why they have to be; "raises": the exception is
            plain Inductor's own, word for word.
        dynamic: as in torch.compile.
        config: settings of torch._dynamo.config that the program needs.
        bits: whether the program is compared under eager's random numbers (``fallback_random``).
    """

    name: str
    call: Callable[..., Any]
    model: Callable[[], Any]
    inputs: tuple[Maker, ...]
    drive: Drive
    bar: float = 20.0
    argued: Mapping[str, str] = field(default_factory=dict)
    dynamic: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    bits: bool = True


PROGRAMS: dict[str, Program] = {}


def program(
    *inputs: Maker, model: Callable[[], Any] = nn.Module, drive: Drive | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated function on the list; its name is the program's."""

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        theme = call.__module__.rpartition(".")[2]
        name = f"{theme}: {call.__name__.strip('_').replace('_', ' ')}"
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, call, model, inputs or (leaf(64, 256),), drive or forward_backward, **options)
        return call

    return add


def forward_backward(run: Run, model: Any, *inputs: Any) -> Values:
    """A step as most are: forward, then backward of the projected output."""
    out = run(*inputs)
    projected(out).backward()
    return {"out": out}


def steps(count: int) -> Drive:
    """A drive of ``count`` steps whose gradients add up."""

    def drive(run: Run, model: Any, *inputs: Any) -> Values:
        outs = []
        for _ in range(count):
            outs.append(run(*inputs))
            projected(outs[-1]).backward()
        return {"out": outs}

    return drive


def projected(out: Any) -> Tensor:
    """The sum of all differentiable tensors in ``out``, each weighted by fixed random numbers (a scalar by 1)."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors(out):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            real = real.to_dense() if real.is_sparse else real
            weight = torch.randn(real.shape, generator=torch.Generator().manual_seed(3)) if real.dim() else 1.0
            total = total + (real.double() * weight).sum()
    return total


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def leaf(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Maker:
    """A Gaussian input that requires grad."""
    return lambda: (torch.randn(shape, dtype=dtype) * scale + shift).requires_grad_()


def data(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Maker:
    """A Gaussian input without gradient."""
    return lambda: torch.randn(shape, dtype=dtype) * scale + shift


def unit(*shape: int, low: float = 1e-4, grad: bool = True) -> Maker:
    """An input uniform in ``[low, 1 - low]``."""
    return lambda: torch.rand(shape).clamp(low, 1 - low).requires_grad_(grad)


def index(high: int, *shape: int) -> Maker:
    """Integers in ``[0, high)``."""
    return lambda: torch.randint(0, high, shape)


def linear(
    *sizes: int, act: Callable[[], nn.Module] | None = nn.GELU, bias: bool = True
) -> Callable[[], nn.Sequential]:
    """A model maker: linears of these sizes with ``act`` between them."""

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += ([act()] if layers and act else []) + [nn.Linear(a, b, bias=bias)]
        return nn.Sequential(*layers)

    return make


def modules(**named: Callable[[], nn.Module]) -> Callable[[], nn.ModuleDict]:
    """A model maker: a ModuleDict of these; the call reads ``m["name"]``."""
    return lambda: nn.ModuleDict({name: make() for name, make in named.items()})
