"""Which devices multiply one-byte codes."""

from __future__ import annotations

import torch

from fp8compile import _torch as private

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
GROUPED_CAPABILITY = (9, 0)  # Hopper
INT8_CAPABILITY = (8, 0)  # Ampere, the first that cuBLASLt takes plain row-major operands for
CURE = "linears.emulate=True decodes and multiplies"


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """None where ``_scaled_mm`` runs on FP8 matrix units, else what to tell the user."""
    if device.type != "cuda" or torch.version.hip:
        return f"{device.type} has no FP8 matrix units that torch._scaled_mm supports ({CURE})"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        return f"compute capability {major}.{minor} has no FP8 matrix units; 8.9 and later have ({CURE})"
    return None


def grouped_unsupported_reason(device: torch.device) -> str | None:
    """Of a device with FP8 matrix units: None where ``_scaled_grouped_mm`` takes scales of rows, else what to tell."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != GROUPED_CAPABILITY:
        return (
            f"compute capability {major}.{minor}: torch._scaled_grouped_mm has scales of rows on 9.0 alone ({CURE})"
        )
    return None


def int8_unsupported_reason(device: torch.device) -> str | None:
    """None where ``_int_mm`` is faster than a product in floats, else what to tell the user."""
    if device.type == "cpu":
        return None if private.cpu_has_vnni() else f"this CPU has no AVX512 VNNI for INT8 products ({CURE})"
    if device.type != "cuda" or torch.version.hip:
        return f"{device.type} has no INT8 products that were tried with torch._int_mm ({CURE})"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < INT8_CAPABILITY:
        return f"compute capability {major}.{minor} is not supported by linears='int8'; 8.0 and later are ({CURE})"
    return None
