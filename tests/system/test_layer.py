"""What a Llama layer keeps for the backward, and how good its gradients stay: the figures the project stands on."""

from __future__ import annotations

import pytest
import torch

import fp8compile
from tests.support.measure import compiled, gradient_sqnr, kept_bytes, llama_case


@pytest.mark.parametrize(
    ("saved_format", "least_db", "codegen"),
    [
        ("auto", 33.5, "eager"),
        ("auto", 33.5, "inductor"),
        ("e4m3", 23.5, "eager"),
        ("int8", 33.5, "eager"),
        pytest.param("e4m3", 23.5, "inductor", marks=pytest.mark.sweep),
        pytest.param("int8", 33.5, "inductor", marks=pytest.mark.sweep),
    ],
)
def test_a_llama_layer_keeps_at_most_6_units(codegen: str, saved_format: str, least_db: float) -> None:
    layer, args = llama_case()
    unit = args[0].numel() * 2
    fn = compiled(layer, linears="off", saved=saved_format, **{"debug.codegen": codegen})
    kept = kept_bytes(layer, fn, args)
    worst = min(gradient_sqnr(layer, fn, args).values())
    report = fp8compile.report(fn)
    assert kept <= 6.0 * unit, kept / unit
    assert report.saved_bytes == kept, "the report says what autograd sees"
    assert worst >= least_db, worst


def test_plain_inductor_is_what_the_report_compares_with() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    plain = kept_bytes(layer, torch.compile(layer, backend="inductor"), args)
    torch._dynamo.reset()
    ours = compiled(layer)
    kept_bytes(layer, ours, args)
    assert fp8compile.report(ours).saved_bytes_plain == plain


def test_outputs_are_bit_equal_to_plain_inductor() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    ours = torch.compile(layer, backend="fp8compile")(*args)
    torch._dynamo.reset()
    assert torch.equal(ours, torch.compile(layer, backend="inductor")(*args))


def test_attention_tensors_stay_16_bit_when_the_recipe_says_so() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    fn = compiled(layer, **{"saved.attention": False})
    kept_bytes(layer, fn, args)
    left = [s for s in fp8compile.report(fn).skips if "saved.attention" in s.reason]
    assert len(left) == 4, "q, k, v and the result of attention"
