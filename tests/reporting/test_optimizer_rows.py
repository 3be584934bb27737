"""by_optimizer: bytes of states against optimizers that have stepped, peaks, gradients of graphs, the table."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.numerics.states.registry import SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY, state_bytes, state_codec
from fp8compile.reporting.memory import GIB, Fit, model_bytes, predict
from fp8compile.reporting.optimizer_rows import OURS, Trained, eight_bit_adamw

MIB = 2**20


RUNNING = (10 * MIB, 16 * MIB, 9 * MIB)


class Net(nn.Module):
    """Parameters of all kinds: encoded, with short groups, small, an embedding, a convolution's, frozen, overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.up, self.odd, self.frozen = nn.Linear(64, 256), nn.Linear(256, 77), nn.Linear(77, 77)
        self.conv, self.kept = nn.Conv2d(16, 32, 3), nn.Linear(64, 128)
        self.frozen.requires_grad_(False)
        fp8compile.optim.override(self.kept, state_format="bf16")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.frozen(torch.tanh(self.odd(torch.tanh(self.up(x)))))


def fit_of(model: nn.Module, gib: float = 1.0) -> Fit:
    from fp8compile.optim.placement import fixed_formats

    return predict(model_bytes(model, fixed_formats(model)), (3 * MIB, 9 * MIB), (MIB, MIB), RUNNING, gib)


def stepped(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of its states after a step, but for the counts of steps."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    states = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    return sum(t.untyped_storage().nbytes() for t in states if isinstance(t, Tensor))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW (torch.optim)": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD without momentum": lambda model: torch.optim.SGD(model.parameters()),
    **{
        f"AdamW {name}": lambda model, name=name: fp8compile.optim.AdamW(model, state_format=name, compiled=False)  # type: ignore[misc]
        for name in OURS
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_an_optimizer_that_has_stepped(name: str, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    row = next(row for row in fit_of(model).by_optimizer() if row.name == name)
    assert row.states == stepped(OPTIMIZERS[name](model))


@pytest.mark.parametrize("name", STATE_FORMATS)
@pytest.mark.parametrize("shape", [(64, 256), (77, 256), (5, 130), (32, 16, 3, 3), (8192,)], ids=str)
def test_bytes_of_a_format_are_those_of_what_it_encodes(name: str, shape: tuple[int, ...]) -> None:
    kinds = [signed for signed in (True, False) if name not in (UNSIGNED_ONLY if signed else SIGNED_ONLY)]
    for signed in kinds:
        stored = state_codec(name, signed=signed).encode(torch.rand(shape))
        assert state_bytes(name, shape, signed=signed) == sum(part.nbytes for part in stored)


def test_the_layout_of_bitsandbytes() -> None:
    """A byte for each element, an FP32 absmax for each 256 of them, the last block short; FP32 below 4096 elements."""
    assert eight_bit_adamw(Trained((64, 64), 4)) == 2 * (4096 + 16 * 4)
    assert eight_bit_adamw(Trained((4097,), 2)) == 2 * (4097 + 17 * 4)
    assert eight_bit_adamw(Trained((4095,), 2)) == 2 * 4095 * 4


def test_peaks_and_verdicts_follow_from_the_bytes() -> None:
    model = Net()
    fit = fit_of(model)
    held = fit.weights + fit.buffers
    rows = {row.name: row for row in fit.by_optimizer()}
    assert rows["AdamW (torch.optim)"].peak == fit.peak, "that is what fits() predicts by default"
    for row in rows.values():
        update = row.gradients if row.name == "AdamW (torch.optim)" else 0
        running = RUNNING[2 if "released" in row.name else 0]
        assert row.peak == held + row.states + max(running, row.gradients + update)
        tight = predict(fit.model, (3 * MIB, 0), (MIB, 0), RUNNING, row.peak / GIB)  # type: ignore[arg-type]
        again = next(each for each in tight.by_optimizer() if each.name == row.name)
        assert again and again.verdict == "fits, 0 B to spare"
    assert math.isclose(rows["AdamW 4bit"].states / rows["AdamW e4m3_expanded"].states, 0.6, abs_tol=0.4)
    small = predict(fit.model, (0, 0), (0, 0), (0, 0, 0)).by_optimizer()  # type: ignore[arg-type]
    torchs, bnb, sgd, *_ = small.rows
    assert torchs.peak == held + 2 * torchs.gradients + torchs.states, "a temporary as large as the gradients"
    assert sgd.peak == held + sgd.gradients and bnb.peak == held + bnb.gradients + bnb.states


class Block(nn.Module):
    def __init__(self, wide: int, breaks: bool) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(64, wide, bias=False), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x.sum(-1, keepdim=True).expand(-1, 64).sin()


@pytest.mark.parametrize("breaks", [False, True])
def test_released_gradients_are_those_of_one_graph(breaks: bool) -> None:
    """The backward of a graph returns all its gradients together; what a break separates comes one after the other."""
    model, x = nn.Sequential(Block(128, breaks), Block(256, breaks)), torch.randn(8, 64)
    compiled = torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager"})
    compiled(x).sum().backward()
    first, second = 128 * 64 * 4, 256 * 64 * 4
    for report in (fp8compile.explain(model, x), fp8compile.report(compiled)):  # type: ignore[arg-type]
        *_, ours, fourbit, released = report.fits().by_optimizer()
        assert (ours.gradients, fourbit.gradients) == (first + second,) * 2
        assert released.gradients == (second if breaks else first + second)
        assert released.states == ours.states
        assert ours.peak - released.peak == pytest.approx(ours.gradients - released.gradients, abs=16 * x.nbytes)


def test_the_table_is_short_and_printed_with_the_prediction() -> None:
    fit = fit_of(Net(), 0.001)
    text = str(fit)
    assert len(text.splitlines()) <= 12 and str(fit.by_optimizer()) in text
    assert all(len(line) <= 100 for line in str(fit.by_optimizer()).splitlines())
    for name in ("8-bit AdamW (bitsandbytes layout)", "gradients released", "too much", "states", "peak"):
        assert name in str(fit.by_optimizer())
    assert not any(fit.by_optimizer())
    with pytest.raises(ValueError, match="by_optimizer needs a model that is trained"):
        predict(model_bytes(nn.Tanh()), (0, 0), (0, 0), (0, 0, 0)).by_optimizer()
