"""What passes decide where FP8 linears are emulated on a CPU is what they decide for an H100, but for what is argued here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of

IN_CI = ("mlp, checkpointed", "lora", "vit")
SWEPT = (
    "bert",
    "gpt2",
    "llama",
    "experts",
    "resnet",
    "resnet, channels last",
    "mlp, dropout",
    "mlp, dropout, checkpointed",
    "vit, checkpointed",
    "hf llama",
    "hf llama, checkpointing",
    "hf bert, dropout, autocast",
    "hf gpt2, dropout, autocast",
    "hf mixtral",
)

SYMBOL = re.compile(r"\bs\d+\b")  # a size that a run counts, under a name of its own in every graph

# A storage: shape, dtype, order in memory.
Kept = tuple[str, str, str]
# What the device keeps in the place of what emulation keeps, in every model.
SCALE = ("[]", "torch.bfloat16", "None"), ("[]", "torch.float32", "None")  # emulated, in the dtype that it decodes to
LOGSUMEXP = (
    ("[2, 2, 64]", "torch.float32", "(0, 2, 1)"),
    ("[2, 2, 64]", "torch.float32", "None"),
)  # the CPU's is transposed
IN_ITS_PLACE: Mapping[Kept, Kept] = dict((SCALE, LOGSUMEXP))


# What one side alone keeps, with how many of it.


def seeds(layers: int) -> dict[Kept, int]:
    """What flash attention draws from, on a device."""
    return {("[2]", "torch.uint64", "None"): layers, ("[]", "torch.uint64", "None"): layers}


# LayerNorm's statistics are FP32 on cuda: one is shared with what is kept in FP32 already. On a CPU both are rounded.
ROUNDED: dict[Kept, int] = {("[2, 64, 1]", "torch.bfloat16", "None"): 2}
IN_FP32: dict[Kept, int] = {("[2, 64, 1]", "torch.float32", "None"): 1}


def seeds_under_a_mask(layers: int) -> dict[Kept, int]:
    """What memory-efficient attention draws from: a seed and an offset."""
    return {("[]", "torch.int64", "None"): 2 * layers}


def states(regions: int) -> dict[Kept, int]:
    """Attention in a region draws twice: on a CPU its generator's state is kept, on a device a second generator holds it."""
    return {("[s]", "torch.uint8", "None"): regions}


ONLY_EMULATED: Mapping[str, dict[Kept, int]] = {
    "bert": ROUNDED,
    "vit, checkpointed": states(3),
    "hf llama, checkpointing": states(2),
}
ONLY_ON_DEVICE: Mapping[str, dict[Kept, int]] = {
    "vit": seeds(1),
    "bert": {**seeds(1), **IN_FP32},
    "gpt2": seeds(1),
    "llama": seeds(1),
    "hf llama": seeds_under_a_mask(2),
    "hf mixtral": seeds_under_a_mask(2),
}
MODELS = [*IN_CI, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEPT)]


def arms(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = result_of("run_emulated", *(IN_CI if name in IN_CI else (name,)))[name]
    return found["emulated"], found["device"]


def kept(arm: dict[str, Any]) -> Counter[Kept]:
    return Counter((SYMBOL.sub("s", shape), dtype, order) for _, shape, dtype, order in arm["kept"])


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tensors_are_kept_in_the_same_order_in_memory(name: str) -> None:
    emulated, device = map(kept, arms(name))
    emulated -= Counter(ONLY_EMULATED.get(name, {}))
    expected: Counter[Kept] = Counter(ONLY_ON_DEVICE.get(name, {}))
    for each, count in emulated.items():
        expected[IN_ITS_PLACE.get(each, each)] += count
    assert device == expected


@pytest.mark.parametrize("name", MODELS)
def test_as_many_products_are_computed_in_each_half_and_the_same_in_fp8(name: str) -> None:
    """A product that one side makes again and the other saves would be one more in its backward."""
    emulated, device = arms(name)
    assert [sum(half.values()) for half in emulated["products"]] == [
        sum(half.values()) for half in device["products"]
    ]
    assert emulated["in FP8"] == device["in FP8"]
    assert len(device["in FP8"]) <= sum(half.get("_scaled_mm", 0) for half in device["products"])
    assert device["in FP8"] or name.startswith("resnet")
