"""Recipes by what a user wants: the fields in which each differs from the default. Known without torch, for the command
line's help.

default   FP8 linears where they are predicted to pay, what is saved as codes
speed     the same linears; nothing that is saved is rounded, which costs kernels their time
memory    seven tenths of the default's peak: matmuls are computed again, large logits never exist as a whole
exact     no number is rounded: what is saved is stored in fewer bytes where these hold it without an error
off       plain Inductor
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "speed": {"saved": "exact"},
    "memory": {"memory": {"budget": 0.7, "chunk_logits": "auto"}},
    "exact": {"linears": "off", "saved": "exact"},
    "off": {"linears": "off", "saved": "off", "fp32": {"islands": "off", "observe": False}},
}
