"""Bytes in use: on a GPU what torch's allocator has handed out, elsewhere what the process holds. No device is waited for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from torch import nn

STATM = Path("/proc/self/statm")  # Linux: sizes in pages, the second is what is resident


def memory_of(device: torch.device) -> dict[str, int]:
    """``memory`` and, on a GPU, ``memory_peak`` since torch's count began; {} where nobody says."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {"memory": stats["allocated_bytes.all.current"], "memory_peak": stats["allocated_bytes.all.peak"]}
    with contextlib.suppress(OSError, ValueError, IndexError):
        return {"memory": int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    return {}


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter lies."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
