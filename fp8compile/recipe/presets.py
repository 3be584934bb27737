"""Recipes by name: the fields in which each differs from the default. Known without torch, for the command line's help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "conservative": {"saved": {"attention": False}},
    "linear_only": {"linears": "tensorwise", "saved": "off"},
    "storage_only": {"linears": "off"},
    "blockwise": {"linears": {"mode": "blockwise", "formats": "e4m3"}},
    "mxfp8": {"linears": {"mode": "mxfp8", "formats": "e4m3"}},
    "off": {"linears": "off", "saved": "off", "fp32": {"islands": "off", "observe": False}},
}
