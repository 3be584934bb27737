"""The optimizers: torch.optim's constructors, with ``state_format``, ``master`` and the other options of EncodedOptimizer.

fp8compile.optim.AdamW(model, lr=3e-4)                                  # 16.6 bits for both moments
fp8compile.optim.AdamW(model, state_format=("dynamic_tree", "e4m3_expanded"))   # COAT's best mix, 16.6 too
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fp8compile._arguments import FLAGS, check_count, check_number, check_number_or_tensor, check_one_of, is_finite
from fp8compile.optim.base import EncodedOptimizer
from fp8compile.optim.formats import state_format_pair
from fp8compile.optim.updates import (
    AdamUpdate,
    LAMBUpdate,
    LionUpdate,
    MuonUpdate,
    Number,
    RMSPropUpdate,
    SGDUpdate,
    Update,
)

Betas = tuple[Number, Number]
FLAG_OPTIONS = ("amsgrad", "maximize", "nesterov", "centered", "capturable", "foreach", "fused")


class Adam(EncodedOptimizer):
    """torch.optim.Adam. ``amsgrad`` needs FP32 states; ``differentiable``, ``foreach`` and ``fused`` are refused."""

    decoupled = False

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        defaults |= _torch_only(foreach, maximize, capturable, differentiable, fused)
        super().__init__(params, defaults | {"decoupled_weight_decay": self.decoupled}, **options)

    def update_of(self, group: Mapping[str, Any]) -> Update:
        _check(group, at_least_zero=("lr", "eps", "weight_decay"), shares=("betas",))
        if group["amsgrad"] and not set(state_format_pair(group["state_format"])) <= {"fp32"}:
            raise ValueError(
                "amsgrad keeps a running maximum; encoded anew at every step, every rounding up would stay in it for good. "
                'Use state_format="fp32" with it, or leave amsgrad out'
            )
        return AdamUpdate(
            bool(group["decoupled_weight_decay"]), bool(group["amsgrad"]), isinstance(group["lr"], Tensor)
        )


class AdamW(Adam):
    """torch.optim.AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    decoupled = True

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class Lion(EncodedOptimizer):
    """Lion (Chen et al. 2023): one state."""

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def update_of(self, group: Mapping[str, Any]) -> Update:
        _check(group, at_least_zero=("lr", "weight_decay"), shares=("betas",))
        return LionUpdate()


class SGD(EncodedOptimizer):
    """torch.optim.SGD; the state is the momentum."""

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov} | _torch_only(foreach, maximize, None, differentiable, fused)
        super().__init__(params, defaults, **options)

    def update_of(self, group: Mapping[str, Any]) -> Update:
        _check(group, at_least_zero=("lr", "momentum", "weight_decay"))
        check_number("dampening", group["dampening"], low=-math.inf)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("Nesterov momentum needs a momentum and no dampening")
        return SGDUpdate(bool(group["momentum"]), bool(group["nesterov"]), isinstance(group["lr"], Tensor))


class RMSprop(EncodedOptimizer):
    """torch.optim.RMSprop. ``centered`` needs FP32 states: the difference of two encoded means can fall below zero."""

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"centered": centered} | _torch_only(foreach, maximize, capturable, differentiable, None)
        defaults.pop("fused")
        super().__init__(params, defaults, **options)

    def update_of(self, group: Mapping[str, Any]) -> Update:
        _check(group, at_least_zero=("lr", "alpha", "eps", "momentum", "weight_decay"))
        if group["centered"] and not set(state_format_pair(group["state_format"])) <= {"fp32"}:
            raise ValueError(
                "centered subtracts the squares of one mean from another; encoded, the difference can fall below zero, "
                'and its root be NaN. Use state_format="fp32" with it, or leave centered out'
            )
        return RMSPropUpdate(bool(group["momentum"]), bool(group["centered"]))


class LAMB(EncodedOptimizer):
    """LAMB (You et al. 2020): Adam with a trust ratio per tensor."""

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def update_of(self, group: Mapping[str, Any]) -> Update:
        _check(group, at_least_zero=("lr", "eps", "weight_decay"), shares=("betas",))
        return LAMBUpdate()


class Muon(EncodedOptimizer):
    """torch.optim.Muon, for the matrices of the hidden layers; everything else belongs into an AdamW of its own."""

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Number = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
        }
        defaults |= {
            "eps": eps,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, **options)

    def check_parameter(self, p: Tensor, name: str) -> None:
        super().check_parameter(p, name)
        if p.dim() != 2:
            raise ValueError(f"Muon updates matrices; {name} of shape {tuple(p.shape)} belongs into AdamW")

    def update_of(self, group: Mapping[str, Any]) -> Update:
        _check(group, at_least_zero=("lr", "momentum", "weight_decay", "eps"))
        check_one_of("adjust_lr_fn", group["adjust_lr_fn"], (None, "original", "match_rms_adamw"))
        check_count("ns_steps", group["ns_steps"])
        like_adamw, coefficients = group["adjust_lr_fn"] == "match_rms_adamw", group["ns_coefficients"]
        is_list = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
        if not is_list or not all(map(is_finite, coefficients)):
            raise ValueError(f"ns_coefficients={coefficients!r}: three numbers are needed")
        coefficients = tuple(coefficients)
        return MuonUpdate(group["nesterov"], coefficients, group["ns_steps"], like_adamw, group["eps"])


def _torch_only(
    foreach: bool | None, maximize: bool, capturable: bool | None, differentiable: bool, fused: bool | None
) -> dict[str, Any]:
    """Options of torch that are kept in the groups, so that state dicts can be loaded both ways."""
    if differentiable:
        raise ValueError(
            "differentiable=True: codes have no gradient. Use torch.optim to differentiate through a step"
        )
    options = {"foreach": foreach, "maximize": maximize, "differentiable": False, "fused": fused}
    return options if capturable is None else options | {"capturable": capturable}


def _check(group: Mapping[str, Any], *, at_least_zero: tuple[str, ...], shares: tuple[str, ...] = ()) -> None:
    """Raises ValueError for an option whose value the arithmetic cannot use; a tensor's value is not read."""
    for name in at_least_zero:
        check_number_or_tensor(name, group[name])
    for name in shares:
        value = group[name]
        if not (isinstance(value, (tuple, list)) and len(value) == 2):
            raise ValueError(f"{name}={value!r}: two numbers are needed, such as (0.9, 0.999)")
        for i, each in enumerate(value):
            check_number_or_tensor(f"{name}[{i}]", each, below=1)
    for name in FLAG_OPTIONS:
        if name in group:
            check_one_of(name, group[name], (*FLAGS, None) if name in ("foreach", "fused") else FLAGS)
