"""Recipes by what a user wants: the fields in which each differs from the default. Known without torch, for the command
line's help.

default   FP8 linears where they are predicted to pay; codes of what is saved, on a GPU where they are predicted to pay
speed     the same linears; of what is saved, codes where they take a fifth of the time of making it again, or less
memory    seven tenths of the default's peak: matmuls are computed again, large logits never exist as a whole
exact     no number is rounded: what is saved is stored in fewer bytes where these hold it without an error
off       plain Inductor
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "speed": {"saved": {"max_cost": 0.2}},
    "memory": {"memory": {"budget": 0.7, "chunk_logits": "auto"}},
    "exact": {"linears": "off", "saved": "exact"},
    "off": {"linears": "off", "saved": "off", "fp32": {"islands": "off", "observe": False}},
}
