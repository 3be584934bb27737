"""What is encoded and what is kept whole, and what that costs, counted from the storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8compile import optim
from tests.support.optim_models import small_model

TEN_MILLION = [(1024, 4096), (4096, 1024), (1024, 1024), (1024,), (512, 1024)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 128)
        self.lookup = nn.Embedding(64, 128)
        self.layer = nn.Linear(128, 128)
        self.long = nn.Parameter(torch.zeros(8192))


def stepped(optimizer: optim.EncodedOptimizer) -> optim.EncodedOptimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def started(optimizer: optim.EncodedOptimizer) -> optim.EncodedOptimizer:
    """With the states that the first step would make."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
            optimizer.step_function(p)
    return optimizer


def bits_per_parameter(optimizer: optim.EncodedOptimizer, *, weights: bool = False) -> float:
    """Counted from storages: every state but the step, which does not grow with the parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for p in parameters for name, t in optimizer.state[p].items() if name != "step"]
    tensors += parameters if weights else []
    return sum(t.untyped_storage().nbytes() * 8 for t in tensors) / sum(p.numel() for p in parameters)


@pytest.mark.parametrize(
    ("state_format", "most"),
    [
        ("e4m3_expanded", 16.7),
        ("e5m2_expanded", 16.7),
        (("dynamic_tree", "e4m3_expanded"), 16.6),
        ("dynamic_tree", 16.6),
        ("int8_companded", 16.6),
        ("e4m3", 16.6),
        ("4bit", 8.6),
        ("bf16", 32.01),
        ("fp32", 64.01),
    ],
)
def test_bits_per_parameter(state_format: Any, most: float) -> None:
    """Codes, and per group of 128 and state 32 bits of scale and 8 of k; the vector of 1024 stays in FP32."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in TEN_MILLION]
    optimizer = started(optim.AdamW(parameters, state_format=state_format, compiled=False))
    bits = bits_per_parameter(optimizer)
    assert most - 0.1 < bits <= most
    optimizer.zero_grad()
    assert optimizer.report().bits_per_parameter == pytest.approx(bits)


def test_split_weights_and_states_take_five_bytes() -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in TEN_MILLION]
    optimizer = started(optim.AdamW(parameters, master="split", compiled=False))
    assert bits_per_parameter(optimizer, weights=True) / 8 <= 5.1


def formats(optimizer: optim.EncodedOptimizer) -> dict[str, tuple[str, str | None]]:
    return {p.name: (p.states[0].format, p.reason) for p in stepped(optimizer).report().parameters}


def test_small_tensors_and_embeddings_stay_whole() -> None:
    assert formats(optim.AdamW(Net(), compiled=False)) == {
        "long": ("e4m3_expanded", None),
        "embed_tokens.weight": ("fp32", "an embedding"),
        "lookup.weight": ("fp32", "an embedding"),
        "layer.weight": ("e4m3_expanded", None),
        "layer.bias": ("fp32", "128 elements, fewer than 4096"),
    }


def test_names_alone_tell_embeddings_by_their_name() -> None:
    found = formats(optim.AdamW(Net().named_parameters(), compiled=False))
    assert found["embed_tokens.weight"] == ("fp32", "an embedding")
    assert found["lookup.weight"] == ("e4m3_expanded", None)


def test_parameters_alone_have_no_names() -> None:
    found = formats(optim.AdamW(Net().parameters(), compiled=False))
    assert found["parameter 1"] == ("e4m3_expanded", None)


def test_overrides_by_name_module_and_parameter() -> None:
    model = Net()
    optim.override(model.layer, state_format="bf16")
    found = formats(optim.AdamW(model, overrides={"look*": "dynamic_tree", "long": "fp32"}, compiled=False))
    assert found["lookup.weight"] == ("dynamic_tree", "named like look*")
    assert found["long"] == ("fp32", "named like long")
    assert found["layer.weight"] == found["layer.bias"] == ("bf16", "override")


def test_the_report_says_it_all() -> None:
    model = small_model()
    optimizer = stepped(optim.AdamW(model, compiled=False))
    first = optimizer.report().parameters[0]
    assert first.name == "0.weight" and [s.name for s in first.states] == ["exp_avg", "exp_avg_sq"]
    low, median, high = first.states[0].k  # type: ignore[misc]
    assert 1 / 16 <= low <= median <= high <= 255 / 16
    assert first.states[0].error_db is not None and first.states[0].error_db > 25  # half_ulp / k is below 2**-4
    text = str(optimizer.report())
    assert "0.weight" in text and "fewer than 4096" in text and "bits per parameter" in text
    optimizer.zero_grad()
    assert optimizer.report().parameters[0].states[0].error_db is None
