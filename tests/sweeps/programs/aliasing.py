"""Views, mutated inputs, inputs and views returned, outputs used twice or changed by the caller."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, data, leaf, linear, program, projected


@program(data(64, 256), model=linear(256, 256))
def an_input_is_changed_through_a_view(m: Any, x: Tensor) -> Tensor:
    x.view(-1, 64)[::2].mul_(2)
    return m(x).sigmoid()


@program(data(64, 256), model=linear(128, 128))
def eager_refuses_an_input_changed_after_it_was_read(m: Any, x: Tensor) -> Tensor:
    y = m(x[:, :128]) * x[:, 128:]
    x.add_(1)
    return y.tanh()


@program(data(64, 256), model=linear(128, 128))
def an_input_is_changed_after_a_copy_was_read(m: Any, x: Tensor) -> Tensor:
    y = m(x[:, :128].clone()) * x[:, 128:].clone()
    x.add_(1)
    return y.tanh()


@program(data(64, 256), model=linear(256, 256))
def an_input_is_changed_after_its_sine_was_read(m: Any, x: Tensor) -> Tensor:
    y = m(x.sin()) * x.cos()
    x.zero_()
    return y.tanh()


@program(data(64, 256), data(64, 256), model=linear(256, 256))
def two_inputs_are_swapped_in_place(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.gelu(m(x.clone())) * y.clone()
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return z + F.silu(m(x.clone()))


def _two_views(run: Run, model: Any, base: Tensor) -> Values:
    out = run(base[:, :256], base[:, 128:])
    projected(out).backward()
    return {"out": out}


@program(data(64, 384), model=linear(256, 256), drive=_two_views)
def one_of_two_overlapping_inputs_is_changed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    before = m(y.clone())
    x.mul_(-1.5)
    return before.sigmoid() * m(y).tanh()


@program(leaf(64, 256), model=linear(256, 256))
def the_input_is_returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m(x).relu(), x


@program(leaf(64, 256), model=linear(256, 256))
def views_of_the_input_are_returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    return F.gelu(m(x)), x.t(), x[::2, 1:7]


@program(leaf(64, 256), model=linear(256, 256))
def views_of_one_intermediate_are_returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m(x).sigmoid()
    return y, y.view(128, 128), y.t(), y[3]


@program(leaf(64, 256), model=linear(256, 256))
def the_same_tensor_is_returned_twice(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = F.silu(m(x))
    return y, y, y * y


def _output_scaled(run: Run, model: Any, x: Tensor) -> Values:
    y = run(x)
    y.mul_(2)
    projected(y).backward()
    return {"out": y}


@program(leaf(64, 256), model=linear(256, 256), drive=_output_scaled)
def an_output_that_nothing_keeps_is_scaled_by_the_caller(m: Any, x: Tensor) -> Tensor:
    return m(x)


@program(leaf(64, 256), model=linear(256, 256), drive=_output_scaled)
def eager_refuses_a_saved_output_scaled_by_the_caller(m: Any, x: Tensor) -> Tensor:
    return m(x).sigmoid()


@program(leaf(64, 256), model=linear(256, 256), drive=_output_scaled)
def eager_refuses_exp_scaled_by_the_caller(m: Any, x: Tensor) -> Tensor:
    return m(x).exp()


def _input_changed_before_backward(run: Run, model: Any, x: Tensor) -> Values:
    h = x * 1.0
    y = run(h)
    with torch.no_grad():
        h.add_(1)
    projected(y).backward()
    return {"out": y}


@program(leaf(64, 256), model=linear(256, 256), drive=_input_changed_before_backward)
def eager_refuses_an_activation_changed_before_the_backward(m: Any, h: Tensor) -> Tensor:
    return m(h).relu() * h.sin()


@program(leaf(64, 256), model=linear(256, 256), drive=_input_changed_before_backward)
def eager_refuses_an_encoded_activation_changed_before_the_backward(m: Any, h: Tensor) -> Tensor:
    return F.silu(m(h)) * h


def _weight_changed_before_backward(run: Run, model: Any, x: Tensor) -> Values:
    y = run(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    projected(y).backward()
    return {"out": y}


@program(leaf(64, 256), model=linear(256, 256, 64), drive=_weight_changed_before_backward)
def eager_refuses_weights_changed_before_the_backward(m: Any, x: Tensor) -> Tensor:
    return m(x)


@program(leaf(64, 256), model=linear(256, 256, 64), drive=_weight_changed_before_backward)
def eager_refuses_normalized_weights_changed_before_the_backward(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, F.normalize(m[0].weight, dim=1)).sin()


@program(data(64, 256), model=linear(256, 256), drive=_weight_changed_before_backward)
def a_weight_that_no_gradient_needs_is_changed_before_the_backward(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(64, 256), model=linear(256, 256))
def an_intermediate_is_changed_in_place(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    y.add_(1).mul_(x)
    y[:, ::2] *= 0.5
    return y.square()


@program(leaf(64, 256), model=linear(256, 256))
def eager_refuses_a_relu_changed_in_place(m: Any, x: Tensor) -> Tensor:
    y = m(x).relu_()
    y[:, ::2] *= 0.5
    return y.square()


@program(leaf(64, 256), model=linear(256, 256))
def eager_refuses_a_saved_intermediate_changed_in_place(m: Any, x: Tensor) -> Tensor:
    y = m(x).sigmoid()
    z = y * x
    with torch.no_grad():
        y.detach().mul_(3)
    return z


@program(leaf(64, 256), model=linear(256, 256))
def rows_are_written_into_a_fresh_tensor(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(128, 256)
    y = m(x)
    out[::2] = y.tanh()
    out[1::2] = (y * x).sin()
    return out


@program(leaf(64, 256), model=linear(256, 256))
def eager_refuses_a_leaf_changed_after_use(m: Any, x: Tensor) -> Tensor:
    y = m(x.sin()).tanh()
    with torch.no_grad():
        x.mul_(0.5)
    return y


@program(leaf(64, 256), model=linear(256, 256))
def a_leaf_is_changed_after_a_copy_was_used(m: Any, x: Tensor) -> Tensor:
    y = m(x.clone()).tanh()
    with torch.no_grad():
        x.mul_(0.5)
    return y


def _views_as_inputs(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x.t(), x.view(-1))
    projected(out).backward()
    return {"out": out}


@program(leaf(256, 256), model=linear(256, 256), drive=_views_as_inputs)
def a_transposed_and_a_flat_view_of_one_leaf(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return m(a).sigmoid() * b.view(256, 256).tanh()


@program(leaf(64, 256), model=linear(256, 256))
def detach_shares_memory_with_what_flows(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    z = y.detach()
    return (y * z.sigmoid()).tanh() + (z * x)


@program(leaf(64, 256), model=linear(256, 256))
def chunks_of_one_projection(m: Any, x: Tensor) -> Tensor:
    a, b, c, d = m(x).chunk(4, -1)
    return F.silu(a) * b + torch.sigmoid(c) * d.tanh()


@program(leaf(64, 256), model=linear(256, 256))
def unbind_and_stack_again(m: Any, x: Tensor) -> Tensor:
    rows = m(x).view(8, 8, 256).unbind(0)
    return torch.stack([r.sigmoid() * rows[i - 1] for i, r in enumerate(rows)])


@program(leaf(64, 256), model=lambda: nn.Linear(256, 256))
def an_alias_is_changed_through_as_strided(m: Any, x: Tensor) -> Tensor:
    y = m(x) * 1.0
    y.as_strided((64, 128), (256, 2)).mul_(0.1)
    return y.sin() * y
