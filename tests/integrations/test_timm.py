"""timm: a ConvNeXt on real digits keeps up with its twin, what is done to it is said, and checkpoints keep their keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.parity import assert_parity
from tests.integrations.twins import beside_its_twin

pytest.importorskip("timm")
pytest.importorskip("sklearn")
import timm

from examples import timm_finetune as example

SMALL: dict[str, dict[str, Any]] = {
    "convnext_tiny": {"depths": (1, 1, 2, 1), "dims": (48, 96, 192, 384), "ls_init_value": 1.0},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
}


def test_the_example_keeps_up_with_its_twin() -> None:
    outcome = beside_its_twin(example)
    assert_parity(outcome)
    report = outcome.report
    assert report.saved_bytes < 0.2 * report.saved_bytes_plain
    # two linears of the MLP in each of five blocks, three products each; the head has 10 outputs
    assert len(report.linears) == 2 * 5 * 3
    assert {matmul.origin.module.rpartition(".")[2] for matmul in report.linears} == {"fc1", "fc2"}
    assert {skip.origin.module for skip in report.notes.skipped("linear")} == {"head.fc"}


@pytest.mark.parametrize("name", SMALL)
def test_checkpoints_keep_their_keys(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, in_chans=1, **SMALL[name])
    keys = list(model.state_dict())
    model.compile(backend="fp8compile", options={"debug.codegen": "eager"})
    images, labels = example.digits(1)[0]
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert list(model.state_dict()) == keys
    assert all(p.grad is not None for p in model.parameters())
