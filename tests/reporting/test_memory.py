"""fits: against what is there after a training step, what counts once, the verdict, errors; the walk over live values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.memory import GIB, ModelBytes, predict
from fp8compile.reporting.optimizer_rows import Trained
from fp8compile.reporting.report import Report
from fp8compile.reporting.running import Peaks
from tests.support.measure import compiled, kept_bytes, llama_case

Case = tuple[nn.Module, tuple[Tensor, ...], dict[str, str]]


def llama_layer() -> Case:
    return *llama_case(), {}


def tied_llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (2, 128))
    return LlamaForCausalLM(config).float().train(), (ids, ids), {"input_ids": "", "labels": ""}


def partly_frozen() -> Case:
    layer, args = llama_case()
    for linear in (layer.q, layer.k, layer.gate, layer.up):
        linear.requires_grad_(False)
    return layer, args, {}


def distinct(tensors: Iterable[Any]) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)
    }
    return sum(storages.values())


def bytes_of_a_step(model: nn.Module, call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> dict[str, int]:
    """What autograd and AdamW really hold in one training step."""
    activations = kept_bytes(model, call, args)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    call(*args).float().sum().backward()
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values()]
    gradients = [p.grad for p in model.parameters()]
    return {
        "weights": distinct(model.parameters()),
        "gradients": distinct(gradients),
        "states": distinct(states),
        "activations": activations,
    }


@pytest.mark.parametrize("case", [llama_layer, tied_llama, partly_frozen])
def test_it_predicts_what_is_there_after_a_step(case: Callable[[], Case]) -> None:
    model, args, names = case()
    kwargs = dict(zip(names, args, strict=True)) if names else {}
    fit = fp8compile.explain(model, () if names else args, kwargs).fits()
    fn = compiled(model)

    def call(*args: Tensor) -> Tensor:
        return fn(**dict(zip(names, args, strict=True))).loss if names else fn(*args)  # type: ignore[attr-defined]

    found = bytes_of_a_step(model, call, args)
    told = {name: getattr(fit, name) for name in found}
    assert sum(told.values()) == pytest.approx(sum(found.values()), rel=0.05)
    for name in found:
        assert told[name] == pytest.approx(found[name], rel=0.05), (name, told, found)
    assert fit.activations < fit.activations_plain and fit.peak < fit.peak_plain


def test_shared_frozen_and_viewed_parameters_count_once_and_as_trained() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    model[2].weight = model[0].weight  # one parameter
    model[3].requires_grad_(False)
    fit = fp8compile.explain(model, (torch.randn(256, 64),)).fits()
    assert fit.weights == 4 * (64 * 64 + 2 * 64) and fit.buffers == 4 * 2 * 64 + 8
    assert fit.gradients == 4 * 64 * 64 and fit.states == 2 * fit.gradients
    flat = torch.randn(2 * 64)
    halves = nn.ParameterList([nn.Parameter(flat[:64]), nn.Parameter(flat[64:])])
    both = (Trained((64,), 4), Trained((64,), 4))
    held = (2 * 64 * 4, 0, 2 * 64 * 4, 2 * 64, both)
    assert fp8compile.reporting.memory.model_bytes(halves) == ModelBytes(*held, 2 * 64 * 4)
    assert fp8compile.reporting.memory.model_bytes(halves, in_graphs=[]) == ModelBytes(*held, 64 * 4)


def test_states_are_bytes_for_each_parameter_or_an_optimizer() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(256, 64)
    report = fp8compile.explain(model, x)
    assert [report.fits(states=n).states for n in (0, 2, 8.5)] == [0, 2 * 64 * 64, 8.5 * 64 * 64]
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="this optimizer holds no state yet"):
        report.fits(states=optimizer)
    model(x).sum().backward()
    optimizer.step()
    assert report.fits(states=optimizer).states == 4 * 64 * 64


def test_a_graph_that_runs_for_every_block_counts_every_time() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.linear(x))
            torch._dynamo.graph_break()
            return torch.sigmoid(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Net(), torch.randn(256, 64)
    report = fp8compile.explain(model, x)
    fn = compiled(model)
    assert report.fits().activations == pytest.approx(kept_bytes(model, fn, (x,)), rel=0.05)
    assert report.saved_bytes == report.fits().activations > sum(g.saved_bytes for g in report.graphs)


def test_a_verdict_can_be_read_and_tested() -> None:
    report = Report(
        (GraphReport("training", peaks=Peaks(GIB, 2 * GIB, GIB), peaks_plain=Peaks(3 * GIB, 4 * GIB, GIB)),),
        model=ModelBytes(GIB, 0, GIB, 1),
    )
    fit = report.fits(card_gib=5.5)
    assert fit and fit.peak == 5 * GIB and fit.peak_plain == 7 * GIB
    lines = str(fit).splitlines()
    assert lines[0] == "fits in 5.50 GiB: predicted peak 5.00 GiB, 512.0 MiB to spare"
    assert lines[1] == "plain Inductor: does not fit in 5.50 GiB: predicted peak 7.00 GiB, 1.50 GiB too much"
    assert not report.fits(card_gib=4)
    assert json.loads(report.to_json())["memory"] == report.fits().to_dict()
    small = predict(ModelBytes(GIB, 0, GIB, 1), (0, 0), (0, 0), (0, 0, 0))
    assert small.peak == 5 * GIB, "the optimizer's step needs more than forward and backward here"


@pytest.mark.parametrize("card", [0, -80, float("nan"), "80", True])
def test_a_card_that_cannot_be_is_refused(card: Any) -> None:
    with pytest.raises(ValueError, match="card_gib is the memory of the card in GiB, such as 80, not"):
        Report(model=ModelBytes(1, 0, 1, 1)).fits(card_gib=card)


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(ValueError, match="states is an optimizer or the bytes"):
        Report(model=ModelBytes(1, 0, 1, 1)).fits(states=-1)
    with pytest.raises(ValueError, match="fits needs the report of a model"):
        Report().fits()
    assert json.loads(Report().to_json())["memory"] is None


def test_working_memory_is_what_no_kernel_fuses_beyond_what_is_kept() -> None:
    """f32 [256, 64] is one unit; the data belongs to the caller."""
    unit = 256 * 64 * 4

    class Two(nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64 * wide, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)).mul(2).add(1))

    # Plain keeps the first product and 1 + 2 tanh. Forward: both, and the output (wide). Backward: the incoming gradient
    # (wide); the other one (1) takes the room of 1 + 2 tanh, which the gradient of the weight read.
    # Ours keeps codes of the product. Forward: 1 + 2 tanh (1) beside the output. Backward: tanh (1), which a CPU computes
    # once for its two readers; 1 + 2 tanh (1), or the other gradient (1); the incoming one (wide). The codes are gone then.
    for wide in (1, 5):
        (graph,) = fp8compile.explain(Two(wide), torch.randn(256, 64)).graphs
        ours = (wide + 2) * unit - graph.saved_bytes
        assert (graph.workspace_bytes, graph.workspace_bytes_plain) == (ours, wide * unit)


@pytest.mark.parametrize("compressed", [False, True], ids=["ours", "torch's, compressed"])
def test_encoded_states_count_as_what_they_take(compressed: bool) -> None:
    p = nn.Parameter(torch.zeros(256, 128))
    p.grad = torch.zeros_like(p)
    optimizer: torch.optim.Optimizer = fp8compile.optim.AdamW([p], compiled=False)
    optimizer = fp8compile.optim.compress(torch.optim.AdamW([p])) if compressed else optimizer
    optimizer.step()
    codes_and_metadata = 2 * (256 * 128 + 256 * (4 + 1))
    states = Report(model=ModelBytes(1, 0, 1, 1)).fits(states=optimizer).states
    assert states == codes_and_metadata + 16  # the count of steps: 4 bytes, each 16 from the next
