"""How the backward is called: twice, in parts, for some inputs only, accumulated, from another thread, not at all."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, data, leaf, linear, program, projected, steps


def _twice(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    projected(out).backward(retain_graph=True)
    projected(out * 2).backward()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_twice)
def two_backwards_of_one_forward(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x


def _twice_freed(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    projected(out).backward()
    projected(out).backward()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256), drive=_twice_freed)
def eager_refuses_a_second_backward_of_freed_buffers(m: Any, x: Tensor) -> Tensor:
    return m(x).sigmoid() * x


def _two_outputs(run: Run, model: Any, x: Tensor) -> Values:
    a, b = run(x)
    projected(a).backward(retain_graph=True)
    first = x.grad.clone()
    projected(b).backward()
    return {"first": first}


@program(leaf(64, 256), model=linear(256, 256), drive=_two_outputs)
def two_outputs_one_backward_each(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m(x)
    return y.sigmoid() * x, y.tanh().square()


def _one_output_only(run: Run, model: Any, x: Tensor) -> Values:
    a, b = run(x)
    projected(a).backward()
    return {"b": b}


@program(leaf(64, 256), model=linear(256, 256), drive=_one_output_only)
def one_of_two_outputs_has_no_gradient(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m(x)
    return y.sigmoid() * x, y.exp()


def _partial(run: Run, model: Any, x: Tensor, y: Tensor) -> Values:
    out = run(x, y)
    grads = torch.autograd.grad(projected(out), [x, y, *model.parameters()], allow_unused=True)
    return {f"grad{i}_": g for i, g in enumerate(grads)}


@program(leaf(64, 256), leaf(64, 256), model=linear(256, 256), drive=_partial)
def autograd_grad_with_an_unused_input(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m(x).tanh() * x


@program(leaf(64, 256), leaf(64, 256), model=linear(256, 256), drive=_partial)
def autograd_grad_with_an_input_whose_gradient_is_zero(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m(x).tanh() * y.sign()


def _only_input(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    (grad,) = torch.autograd.grad(projected(out), [x], retain_graph=True)
    out.backward(grad)
    return {"grad": grad}


@program(leaf(64, 256), model=linear(256, 256), drive=_only_input)
def the_gradient_of_the_input_then_of_all(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)) * x.sin()


def _double(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    (grad,) = torch.autograd.grad(projected(out), [x], create_graph=True)
    grad.square().sum().backward()
    return {"grad": grad}


@program(leaf(64, 256), model=linear(256, 256, act=None), drive=_double)
def a_gradient_penalty_by_double_backward(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh()


@program(leaf(64, 256), model=linear(256, 256, 256), drive=steps(3))
def gradients_add_up_over_three_micro_batches(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)).sin()


def _interleaved(run: Run, model: Any, x: Tensor, y: Tensor) -> Values:
    first, second = run(x), run(y)
    projected(second).backward()
    projected(first.tanh()).backward()
    return {"out": [first, second]}


@program(leaf(64, 256), leaf(64, 256), model=linear(256, 256, 256), drive=_interleaved)
def two_forwards_then_two_backwards_in_any_order(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)) * x


def _chained(run: Run, model: Any, x: Tensor) -> Values:
    out = run(run(run(x)))
    projected(out).backward()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256), drive=_chained)
def a_compiled_block_three_times_in_a_row(m: Any, x: Tensor) -> Tensor:
    return x + F.gelu(m(x))


def _non_contiguous(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    out.backward(torch.randn(256, 64).t())
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256), drive=_non_contiguous)
def the_tangent_is_transposed(m: Any, x: Tensor) -> Tensor:
    return m(x).sigmoid()


def _expanded_tangent(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    out.backward(torch.ones(()).expand(64, 256))
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256), drive=_expanded_tangent)
def the_tangent_is_an_expanded_scalar(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x


def _nan_tangent(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    tangent = torch.randn(64, 256)
    tangent[0, 0] = torch.nan
    out.backward(tangent)
    return {"out": out}


@program(leaf(64, 256), model=lambda: nn.Linear(256, 256), drive=_nan_tangent)
def a_nan_in_the_tangent_stays_in_its_row(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)) * x


@program(leaf(64, 256), leaf(64, 256), model=linear(256, 256))
def an_input_that_nobody_reads(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m(x).sigmoid() * x


def _backward_in_a_thread(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    thread = threading.Thread(target=lambda: projected(out).backward())
    thread.start()
    thread.join()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_backward_in_a_thread)
def the_backward_runs_in_another_thread(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x


def _step_in_a_thread(run: Run, model: Any, x: Tensor) -> Values:
    kept: dict[str, Any] = {}

    def step() -> None:
        try:
            kept["out"] = run(x)
            projected(kept["out"]).backward()
        except Exception as error:
            kept["error"] = error

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    if "error" in kept:
        raise kept["error"]
    return kept


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_step_in_a_thread)
def all_of_a_step_in_another_thread(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)).tanh()


def _two_threads(run: Run, model: Any, x: Tensor, y: Tensor) -> Values:
    run(x.detach())  # compiled before, so that the threads only run
    outs = [run(x), run(y)]
    threads = [threading.Thread(target=lambda o=o: o.sum().backward()) for o in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"out": outs}


@program(leaf(64, 256), leaf(64, 256), model=nn.Module, drive=_two_threads)
def two_backwards_at_once_in_two_threads(m: Any, x: Tensor) -> Tensor:
    return (x.sigmoid() @ x.t().tanh()).sin()


def _evaluated_between(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x)
    with torch.no_grad():
        seen = run(x)
    projected(out).backward()
    return {"out": out, "seen": seen}


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_evaluated_between)
def evaluation_between_forward_and_backward(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


def _frozen(run: Run, model: Any, x: Tensor) -> Values:
    model[0].requires_grad_(False)
    out = run(x)
    projected(out).backward()
    return {"out": out}


@program(data(64, 256), model=linear(256, 256, 256), drive=_frozen)
def the_first_layer_is_frozen(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()
