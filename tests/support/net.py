"""Two linears with any function between them: a network whose saved tensors are of several kinds."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Two linears with a function of the user's between them."""

    def __init__(self, function, size: int = 64) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.a, self.b, self.function = nn.Linear(size, size), nn.Linear(size, size), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))
