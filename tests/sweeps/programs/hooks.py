"""Hooks of tensors, modules and saved tensors, within and around what is compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, leaf, linear, program, projected


@program(leaf(64, 256), model=linear(256, 256))
def a_tensor_hook_doubles_a_gradient(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    y.register_hook(lambda g: g * 2)
    return y.sigmoid() * x


@program(leaf(64, 256), model=linear(256, 256))
def a_tensor_hook_clamps_a_gradient(m: Any, x: Tensor) -> Tensor:
    y = m(x).tanh()
    y.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return y.sin() * x


def _hooked_leaf(run: Run, model: Any, x: Tensor) -> Values:
    seen: list[Tensor] = []
    handles = [p.register_hook(lambda g: seen.append(g.detach().clone())) for p in model.parameters()]
    x.register_hook(lambda g: g / 2)
    out = run(x)
    projected(out).backward()
    for handle in handles:
        handle.remove()
    return {"out": out, "count": torch.tensor(len(seen)), "sum": sum(g.sum() for g in seen)}


@program(leaf(64, 256), model=linear(256, 256, 64), drive=_hooked_leaf)
def hooks_on_leaves(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def _accumulated(run: Run, model: Any, x: Tensor) -> Values:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    out = run(x)
    projected(out).backward()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256, 64), drive=_accumulated)
def hooks_after_accumulation(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


def _module_hooks() -> nn.Sequential:
    net = linear(256, 256, 256)()
    net[0].register_forward_hook(lambda mod, args, out: out * 0.5)
    net[2].register_forward_pre_hook(lambda mod, args: (args[0] + 1,))
    return net


@program(leaf(64, 256), model=_module_hooks)
def forward_hooks_of_modules(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh()


def _backward_hooks() -> nn.Sequential:
    net = linear(256, 256, 256)()
    net[2].register_full_backward_hook(lambda mod, gin, gout: tuple(g * 2 for g in gin))
    return net


@program(leaf(64, 256), model=_backward_hooks)
def a_full_backward_hook_of_a_module(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh()


def _packed(run: Run, model: Any, x: Tensor) -> Values:
    seen: list[int] = []

    def pack(t: Tensor) -> tuple[Tensor, torch.dtype]:
        seen.append(t.numel())
        return t.clone(), t.dtype

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0].to(kept[1])):
        out = run(x)
    projected(out).backward()
    assert seen, "nothing was packed"
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_packed)
def saved_tensors_are_packed_by_clones(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x


def _on_cpu(run: Run, model: Any, x: Tensor) -> Values:
    with torch.autograd.graph.save_on_cpu():
        out = run(x)
    projected(out).backward()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_on_cpu)
def saved_tensors_are_kept_on_the_cpu(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)).sigmoid() * x


def _retained(run: Run, model: Any, x: Tensor) -> Values:
    h = x * 2
    h.retain_grad()
    out = run(h)
    out.retain_grad()
    projected(out.sin()).backward()
    return {"h": h.grad, "out": out.grad}


@program(leaf(64, 256), model=linear(256, 256), drive=_retained)
def gradients_of_non_leaves_are_retained(m: Any, h: Tensor) -> Tensor:
    return m(h).sigmoid() * h


class Spy(nn.Module):
    """Keeps what passed through it on the module, for a loss on it later (feature matching)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = F.gelu(self.a(x))
        return self.b(self.seen)


def _feature_loss(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    projected(out.tanh()).backward(retain_graph=True)
    model.seen.square().mean().backward()
    return {"out": out}


@program(leaf(64, 256), model=Spy, drive=_feature_loss)
def an_activation_kept_on_the_module_has_a_loss(m: Any, x: Tensor) -> Tensor:
    return m(x)
