"""What an optimizer does to one parameter: pure functions on FP32 tensors, in torch.optim's order of operations.

    update(p, g, states, numbers, step) -> (p, states)

``states`` are decoded before and encoded after; the parameter step sees the fresh ones. ``numbers`` are 0-d tensors, so that
changing a learning rate or a beta compiles nothing; their values are computed on the host in double. The fields of the
dataclass are fixed in the compiled code.

Adam and SGD are rounded as torch.compile rounds torch.optim's own step: tests/optim/test_compress.py holds them equal bit
for bit. In that step, a learning rate that is a tensor (``tensor_lr``) is rounded in another way than a number: Python turns
``lr / x`` into ``(1 / x) * lr``, and Dynamo turns ``p.add_(g, alpha=-lr)`` into a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics import near_functions as near

States = dict[str, Tensor]
Number = float | Tensor


class Update(Protocol):
    """One optimizer's arithmetic; a hashable value, since it is a key of compiled code."""

    @property
    def states(self) -> Mapping[str, bool]:
        """The states' names, and whether they are signed."""

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        """The numbers of a parameter group that may change from step to step."""

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        """The new parameter and states; ``step`` counts from 1."""


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return start + weight * (end - start)


def lerp_from_nearer(start: Tensor, end: Tensor, weight: Tensor, minus_rest: Tensor) -> Tensor:
    """torch.lerp: from ``start`` by ``weight``, or past the middle from ``end`` by ``minus_rest``, -(1 - weight)."""
    near = weight < 0.5
    return torch.addcmul(torch.where(near, start, end), torch.where(near, weight, minus_rest), end - start)


@dataclass(frozen=True)
class AdamUpdate:
    """Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019).

    m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2     p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    with ``p <- p (1 - lr wd)`` before (decoupled) or ``g <- g + wd p``. ``amsgrad`` divides by the largest v there was.
    """

    decoupled: bool
    amsgrad: bool = False
    tensor_lr: bool = False

    @property
    def states(self) -> Mapping[str, bool]:
        return {"exp_avg": True, "exp_avg_sq": False} | ({"max_exp_avg_sq": False} if self.amsgrad else {})

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        numbers = {"lr": lr, "beta1": beta1, "1-beta1": 1 - beta1, "beta2": beta2, "1-beta2": 1 - beta2}
        numbers |= {"-beta1": -(1 - (1 - beta1)), "eps": group["eps"]}
        return numbers | {"decay": 1 - lr * decay if self.decoupled else decay}

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        if self.decoupled:
            p = p * n["decay"]
        else:
            g = torch.addcmul(g, n["decay"], p)
        m = lerp_from_nearer(states["exp_avg"], g, n["1-beta1"], n["-beta1"])
        v = private.compiled_addcmul(states["exp_avg_sq"] * n["beta2"], g * g, n["1-beta2"])
        states = {"exp_avg": m, "exp_avg_sq": v} | self._largest(states, v)
        rest, rest2 = near.rest(n["beta1"], step), near.rest(n["beta2"], step)
        step_size = -(n["lr"] / rest if self.tensor_lr else n["lr"] * rest.reciprocal())
        root = near.quotient(near.sqrt(states.get("max_exp_avg_sq", v)), rest2.sqrt() * step_size)
        moved = p + near.quotient(m, root + n["eps"] * step_size.reciprocal())
        return torch.where(step_size == 0, p, moved), states  # at lr 0 torch.optim's own makes 0 / 0 where v is 0

    def _largest(self, states: States, v: Tensor) -> States:
        return {"max_exp_avg_sq": torch.maximum(states["max_exp_avg_sq"], v)} if self.amsgrad else {}


@dataclass(frozen=True)
class LionUpdate:
    """Lion (Chen et al. 2023): p <- p (1 - lr wd) - lr sign(b1 m + (1 - b1) g),  m <- b2 m + (1 - b2) g."""

    states: ClassVar[Mapping[str, bool]] = {"exp_avg": True}

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        return {"lr": lr, "1-beta1": 1 - beta1, "1-beta2": 1 - beta2, "decay": 1 - lr * group["weight_decay"]}

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        m = states["exp_avg"]
        p = p * n["decay"] - n["lr"] * torch.sign(lerp(m, g, n["1-beta1"]))
        return p, {"exp_avg": lerp(m, g, n["1-beta2"])}


@dataclass(frozen=True)
class SGDUpdate:
    """SGD with momentum as in torch: b <- mu b + (1 - dampening) g, b = g at first; p <- p - lr b (Nesterov: g + mu b)."""

    momentum: bool
    nesterov: bool = False
    tensor_lr: bool = False

    @property
    def states(self) -> Mapping[str, bool]:
        return {"momentum_buffer": True} if self.momentum else {}

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        numbers = {"lr": group["lr"], "momentum": group["momentum"], "1-dampening": 1 - group["dampening"]}
        return numbers | {"decay": group["weight_decay"]}

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        g = torch.addcmul(g, n["decay"], p)
        descend = private.compiled_addcmul if self.tensor_lr else torch.addcmul
        if not self.momentum:
            return descend(p, g, -n["lr"]), {}
        old = states["momentum_buffer"]
        buffer = torch.where(step == 1, g, torch.addcmul(old * n["momentum"], n["1-dampening"], g))
        g = torch.addcmul(g, n["momentum"], buffer) if self.nesterov else buffer
        return descend(p, g, -n["lr"]), {"momentum_buffer": buffer}


@dataclass(frozen=True)
class RMSPropUpdate:
    """RMSProp as in torch: s <- a s + (1 - a) g^2; d = g / (sqrt(s) + eps); p <- p - lr d, or through b <- mu b + d.

    ``centered`` subtracts the square of a running mean of g from s.
    """

    momentum: bool
    centered: bool = False

    @property
    def states(self) -> Mapping[str, bool]:
        states = {"square_avg": False}
        states |= {"momentum_buffer": True} if self.momentum else {}
        return states | ({"grad_avg": True} if self.centered else {})

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        names = {"lr": "lr", "alpha": "alpha", "eps": "eps", "momentum": "momentum", "decay": "weight_decay"}
        return {name: group[key] for name, key in names.items()} | {"1-alpha": 1 - group["alpha"]}

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        g = g + n["decay"] * p
        s = states["square_avg"] * n["alpha"] + n["1-alpha"] * g * g
        new = {"square_avg": s}
        if self.centered:
            new["grad_avg"] = mean = lerp(states["grad_avg"], g, n["1-alpha"])
            s = s - mean * mean
        d = g / (s.sqrt() + n["eps"])
        if self.momentum:
            new["momentum_buffer"] = d = states["momentum_buffer"] * n["momentum"] + d
        return p - n["lr"] * d, new


@dataclass(frozen=True)
class LAMBUpdate:
    """LAMB (You et al. 2020): Adam's direction r = m^ / (sqrt(v^) + eps) + wd p, scaled per tensor by |p| / |r|.

    The ratio is 1 where either norm is 0. It needs the whole tensor's norm, hence a second kernel.
    """

    states: ClassVar[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
    whole_tensor: ClassVar[bool] = True

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        return AdamUpdate(decoupled=False).numbers(group)

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        m = lerp(states["exp_avg"], g, n["1-beta1"])
        v = states["exp_avg_sq"] * n["beta2"] + n["1-beta2"] * g * g
        denom = (v / (1 - n["beta2"] ** step)).sqrt() + n["eps"]
        r = m / (1 - n["beta1"] ** step) / denom + n["decay"] * p
        p_norm, r_norm = p.norm(), r.norm()
        ratio = torch.where((p_norm > 0) & (r_norm > 0), p_norm / r_norm, 1.0)
        return p - n["lr"] * ratio * r, {"exp_avg": m, "exp_avg_sq": v}


@dataclass(frozen=True)
class MuonUpdate:
    """Muon (Jordan et al. 2024) as in torch.optim.Muon: momentum, orthogonalised by five Newton-Schulz steps in BF16.

    X <- a X + (b A + c A A) X,  A = X X^T,  from X = u / |u|;  p <- p (1 - lr wd) - lr f X,  f = sqrt(max(1, rows / columns))
    """

    nesterov: bool = True
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    iterations: int = 5
    match_rms_adamw: bool = False
    states: ClassVar[Mapping[str, bool]] = {"momentum_buffer": True}
    whole_tensor: ClassVar[bool] = True
    epsilon: float = field(default=1e-7)

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        lr = group["lr"]
        return {"lr": lr, "1-momentum": 1 - group["momentum"], "momentum": group["momentum"]} | {
            "decay": 1 - lr * group["weight_decay"]
        }

    def __call__(
        self, p: Tensor, g: Tensor, states: States, n: Mapping[str, Tensor], step: Tensor
    ) -> tuple[Tensor, States]:
        buffer = lerp(states["momentum_buffer"], g, n["1-momentum"])
        u = lerp(g, buffer, n["momentum"]) if self.nesterov else buffer
        rows, columns = p.shape
        like_adamw = self.match_rms_adamw
        factor = 0.2 * max(rows, columns) ** 0.5 if like_adamw else max(1.0, rows / columns) ** 0.5
        return p * n["decay"] - n["lr"] * factor * self._orthogonal(u), {"momentum_buffer": buffer}

    def _orthogonal(self, u: Tensor) -> Tensor:
        a, b, c = self.coefficients
        x = u.bfloat16()
        flipped = x.shape[0] > x.shape[1]
        x = x.t() if flipped else x
        x = x / x.norm().clamp_min(self.epsilon)
        for _ in range(self.iterations):
            gram = x @ x.t()
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.t() if flipped else x).float()
