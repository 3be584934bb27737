"""Which devices multiply FP8."""

from __future__ import annotations

import torch

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """None where ``_scaled_mm`` runs on FP8 matrix units, else what to tell the user."""
    cure = "emulate=True decodes and multiplies"
    if device.type != "cuda" or torch.version.hip:
        return f"{device.type} has no FP8 matrix units that torch._scaled_mm supports ({cure})"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        return f"compute capability {major}.{minor} has no FP8 matrix units; 8.9 and later have ({cure})"
    return None
