"""What the tests measure with: a Llama-style layer, the bytes saved for backward, gradients against float64 in dB."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.reporting.entries import LINEAR, Linear, Skip
from fp8compile.reporting.report import Report
from tests.support.reference import sqnr_db


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x if x.dtype == torch.float64 else x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class LlamaLayer(nn.Module):
    """A decoder layer as in Llama: RMSNorm, rotary attention by SDPA (``kv_heads``: grouped), RMSNorm, SwiGLU, no biases."""

    def __init__(self, hidden: int = 512, ffn: int = 1376, heads: int = 8, kv_heads: int | None = None) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.grouped = kv_heads not in (None, heads)
        kv = (kv_heads or heads) * self.head_size
        self.q, self.k, self.v, self.o = (
            nn.Linear(i, o, bias=False) for i, o in ((hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden))
        )
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self._by_head(linear(y)) for linear in (self.q, self.k, self.v))
        q, k = (t * cos + _rotated(t) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_size).transpose(1, 2)


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def llama_case(
    batch: int = 2,
    seq: int = 256,
    hidden: int = 512,
    ffn: int = 1376,
    heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[LlamaLayer, tuple[Tensor, ...]]:
    """A layer with seeded weights and its arguments: block input (requires grad) and the rotary tables."""
    torch.manual_seed(7)
    layer = LlamaLayer(hidden, ffn, heads).to(dtype)
    cos, sin = (torch.randn(seq, hidden // heads, dtype=dtype) for _ in range(2))
    return layer, (torch.randn(batch, seq, hidden, dtype=dtype).requires_grad_(), cos, sin)


def kept_bytes(model: nn.Module, fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> int:
    """Bytes saved for backward of ``fn(*args)``, as autograd sees them: distinct storages; parameters and arguments
    that take no gradient (tables, data: the caller owns them) left out."""
    known = {
        t.untyped_storage().data_ptr()
        for t in (*model.parameters(), *model.buffers(), *args)
        if not _differentiable(t)
    }
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if (pointer := t.untyped_storage().data_ptr()) not in known:
            kept[pointer] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*args)
    del out
    return sum(kept.values())


def _differentiable(t: Tensor) -> bool:
    return t.requires_grad and not isinstance(t, nn.Parameter)


def gradients(model: nn.Module, fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Gradients of a fixed random projection of ``fn(*args)`` by every parameter and differentiable argument."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    named |= {f"arg{i}": a for i, a in enumerate(args) if a.requires_grad}
    out = fn(*args)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.autograd.grad((out * weight.to(out)).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))


def gradient_sqnr(model: nn.Module, fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> dict[str, float]:
    """SQNR in dB of every gradient of ``fn`` against ``model`` itself in float64."""
    exact = copy.deepcopy(model).double()
    exact_args = tuple(
        a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args
    )
    reference = gradients(exact, exact, exact_args)
    got = gradients(model, fn, args)
    return {name: sqnr_db(reference[name], got[name]) for name in reference}


def compiled(model: nn.Module, **options: object) -> Callable[..., Tensor]:
    """``model`` compiled by the backend, by default with the rewritten graph run node by node."""
    return torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager", **options})  # type: ignore[return-value]


def matmul_entries(report: Report) -> list[Linear | Skip]:
    """Every matmul of a linear that a report tells of: in FP8, or left."""
    return [*report.linears, *report.notes.skipped(LINEAR)]


def why(entry: Linear | Skip) -> str:
    """Why a matmul was left; "" where it was not."""
    return entry.reason if isinstance(entry, Skip) else ""
