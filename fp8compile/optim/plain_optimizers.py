"""Optimizers that torch.optim lacks, as torch.optim would write them: fp8compile.optim captures their steps.

Lion    Chen et al. 2023     p <- p (1 - lr wd) - lr sign(b1 m + (1 - b1) g),   m <- b2 m + (1 - b2) g
LAMB    You et al. 2020      Adam's direction r = m^ / (sqrt(v^) + eps) + wd p, scaled per tensor by |p| / |r|
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Plain(torch.optim.Optimizer):
    """Steps of single parameters, of which a subclass names one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, -p.grad if group["maximize"] else p.grad, self.state[p], group)

    @staticmethod
    def move(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """One step of one parameter, in place."""
        raise NotImplementedError


class PlainLion(_Plain):
    """One state; every element moves by the learning rate."""

    @staticmethod
    def move(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        m, lr, (beta1, beta2) = state["exp_avg"], group["lr"], group["betas"]
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(torch.lerp(m, g, 1 - beta1).sign(), alpha=-lr)
        m.lerp_(g, 1 - beta2)


class PlainLAMB(_Plain):
    """The ratio of norms is 1 where either is 0. It needs the whole tensor's norm, hence a second kernel."""

    @staticmethod
    def move(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        step, m, v = state["step"], state["exp_avg"], state["exp_avg_sq"]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        step += 1
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        r = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + group["eps"]) + group["weight_decay"] * p
        p_norm, r_norm = p.norm(), r.norm()
        ratio = torch.where((p_norm > 0) & (r_norm > 0), p_norm / r_norm, 1.0)
        p.sub_(lr * ratio * r)
