"""Adversarial programs by theme: importing this package fills ``tests.sweeps.registry.PROGRAMS``."""

import importlib

THEMES = (
    "reported",
    "aliasing",
    "buffers",
    "strides",
    "hooks",
    "backwards",
    "checkpoints",
    "randomness",
    "higher_order",
    "functions",
    "kinds",
    "transforms",
    "poles",
    "comparisons",
    "indexing",
    "exponents",
    "norms",
    "networks",
    "attention",
)

for theme in THEMES:
    importlib.import_module(f"{__name__}.{theme}")
