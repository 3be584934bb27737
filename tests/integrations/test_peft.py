"""LoRA: matmuls of frozen weights are in FP8, those of rank 8 are listed with the reason; keys and the base stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile.linears import weight_codes
from tests.integrations.parity import assert_parity
from tests.integrations.twins import Outcome, beside_its_twin

pytest.importorskip("peft")
pytest.importorskip("transformers")
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from examples import peft_lora

LINEARS = 7  # of a Llama layer
TEXT = Path(__file__).read_text()
OPTIONS = {"debug.codegen": "eager", "linears.emulate": True}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return beside_its_twin(peft_lora, layers=1, base_steps=20, steps=24)


def adapted(rank: int, **changes: Any) -> Any:
    """A Llama of one layer, with adapters."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    return get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", **changes))


def test_trains_like_its_twin(outcome: Outcome) -> None:
    assert_parity(outcome)


def test_frozen_weights_are_multiplied_in_fp8(outcome: Outcome) -> None:
    """Each in the forward; in the backward those below which an adapter learns, and none has a gradient of its weight."""
    report = outcome.report
    base = [matmul for matmul in report.linears if matmul.origin.module.endswith("base_layer")]
    assert len(base) == len(report.linears)
    assert sum(matmul.direction == "forward" for matmul in base) == LINEARS
    assert (
        sum(matmul.direction == "dgrad" for matmul in base) == LINEARS - 3
    )  # what q, k and v read needs no gradient
    assert not any(matmul.direction == "wgrad" for matmul in base)


def test_frozen_weights_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = weight_codes.encode, list[tuple[int, ...]]()
    monkeypatch.setattr(weight_codes, "encode", lambda w, how: encoded.append(tuple(w.shape)) or encode(w, how))
    model = adapted(8)
    model.compile(backend="fp8compile", options=OPTIONS | {"linears.cache_weights": True})
    peft_lora.learn(model, TEXT, 4, 1e-2)
    assert len(encoded) == LINEARS


def test_adapters_of_rank_8_are_left_with_the_reason(outcome: Outcome) -> None:
    report = outcome.report
    left = [skip for skip in report.notes.skipped("linear") if ".lora_" in skip.origin.module]
    assert {skip.reason for skip in left} == {"N=8 is not a multiple of 16", "K=8 is not a multiple of 16"}
    assert len(left) == 2 * 3 * LINEARS - 3  # lora_A of q, k and v has no dgrad


@pytest.mark.sweep
def test_adapters_of_rank_16_are_in_fp8_and_keys_stay() -> None:
    model = adapted(16, init_lora_weights=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    keys = get_peft_model_state_dict(model).keys()
    model.compile(backend="fp8compile", options=OPTIONS)
    peft_lora.learn(model, TEXT, 1, 1e-2)
    report = fp8compile.report(model)
    adapters = [matmul for matmul in report.linears if ".lora_" in matmul.origin.module]
    assert len(adapters) == 2 * 3 * LINEARS - 3
    assert get_peft_model_state_dict(model).keys() == keys
    assert before.keys() == dict(model.named_parameters()).keys()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
