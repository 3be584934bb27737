"""Recipes by name: the fields in which each differs from the default. Known without torch, for the command line's help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "conservative": {"saved_attention": False},
    "linear_only": {"linear": "tensorwise", "saved": "off"},
    "storage_only": {"linear": "off"},
    "blockwise": {"linear": "blockwise", "linear_formats": "e4m3"},
    "mxfp8": {"linear": "mxfp8", "linear_formats": "e4m3"},
    "off": {"linear": "off", "saved": "off", "observe": False, "islands": "off"},
}
