"""The graphs under test: SwiGLU, storing gate and up in the forward and decoding them in the backward.

    forward     g = x Wg,  u = x Wu,  z = silu(g) u               silu(g) = g s,  s = sigmoid(g)
    backward    dg = dz u s (1 + g (1 - s)),  du = dz silu(g)     and z again, for the next weight's gradient

The matrix products are externs; all the rest is generated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile.numerics import E4M3, INT8, Codec, Groupwise, GroupwiseBest

Tensors = tuple[Tensor, ...]

CODECS: dict[str, Codec] = {c.name: c for c in (Groupwise(E4M3), Groupwise(INT8), GroupwiseBest())}
BF16 = "bf16"  # stored as they are
GROUP_SIZE = 128
TOKENS, HIDDEN, INTERMEDIATE = 2048, 1024, 2816


def forward(codec: Codec | None) -> Callable[[Tensor, Tensor, Tensor], Tensors]:
    """``(x, Wg, Wu) -> (z, codes and scales of g, of u)``; without a codec ``(z,)``."""

    def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensors:
        g, u = x @ w_gate, x @ w_up
        z = F.silu(g) * u
        return (z, *codec.encode(g), *codec.encode(u)) if codec else (z,)

    return swiglu


def backward(codec: Codec | None) -> Callable[..., Tensors]:
    """``(codes and scales of g, of u, dz) -> (z, dg, du)``; without a codec ``(g, u, dz) -> ...``."""

    if codec is None:
        return _backward
    decode = codec.decode

    def decoding(codes_g: Tensor, scale_g: Tensor, codes_u: Tensor, scale_u: Tensor, dz: Tensor) -> Tensors:
        return _backward(decode(codes_g, scale_g, dz.dtype), decode(codes_u, scale_u, dz.dtype), dz)

    return decoding


def _backward(g: Tensor, u: Tensor, dz: Tensor) -> Tensors:
    dtype = dz.dtype
    g, u, dz = g.float(), u.float(), dz.float()
    s = torch.sigmoid(g)
    silu = g * s
    return (silu * u).to(dtype), (dz * u * (s * (1 + g * (1 - s)))).to(dtype), (dz * silu).to(dtype)


class SwiGLU(torch.nn.Module):
    """The whole block, as a user writes it."""

    def __init__(self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, intermediate, bias=False, dtype=torch.bfloat16)
        self.up = torch.nn.Linear(hidden, intermediate, bias=False, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(intermediate, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
