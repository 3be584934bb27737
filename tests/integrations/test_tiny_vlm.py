"""A tiny vision-language model: prefix tokens of a patch encoder before a Llama, trained to parity with its twin."""

from __future__ import annotations

import pytest
import torch

import fp8compile
from tests.integrations.parity import assert_parity
from tests.integrations.twins import beside_its_twin

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")
pytest.importorskip("transformers")
from sklearn.datasets import load_digits

from examples import tiny_vlm as example


def test_the_example_keeps_up_with_its_twin() -> None:
    outcome = beside_its_twin(example)
    assert_parity(outcome)
    assert outcome.ours.loss < 0.3 * outcome.ours.losses[0]  # it spells: a uniform guess among bytes is 5.5 nats
    report = outcome.report
    assert report.saved_bytes < 0.25 * report.saved_bytes_plain
    done = {matmul.origin.module for matmul in report.linears}
    assert {"project", "vision.layers.0.linear1", "language.model.layers.1.mlp.down_proj"} <= done
    left = {skip.origin.module: skip.reason for skip in report.notes.skipped("linear")}
    assert left.keys() == {"patches", "language.lm_head"}, left
    assert left["patches"] == "K=4 is not a multiple of 16"


def test_gradients_of_every_part_are_those_of_the_model() -> None:
    """Storage alone changes no forward, and every parameter of both halves gets a gradient near the exact one."""
    torch.manual_seed(0)
    model, digits = example.TinyVLM(), load_digits()
    captions = torch.tensor([list(example.NAMES[name].ljust(8).encode()) for name in digits.target[:32]])
    batch = {"images": torch.tensor(digits.images[:32])[:, None].float() / 8 - 1, "captions": captions}
    found = fp8compile.check(model, batch, recipe={"debug.codegen": "eager", "linears": "off"})
    assert found.ok, found
