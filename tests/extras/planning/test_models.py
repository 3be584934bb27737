"""Shapes of models: their counts against published ones and against modules, other counts by the stated rule."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fp8compile.extras.planning.models import ALIKE, KNOWN, Shape, shape_for

PUBLISHED = {  # by the checkpoints' own files
    "Llama-2-7B": 6_738_415_616,
    "Llama-3-8B": 8_030_261_248,
    "Llama-2-13B": 13_015_864_320,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3-405B": 405_853_388_800,
}


@pytest.mark.parametrize("shape", KNOWN, ids=lambda shape: shape.name)
def test_counts_are_those_that_were_published(shape: Shape) -> None:
    if shape.name in PUBLISHED:
        assert shape.parameters == PUBLISHED[shape.name]
    else:
        assert shape.name.endswith("without biases")


@pytest.mark.parametrize("shape", KNOWN, ids=lambda shape: shape.name)
def test_counts_are_those_of_modules(shape: Shape) -> None:
    """transformers' own Llama of one and of two layers, without memory: what a layer adds, and what stands outside."""
    transformers = pytest.importorskip("transformers")

    def model(layers: int) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
        )
        with torch.device("meta"):
            made: nn.Module = transformers.LlamaForCausalLM(config)
        return made

    one, two = (sum(p.numel() for p in model(layers).parameters()) for layers in (1, 2))
    assert shape.parameters == one + (shape.layers - 1) * (two - one)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        (7e9, "Llama-2-7B"),
        (8e9, "Llama-3-8B"),
        (13e9, "Llama-2-13B"),
        (32e9, "Qwen2.5-32B without biases"),
        (70e9, "Llama-3-70B"),
        (405e9, "Llama-3-405B"),
    ],
)
def test_round_counts_stand_for_known_models(parameters: float, name: str) -> None:
    assert shape_for(parameters).name == name


@pytest.mark.parametrize("parameters", [1e9 * 1.1**power for power in range(72)])
def test_any_count_is_met(parameters: float) -> None:
    """Within 5 % of a known model it is that model; a scaled one is off by half a step of its intermediate size at most."""
    shape = shape_for(parameters)
    if shape in KNOWN:
        assert abs(shape.parameters / parameters - 1) <= ALIKE
        return
    half_a_step = 3 * shape.layers * shape.hidden * 256 / 2
    assert abs(shape.parameters - parameters) <= half_a_step
    assert shape.hidden % shape.heads == 0 and shape.heads % shape.kv_heads == 0 and shape.kv_heads % 8 == 0
    known = next(known for known in KNOWN if shape.name == f"{known.name} scaled")
    widths = shape.intermediate / shape.hidden / (known.intermediate / known.hidden)
    assert abs(widths - 1) <= 1 / shape.layers + 256 / shape.intermediate, (
        "half a layer, spread over all, and rounding"
    )


@pytest.mark.parametrize("parameters", [0, -1, 70, 9e8, 2e12, float("nan"), float("inf"), True])
def test_other_counts_are_refused(parameters: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"params={parameters!r} is not between 1e+09 and 1e+12")):
        shape_for(parameters)
