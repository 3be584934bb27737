"""How far moments that are encoded at every step drift from FP32 moments of the same gradients.

    both   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g g       one of them decoded before and encoded after each step
    v      mean of v_encoded / v, and its geometric mean; they leave out elements where v is 0
    step   slope (least squares) of m_e / (sqrt(v_e) + eps) on m / (sqrt(v) + eps): at 1.03 updates are 3 % longer, as from a
           rate 3 % higher

The decay b2 multiplies a whole group, so its FP32 scale takes it up exactly. What a step adds to one element is lost, under
rounding to nearest, where it is less than half the spacing of codes there. So v comes out too small, and updates too long:
that is "..., nearest". The optimizers dither v (``numerics.dither``). The gradients are FP32's for all formats: nothing here
feeds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.state_errors import EPS
from fp8compile.numerics.states.registry import state_codec
from fp8compile.optim.formats import state_format_pair

WATCHED = (
    "*layers.0.self_attn.q_proj*",
    "*layers.1.mlp.up_proj*",
    "*layers.2.mlp.down_proj*",
    "*layers.3.self_attn.v_proj*",
    "*lm_head*",
)
NAMES = ("e4m3_expanded", "dynamic_tree", "int8_companded", "e4m3", "4bit", "4bit_log")
NEAREST = ", nearest"
FORMATS = (*NAMES, *(f"{name}{NEAREST}" for name in NAMES))


class Twin:
    """m and v of one parameter, kept in one format between steps."""

    def __init__(self, state_format: str, p: Tensor, betas: tuple[float, float]) -> None:
        first, second = state_format_pair(state_format.removesuffix(NEAREST))
        rounding = "nearest" if state_format.endswith(NEAREST) else None
        self.codecs = state_codec(first, signed=True), state_codec(second, signed=False, rounding=rounding)
        self.betas = betas
        self.m, self.v = torch.zeros_like(p), torch.zeros_like(p)  # as the parameter step saw them
        self.stored = [codec.encode(self.m) for codec in self.codecs]

    def add(self, g: Tensor) -> None:
        """One step with gradient ``g``."""
        (beta1, beta2), shape = self.betas, g.shape
        m, v = (codec.decode(parts, shape) for codec, parts in zip(self.codecs, self.stored, strict=True))
        self.m, self.v = m + (1 - beta1) * (g - m), v * beta2 + (1 - beta2) * g * g
        self.stored = [codec.encode(x) for codec, x in zip(self.codecs, (self.m, self.v), strict=True)]

    @property
    def direction(self) -> Tensor:
        return self.m / (self.v.sqrt() + EPS)


class Drift:
    """Twins of some parameters in every format, fed by an optimizer's gradients; looked at after some steps."""

    def __init__(self, named: dict[str, Tensor], betas: tuple[float, float], at: Sequence[int]) -> None:
        self.parameters, self.at, self.steps = named, at, 0
        self.rows: dict[str, Any] = {}
        formats = ("fp32", *FORMATS)
        self.twins = {name: {fmt: Twin(fmt, p.detach(), betas) for fmt in formats} for name, p in named.items()}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients before each of the optimizer's steps."""
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        for name, p in self.parameters.items():
            assert p.grad is not None
            for twin in self.twins[name].values():
                twin.add(p.grad)
        self.steps += 1
        if self.steps in self.at:
            self.rows[str(self.steps)] = self._now()

    def _now(self) -> dict[str, dict[str, dict[str, float]]]:
        """By parameter and format: v against FP32's, and the slope of the update."""
        return {
            name: {fmt: _against(twins["fp32"], twins[fmt]) for fmt in FORMATS} for name, twins in self.twins.items()
        }


def _against(exact: Twin, twin: Twin) -> dict[str, float]:
    there = exact.v > 0
    ratio = (twin.v[there].double() / exact.v[there].double()).clamp_min(1e-300)
    u, u_hat = exact.direction.double(), twin.direction.double()
    means = {"v": float(ratio.mean()), "v_geometric": float(ratio.log().mean().exp())}
    return means | {"step": float((u * u_hat).sum() / (u * u).sum())}


def watched(model: nn.Module) -> dict[str, Tensor]:
    """The parameters whose drift is measured: a few are enough."""
    return {n: p for n, p in model.named_parameters() if any(fnmatch(n, pattern) for pattern in WATCHED)}
