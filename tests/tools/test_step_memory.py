"""The memory of a step, measured from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.tools.step_memory import measured_peak


def test_the_peak_of_a_step_on_a_cpu() -> None:
    def step() -> Tensor:
        return (torch.ones(2**18) * 2).sum()  # both at one time

    assert 2 * 2**20 <= measured_peak(step) < 2 * 2**20 + 4096
