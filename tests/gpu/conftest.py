"""The device of these tests, or why they are skipped."""

from __future__ import annotations

import pytest
import torch

from fp8compile.linears.device import fp8_unsupported_reason


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """A GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def fp8_gpu(gpu: torch.device) -> torch.device:
    """A GPU that multiplies FP8."""
    if why := fp8_unsupported_reason(gpu):
        pytest.skip(why)
    return gpu
