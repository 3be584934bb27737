"""timm: a ConvNeXt on real digits keeps up with its twin, what is done to it is said, and checkpoints keep their keys."""

from __future__ import annotations

import pytest
import torch

from examples import timm_finetune as example
from tests.integrations.parity import assert_parity

example.define_operators_of_torchvision()
pytest.importorskip("timm")
pytest.importorskip("sklearn")


def test_the_example_keeps_up_with_its_twin() -> None:
    outcome = example.main(["--twin", "--codegen", "eager"])
    assert_parity(outcome)
    report = outcome.ours.report
    assert report is not None and report.saved_bytes < 0.2 * report.saved_bytes_plain
    # two linears of the MLP in each of five blocks, three products each; the head has 10 outputs
    assert len(report.linears) == 2 * 5 * 3
    assert {matmul.origin.module.rpartition(".")[2] for matmul in report.linears} == {"fc1", "fc2"}
    assert {skip.origin.module for skip in report.notes.skipped("linear")} == {"head.fc"}


@pytest.mark.parametrize("name", ["convnext_tiny", "vit_tiny_patch16_224"])
def test_checkpoints_keep_their_keys(name: str) -> None:
    model = example.create(name)
    keys = list(model.state_dict())
    model.compile(backend="fp8compile", options={"debug.codegen": "eager"})
    images, labels = example.digits(1)[0]
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert list(model.state_dict()) == keys
    assert all(p.grad is not None for p in model.parameters())
