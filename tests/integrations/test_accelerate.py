"""accelerate: compiled in place before ``prepare``; FP16 with our scaler; a state that is loaded goes on bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.amp import LossScaler
from tests.integrations.parity import assert_parity
from tests.integrations.twins import beside_its_twin

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin
from safetensors.torch import load_file

from examples import accelerate_loop

OPTIONS = {"debug.codegen": "eager", "linears.emulate": True}
STEPS = 4


class Net(nn.Module):
    """Three linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.down(torch.relu(self.up(x)))))
        return y


class Training:
    """An FP16 run as on a GPU: accelerate leaves a CPU out where it switches autocast on, and nothing else."""

    def __init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        self.accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        self.accelerator.native_amp = True
        self.scaler = self.accelerator.scaler = LossScaler()
        self.inner = Net()
        self.inner.compile(backend="fp8compile", options=OPTIONS)
        optimizer = fp8compile.optim.AdamW(self.inner, lr=1e-2, compiled=False)
        self.model, self.optimizer = self.accelerator.prepare(self.inner, optimizer)

    def step(self, i: int) -> float:
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(i))
        loss = nn.functional.cross_entropy(self.model(x), x[:, :16].argmax(1))
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.fixture(autouse=True)
def no_accelerator_before() -> Iterator[None]:
    """accelerate keeps precision and accumulation in singletons."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_loop_that_accumulates_and_clips_trains_like_its_twin() -> None:
    outcome = beside_its_twin(accelerate_loop, layers=1, steps=16)
    assert_parity(outcome)
    report = outcome.report
    assert len(report.linears) == 3 * 7  # each linear of the layer, and not the head
    assert report.saved_bytes < report.saved_bytes_plain / 2


def test_fp16_with_our_scaler_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    whole = Training()
    losses = [whole.step(i) for i in range(STEPS)]
    whole.accelerator.save_state(str(tmp_path))
    assert losses[-1] < losses[0]
    assert load_file(tmp_path / "model.safetensors").keys() == Net().state_dict().keys()
    rest = [whole.step(i) for i in range(STEPS, 2 * STEPS)]
    assert whole.scaler.history == [
        (i + 1, 2.0 ** (i + 1)) for i in range(2 * STEPS)
    ]  # doubled from 1, no step skipped

    torch._dynamo.reset()
    again = Training()
    again.accelerator.load_state(str(tmp_path))
    assert [again.step(i) for i in range(STEPS, 2 * STEPS)] == rest
    assert all(torch.equal(a, b) for a, b in zip(whole.inner.parameters(), again.inner.parameters(), strict=True))
    assert again.scaler.history == whole.scaler.history
    report = fp8compile.report(again.inner)
    assert len(report.linears) == 8 and len(report.observed) > 0


def test_a_step_with_nan_is_skipped_and_accelerate_knows() -> None:
    training = Training()
    training.step(0)
    before = training.inner.up.weight.detach().clone()
    hook = training.inner.up.bias.register_hook(lambda gradient: gradient * float("nan"))
    training.step(1)
    hook.remove()
    assert training.accelerator.optimizer_step_was_skipped and training.scaler.skipped == 1
    assert torch.equal(training.inner.up.weight, before)
    training.step(2)
    assert not training.accelerator.optimizer_step_was_skipped
    assert not torch.equal(training.inner.up.weight, before)


def test_accelerate_does_not_take_the_name() -> None:
    """As docs/guide/trainers.md says; the way round is ``model.compile``."""
    with pytest.raises(ValueError, match=r"^'FP8COMPILE' is not a valid DynamoBackend$"):
        TorchDynamoPlugin(backend="fp8compile")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^'FP8COMPILE' is not a valid DynamoBackend$"):
        Accelerator(dynamo_backend="fp8compile", cpu=True)
