"""The optimizers: torch.optim's constructors, with ``state_format``, ``master`` and the other options of EncodedOptimizer.

fp8compile.optim.AdamW(model, lr=3e-4)                                  # 16.6 bits for both moments
fp8compile.optim.AdamW(model, state_format=("dynamic_tree", "e4m3_expanded"))   # COAT's best mix, 16.6 too
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fp8compile._arguments import FLAGS, check_count, check_number, check_number_or_tensor, check_one_of, is_finite
from fp8compile.optim import plain_optimizers
from fp8compile.optim.base import EncodedOptimizer

Number = float | Tensor
Betas = tuple[Number, Number]
FLAG_OPTIONS = ("amsgrad", "maximize", "nesterov", "centered", "capturable", "foreach", "fused")


class Adam(EncodedOptimizer):
    """torch.optim.Adam. With ``amsgrad`` second moments stay FP32. ``differentiable``, ``foreach``, ``fused`` are refused."""

    plain: type[torch.optim.Optimizer] = torch.optim.Adam
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

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check(group, at_least_zero=("lr", "eps", "weight_decay"), shares=("betas",))


class AdamW(Adam):
    """torch.optim.AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    plain = torch.optim.AdamW
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

    plain = plain_optimizers.PlainLion

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

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check(group, at_least_zero=("lr", "weight_decay"), shares=("betas",))


class SGD(EncodedOptimizer):
    """torch.optim.SGD; the state is the momentum."""

    plain = torch.optim.SGD

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

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check(group, at_least_zero=("lr", "momentum", "weight_decay"))
        check_number("dampening", group["dampening"], low=-math.inf)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("Nesterov momentum needs a momentum and no dampening")


class RMSprop(EncodedOptimizer):
    """torch.optim.RMSprop. ``centered`` keeps its means in FP32: their difference could fall below zero."""

    plain = torch.optim.RMSprop

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

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check(group, at_least_zero=("lr", "alpha", "eps", "momentum", "weight_decay"))


class LAMB(EncodedOptimizer):
    """LAMB (You et al. 2020): Adam with a trust ratio per tensor."""

    plain = plain_optimizers.PlainLAMB

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

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check(group, at_least_zero=("lr", "eps", "weight_decay"), shares=("betas",))


class Muon(EncodedOptimizer):
    """torch.optim.Muon, for the matrices of the hidden layers; everything else belongs into an AdamW of its own."""

    plain = torch.optim.Muon

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

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check(group, at_least_zero=("lr", "momentum", "weight_decay", "eps"))
        check_one_of("adjust_lr_fn", group["adjust_lr_fn"], (None, "original", "match_rms_adamw"))
        check_count("ns_steps", group["ns_steps"])
        coefficients = group["ns_coefficients"]
        is_list = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
        if not is_list or not all(map(is_finite, coefficients)):
            raise ValueError(f"ns_coefficients={coefficients!r}: three numbers are needed")


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
