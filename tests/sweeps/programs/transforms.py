"""functorch: vmap, grad, vjp, jvp, jacobians, hessians, functional_call, ensembles."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, stack_module_state, vjp, vmap

from tests.sweeps.registry import Run, Values, leaf, linear, program, projected


@program(leaf(64, 256), model=linear(256, 256))
def vmap_of_a_row_function(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: F.silu(m(row)) / row.abs().amax())(x)


@program(leaf(64, 256), model=linear(256, 256))
def the_gradient_within_the_forward(m: Any, x: Tensor) -> Tensor:
    force = grad(lambda h: m(h).tanh().square().sum())(x)
    return force.sin() * x


@program(leaf(64, 256), model=linear(256, 64))
def per_sample_gradients(m: Any, x: Tensor) -> Tensor:
    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return F.linear(row, weight).tanh().square().sum()

    return vmap(grad(loss), (None, 0))(m[0].weight, x).square().mean((1, 2)).sqrt()


@program(leaf(64, 256), model=linear(256, 256))
def a_jacobian_vector_product(m: Any, x: Tensor) -> Tensor:
    value, tangent = jvp(lambda h: m(h).sigmoid(), (x,), (torch.ones_like(x),))
    return value * tangent.sin()


@program(leaf(64, 256), model=linear(256, 256))
def a_vector_jacobian_product(m: Any, x: Tensor) -> Tensor:
    value, pull = vjp(lambda h: m(h).tanh(), x)
    return value * pull(torch.ones_like(value))[0].sin()


@program(leaf(16, 16), model=linear(16, 16))
def a_jacobian_per_row(m: Any, x: Tensor) -> Tensor:
    return vmap(jacrev(lambda row: m(row).tanh()))(x).sin()


@program(leaf(64, 256), model=linear(256, 256, 256))
def a_functional_call_with_scaled_parameters(m: Any, x: Tensor) -> Tensor:
    scaled = {name: p * 1.5 for name, p in m.named_parameters()}
    return functional_call(m, scaled, (x,)).sin()


@program(leaf(64, 256), model=linear(256, 256))
def one_step_of_an_inner_loop(m: Any, x: Tensor) -> Tensor:
    weight = m[0].weight
    inner, value = grad_and_value(lambda w: (F.linear(x, w).tanh() - x).square().mean())(weight)
    return F.linear(x, weight - 10.0 * inner).sin() * value


def _ensemble(run: Run, model: Any, x: Tensor) -> Values:
    parameters, _ = stack_module_state(list(model))
    out = run(parameters, x)
    projected(out).backward()
    return {"out": out, "grads": {name: p.grad for name, p in parameters.items()}}


@program(leaf(64, 256), model=lambda: nn.ModuleList(nn.Linear(256, 128) for _ in range(4)), drive=_ensemble)
def an_ensemble_by_vmap(m: Any, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    base = nn.Linear(256, 128, device="meta")
    return vmap(lambda p: F.gelu(functional_call(base, p, (x,))))(parameters)


@program(leaf(64, 256), model=linear(256, 256))
def vmap_with_random_numbers(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: m(row).tanh() * torch.rand_like(row), randomness="different")(x)
