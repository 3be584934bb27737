"""Lightning, transformers and timm import torchvision where it is installed; one for another torch must not stop them."""

from __future__ import annotations

from tests.integrations.vision import FOR_ANOTHER_TORCH, define_operators

if FOR_ANOTHER_TORCH:
    define_operators()
