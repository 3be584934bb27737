"""The arms: the same model, compiled by Inductor, by fp8compile, or not at all.

    inductor     torch.compile(model)
    fp8compile   torch.compile(model, backend="fp8compile", options={...})
    eager        model

With --precision fp16 the arms are ways to scale the loss (``loss_scales``): "fp32" is compiled like the first of these and
runs in FP32; all the others are compiled like the second and run in FP16.

The gap compares an arm with "inductor", or with "fp32". Validation never uses a compiled model: each arm is judged by the
eager module that shares its weights, so that a gap measures training and nothing else.
"""

from __future__ import annotations

REFERENCE = "inductor"
OURS = "fp8compile"
EAGER = "eager"
ARMS = (REFERENCE, OURS, EAGER)
FP32, DYNAMIC, HISTOGRAM = "fp32", "dynamic", "histogram"
STATIC = {"static 1": 2.0**0, "static 2^7": 2.0**7, "static 2^15": 2.0**15, "static 2^22": 2.0**22}
SCALED_ARMS = (*STATIC, DYNAMIC, HISTOGRAM)
FP16_ARMS = (FP32, *SCALED_ARMS)


def compiler_of(arm: str) -> str:
    """Which of ``ARMS`` an arm is compiled like."""
    return arm if arm in ARMS else OURS if arm in SCALED_ARMS else REFERENCE
