"""Buffers and parameters that the step reads and writes: running statistics, averages, counters, tied and shared weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, data, leaf, linear, program, projected, steps


class Stateful(nn.Module):
    """A linear and a state of the same size, to be read and overwritten by the program."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.proj = nn.Linear(256, 256)
        self.register_buffer("state", torch.randn(*(shape or (64, 256))))


@program(leaf(64, 256), model=Stateful, drive=steps(2))
def a_running_mean_is_read_then_written(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    out = (y - m.state).tanh()
    with torch.no_grad():
        m.state.lerp_(y, 0.1)
    return out


@program(leaf(64, 256), model=Stateful, drive=steps(2))
def a_copy_of_a_running_mean_is_multiplied(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    out = (y - m.state).tanh() * m.state.clone()
    with torch.no_grad():
        m.state.lerp_(y, 0.1)
    return out


@program(leaf(64, 256), model=Stateful)
def eager_refuses_a_state_multiplied_then_written(m: Any, x: Tensor) -> Tensor:
    out = m.proj(x) * m.state
    m.state.add_(1)
    return out


@program(leaf(64, 256), model=Stateful, drive=steps(2))
def the_sigmoid_of_a_state_is_multiplied(m: Any, x: Tensor) -> Tensor:
    out = m.proj(x) * m.state.sigmoid()
    with torch.no_grad():
        m.state.mul_(-0.5)
    return out.tanh()


@program(leaf(64, 256), model=Stateful, drive=steps(2))
def a_state_is_written_then_read(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    m.state.copy_(y.detach())
    return y.sigmoid() * m.state


@program(leaf(64, 256), model=Stateful, drive=steps(2))
def a_state_read_between_two_writes(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    a = y * m.state.exp()
    m.state.mul_(0.5)
    b = a.tanh() * m.state.clone()
    m.state.add_(1)
    return b + y * m.state.sin()


@program(leaf(64, 256), model=Stateful)
def a_state_is_replaced_by_assignment(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x) * m.state.sigmoid()
    m.state = m.state * 0.9 + y.detach()
    return y.sin()


@program(leaf(64, 256), model=lambda: Stateful(256, 256))
def a_buffer_that_is_a_weight_is_overwritten(m: Any, x: Tensor) -> Tensor:
    y = F.linear(m.proj(x).tanh(), m.state.clone())
    with torch.no_grad():
        m.state.mul_(0.99).add_(m.proj.weight, alpha=0.01)
    return y.sigmoid()


@program(leaf(64, 256), model=Stateful)
def part_of_a_buffer_is_overwritten(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    out = F.silu(y) * m.state.tanh()
    m.state[:32] = y.detach()[:32]
    return out


class Averaged(nn.Module):
    """A student and its exponential moving average, updated within the forward (as in BYOL and DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x + 0.1).softmax(-1)
        loss = -(target * self.student(x).log_softmax(-1)).sum(-1).mean()
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.lerp_(s, 0.05)
        return loss


@program(leaf(64, 256), model=Averaged, drive=steps(2))
def a_teacher_averages_its_student(m: Any, x: Tensor) -> Tensor:
    return m(x)


@program(leaf(64, 256), model=linear(256, 256, 256), drive=steps(2))
def a_parameter_is_clamped_before_use(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m[0].weight.clamp_(-0.05, 0.05)
    return m(x).sin()


@program(leaf(64, 256), model=linear(256, 256, 256))
def eager_refuses_a_weight_changed_after_use(m: Any, x: Tensor) -> Tensor:
    y = m(x).tanh()
    with torch.no_grad():
        m[2].weight.mul_(0.9)
    return y


class Tied(nn.Module):
    """An embedding that is the output head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 256)
        self.mix = nn.Linear(256, 256)
        self.unembed = nn.Linear(256, 128, bias=False)
        self.unembed.weight = self.embed.weight


@program(lambda: torch.randint(0, 128, (64,)), model=Tied)
def an_embedding_is_tied_to_the_head(m: Any, i: Tensor) -> Tensor:
    return F.cross_entropy(m.unembed(F.gelu(m.mix(m.embed(i)))), i.roll(1))


@program(leaf(64, 256), model=linear(256, 256))
def one_weight_used_three_times_once_transposed(m: Any, x: Tensor) -> Tensor:
    w = m[0].weight
    return F.linear(F.linear(x, w).tanh(), w.t()).sigmoid() @ w


def _two_graphs(run: Run, model: Any, x: Tensor) -> Values:
    other = run.compiled(lambda h: F.silu(model[0](h)) * h)
    out = other(run(x)) + run(other(x))
    projected(out).backward()
    return {"out": out}


@program(leaf(64, 256), model=linear(256, 256), drive=_two_graphs)
def one_parameter_in_two_graphs(m: Any, x: Tensor) -> Tensor:
    return m[0](x).sigmoid()


@program(leaf(64, 256), model=linear(256, 256, 256))
def a_graph_break_in_the_middle(m: Any, x: Tensor) -> Tensor:
    y = F.gelu(m(x))
    torch._dynamo.graph_break()
    return (y * m(y)).tanh()


def _sgd(run: Run, model: Any, x: Tensor) -> Values:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(run(x).square().mean())
        losses[-1].backward()
        optimizer.step()
    return {"loss": losses}


@program(data(64, 256), model=linear(256, 256, 256), drive=_sgd)
def three_steps_of_momentum(m: Any, x: Tensor) -> Tensor:
    return m(x) - x


@program(leaf(64, 256), model=lambda: Stateful(1))
def a_counter_scales_the_output(m: Any, x: Tensor) -> Tensor:
    m.state.add_(1)
    return m.proj(x).sin() / (1 + m.state.abs())


@program(leaf(64, 256), model=linear(256, 256))
def gradients_are_clipped_inside_the_graph(m: Any, x: Tensor) -> Tensor:
    y = m(x).tanh()
    norm = y.norm()
    return y * (10.0 / (norm + 1e-6)).clamp(max=1.0)
