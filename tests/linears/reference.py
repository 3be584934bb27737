"""Delayed scaling written a second time, as a module with an autograd function, from the formulas alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


class History:
    """The last amaxes of one operand; the first step is its own."""

    def __init__(self, fmt: tuple[torch.dtype, float], length: int) -> None:
        self.fmt, self.length, self.amaxes = fmt, length, list[float]()

    def rounded(self, x: Tensor) -> Tensor:
        dtype, largest = self.fmt
        amax = max(self.amaxes) if self.amaxes else float(x.abs().max())
        inv_scale = torch.tensor(amax, dtype=torch.float32) / largest
        return (x * inv_scale.reciprocal()).clamp(-largest, largest).to(dtype).float() * inv_scale

    def push(self, x: Tensor) -> None:
        self.amaxes = [float(x.abs().max()), *self.amaxes][: self.length]


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: DelayedLinear) -> Tensor:
        ctx.module, flat = module, x.reshape(-1, x.shape[-1])
        x_hat, w_hat = module.input.rounded(flat), module.weight_history.rounded(weight)
        ctx.save_for_backward(flat, weight, x_hat, w_hat)
        return F.linear(x_hat, w_hat, bias).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, x_hat, w_hat = ctx.saved_tensors
        module, dy = ctx.module, gradients[0].reshape(-1, weight.shape[0])
        dy_hat = module.gradient.rounded(dy)
        for history, value in ((module.input, x), (module.weight_history, weight), (module.gradient, dy)):
            history.push(value)
        dx = (dy_hat @ w_hat).reshape(*gradients[0].shape[:-1], -1)
        return dx, dy_hat.t() @ x_hat, dy.sum(0), None


class DelayedLinear(nn.Linear):
    """A linear that takes scales of its operands from the last ``length`` backward passes."""

    def __init__(self, linear: nn.Linear, length: int) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.input, self.weight_history = History(E4M3, length), History(E4M3, length)
        self.gradient = History(E5M2, length)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Delayed.apply(x, self.weight, self.bias, self)
        return y

    @property
    def histories(self) -> dict[str, History]:
        return {"input": self.input, "weight": self.weight_history, "gradient": self.gradient}
