"""Code that overflows or vanishes in FP16, each with what brings its values back into range: functions and inputs.

Fourteen snippets, a linear attention (Katharopoulos et al. 2020, as LoFTR writes it) and a camera projection. Inputs are FP16
and finite; results in float64 fit FP16 wherever the comparison looks.

A case has four forms: on tensors without a batch ("2-D", so that a matrix product is an ``mm``) or batched (a ``bmm``), each
as a function and as a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[[], tuple[Tensor, ...]]


class Function(nn.Module):
    """A function as a module, so that it can be compiled, explained and calibrated."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Tensor:
        return self.fn(*args)


@dataclass(frozen=True)
class Case:
    """``fn`` on what ``make`` draws; ``what`` overflows. ``batched``: what it draws has a batch in front."""

    what: str
    fn: Callable[..., Tensor]
    make: Make
    batched: bool = False

    def inputs(self, batched: bool) -> tuple[Tensor, ...]:
        """Inputs with a batch in front, or without."""
        args = self.make()
        if batched == self.batched:
            return args
        return tuple(torch.stack(both) for both in zip(args, self.make(), strict=True)) if batched else _first(args)


def _first(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a[0] for a in args)


def randn(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape) * std + mean).half()


def softmax_of_large_logits(x: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(x / 0.005, -1) @ values


def variance_of_large_means(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1).sqrt()


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1) / torch.arange(1, x.shape[-1] + 1, device=x.device)


def logsumexp(x: Tensor) -> Tensor:
    return x.exp().sum(-1).log()


def power(x: Tensor) -> Tensor:
    return (x**4).mean(-1) ** 0.25


def group_norm(x: Tensor) -> Tensor:
    groups = x.reshape(x.shape[0], 4, -1)
    centred = groups - groups.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + 1e-5)).reshape(x.shape)


def norm_of_a_million(x: Tensor) -> Tensor:
    return x / x.norm() * 1000


def mean_of_a_long_sum(x: Tensor) -> Tensor:
    return x.sum(-1) / x.shape[-1]


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, -2), target.flatten()) / 16


def unscaled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def exponential(x: Tensor) -> Tensor:
    e = x.exp()
    return e / (1 + e)


def division_by_a_tiny_number(x: Tensor) -> Tensor:
    return (x / 1e-8) * 1e-7


def product_of_matrices(intrinsic: Tensor, extrinsic: Tensor) -> Tensor:
    return torch.matmul(intrinsic, extrinsic) / 1e4


def gram_matrix(f: Tensor) -> Tensor:
    return f @ f.mT / f.shape[-1]


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``LinearAttention`` of one head, q, k, v ``[..., length, size]``."""
    q, k, length = F.elu(q) + 1, F.elu(k) + 1, v.shape[-2]
    z = 1 / ((q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True) + 1e-6)
    return q @ (k.mT @ (v / length)) * z * length


def cameras(K: Tensor, E: Tensor, points: Tensor) -> Tensor:
    projected = (K @ E) @ points
    return projected[..., :2, :] / projected[..., 2:3, :]


SNIPPETS: dict[str, Case] = {
    "softmax": Case(
        "large logits", softmax_of_large_logits, lambda: (randn(2, 64, 64, std=200), randn(2, 64, 8)), True
    ),
    "variance": Case("of large means", variance_of_large_means, lambda: (randn(16, 512, std=400, mean=3000),)),
    "cumsum": Case("of 4096 elements", cumsum, lambda: (randn(4, 4096, std=10, mean=50),)),
    "logsumexp": Case("written out", logsumexp, lambda: (randn(8, 256, std=2, mean=12),)),
    "pow": Case("a fourth power", power, lambda: (randn(8, 256, std=50),)),
    "group norm": Case("written out", group_norm, lambda: (randn(4, 8, 64, std=600),), True),
    "L2 norm": Case("of 1e6 elements", norm_of_a_million, lambda: (randn(1000, 1000, std=100),)),
    "mean": Case("of a sum of 8192", mean_of_a_long_sum, lambda: (randn(8, 8192, std=10, mean=50),)),
    "cross-entropy": Case(
        "of wide logits", cross_entropy, lambda: (randn(64, 100, std=12000), torch.arange(64) % 100)
    ),
    "attention": Case(
        "scores unscaled",
        unscaled_attention,
        lambda: (randn(2, 64, 64, std=60), randn(2, 64, 64, std=60), randn(2, 64, 64)),
        True,
    ),
    "exp": Case("of 12", exponential, lambda: (randn(64, 64, std=0.5, mean=12),)),
    "division": Case("by 1e-8", division_by_a_tiny_number, lambda: (randn(64, 64),)),
    "matrices": Case(
        "entries near 3000", product_of_matrices, lambda: (randn(4, 4, std=3000), randn(4, 4, std=3000))
    ),
    "Gram matrix": Case("of 65536 columns", gram_matrix, lambda: (randn(8, 65536, std=10),)),
}


class LinearAttention(nn.Module):
    """Feature map elu + 1; q, k, v ``[batch, length, heads, size]``."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k = F.elu(queries) + 1, F.elu(keys) + 1
        length = values.shape[1]
        values = values / length
        kv = torch.einsum("nshd,nshv->nhdv", k, values)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
        return torch.einsum("nlhd,nhdv,nlh->nlhv", q, kv, z) * length

    @staticmethod
    def inputs(length: int = 4096) -> tuple[Tensor, ...]:
        return randn(1, length, 4, 32), randn(1, length, 4, 32), randn(1, length, 4, 32, mean=0.5)


class LinearAttentionLayer(nn.Module):
    """The same between its linears, as LoFTR's encoder layer has it."""

    def __init__(self, size: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.merge = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(2 * size, 2 * size, bias=False), nn.ReLU(), nn.Linear(2 * size, size))
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention, self.heads = LinearAttention(), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        message = self.norm1(self.merge(self.attention(q, k, v).flatten(-2)))
        return x + self.norm2(self.mlp(torch.cat([x, message], -1)))


class Cameras(nn.Module):
    """Intrinsics K ``[n, 3, 3]`` times extrinsics E ``[n, 3, 4]`` times points ``[n, 4, m]``, divided by the depth."""

    def forward(self, K: Tensor, E: Tensor, points: Tensor) -> Tensor:
        return cameras(K, E, points)

    @staticmethod
    def inputs(n: int = 8, m: int = 256) -> tuple[Tensor, ...]:
        K = torch.zeros(n, 3, 3)
        K[:, 0, 0] = K[:, 1, 1] = torch.empty(n).uniform_(1000, 5000)
        K[:, 0, 2] = K[:, 1, 2] = torch.empty(n).uniform_(500, 2500)
        K[:, 2, 2] = 1
        E = torch.cat([torch.linalg.qr(torch.randn(n, 3, 3))[0], torch.empty(n, 3, 1).uniform_(-5000, 5000)], 2)
        points = torch.cat([torch.randn(n, 3, m) * 1000, torch.ones(n, 1, m)], 1)
        return K.half(), E.half(), points.half()


def _one_head() -> tuple[Tensor, ...]:
    return tuple(a[0, :, 0] for a in LinearAttention.inputs())


CASES: dict[str, Case] = {
    **SNIPPETS,
    "linear attention": Case("1 / inf = 0", linear_attention, _one_head),
    "cameras": Case("entries to 5000", cameras, Cameras.inputs, True),
}


def in_float64(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.double() if a.is_floating_point() else a for a in args)


def trained_once(fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the floating-point arguments under a random cotangent."""
    args = tuple(a.clone().requires_grad_() if a.is_floating_point() else a for a in args)
    out = fn(*args)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out.float() * cotangent).sum().backward()
    return out.detach(), [a.grad for a in args if a.grad is not None]
