"""What compiles the model in each arm, and what the compiler says afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.extras.demo.arms import EAGER, OURS, REFERENCE, SCALED_ARMS, compiler_of


@dataclass(frozen=True)
class BackendReport:
    """What fp8compile says it did.

    Attributes:
        text: the report's table.
        json: the whole report.
        saved_bytes: bytes saved for backward with the recipe.
        saved_bytes_plain: bytes plain Inductor would keep.
    """

    text: str
    json: str
    saved_bytes: int
    saved_bytes_plain: int


def dtype_of(arm: str) -> torch.dtype:
    """The dtype of the parameters, and so, where nothing casts, of activations and gradients."""
    return torch.float16 if arm in SCALED_ARMS else torch.float32


def compile_arm(arm: str, model: torch.nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """What the training step calls; ``options`` are fp8compile's (a preset and fields of its Recipe)."""
    compiler = compiler_of(arm)
    if compiler == EAGER:
        return model
    if compiler == REFERENCE:
        return torch.compile(model)
    assert compiler == OURS, arm
    return torch.compile(model, backend=our_backend(), options=dict(options))


def report_of(arm: str, compiled: Any) -> BackendReport | None:
    """fp8compile's report after the first training step; None for the other arms."""
    if compiler_of(arm) != OURS:
        return None
    import fp8compile

    report = fp8compile.report(compiled)
    return BackendReport(report.to_text(), report.to_json(), report.saved_bytes, report.saved_bytes_plain)


def warm_up_compiler(device: torch.device) -> None:
    """Pay the cost of a process's first compilation now, so that no arm's compile time includes it."""

    def tiny(x: Tensor) -> Tensor:
        return (x @ x).exp().sum()

    x = torch.ones(16, 16, device=device, requires_grad=True)
    torch.autograd.grad(torch.compile(tiny)(x), x)
    forget_compiled()


def forget_compiled() -> None:
    """Drop compiled code and what it holds, so that seeds neither share nor fill up Dynamo's cache in this process."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiler_cache_hits() -> int:
    """Graphs this process took from Inductor's or AOTAutograd's cache on disk instead of compiling them."""
    from fp8compile._torch import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])


def our_backend() -> Any:
    """The registered name, or the function itself where the package runs uninstalled from its source tree."""
    if OURS in torch._dynamo.list_backends(exclude_tags=()):
        return OURS
    from fp8compile.compiler.entry import fp8compile

    return fp8compile
