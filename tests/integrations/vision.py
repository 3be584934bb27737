"""A torchvision that was built for another torch: Lightning, transformers and timm import it where it is installed."""

from __future__ import annotations

import torch


def define_operators() -> None:
    """What such a torchvision must find, or it cannot be imported."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def _is_for_another_torch() -> bool:
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return False
    except RuntimeError:  # "operator torchvision::nms does not exist"
        return True
    return False


FOR_ANOTHER_TORCH = _is_for_another_torch()  # asked before the operators are defined: then it can be imported
