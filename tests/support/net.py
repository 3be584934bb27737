"""Small networks whose saved tensors are of several kinds."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Two linears with a function of the user's between them."""

    def __init__(self, function, size: int = 64) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.a, self.b, self.function = nn.Linear(size, size), nn.Linear(size, size), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


class SwiGLU(nn.Module):
    """``up`` is read by products alone, ``gate`` by the derivative of silu too."""

    def __init__(self, size: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(size, inner), nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
