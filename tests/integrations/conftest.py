"""Lightning, transformers and timm import torchvision where it is installed; one for another torch must not stop them."""

from __future__ import annotations

import contextlib

from examples.timm_finetune import define_operators_of_torchvision

try:
    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401
except RuntimeError:  # "operator torchvision::nms does not exist": a wheel for another torch
    define_operators_of_torchvision()
