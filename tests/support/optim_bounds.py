"""How far two computations of one optimizer step may lie apart, in FP32; u = 2**-24 is half an ulp, relatively."""

from __future__ import annotations

import math

U = 2.0**-24


def adam_off_by(step: int, betas: tuple[float, float]) -> float:
    """Of Adam's update at this step, in units of lr, by two libraries that start from the same states.

    update = m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps)

    A gradient of age a has left (1 - b2) b2**a g**2 or more in v, so with a < t all of them, hence |m| / (1 - b1**t), are at
    most ``largest`` = sqrt((1 - b2**t) / (1 - b2)) / b2**((t - 1) / 2) times the root, and so is the update.

    m        3 roundings, of parts no larger than |m| + |g|: 2 largest * 3 u, over 1 - b1**t
    others   one after the other, all parts positive: a dozen, 12 u of the update
    b**t     a library may be an ulp off, 2 u below 1: 2 u / (1 - b1**t), and half as much for b2, under the root

    Each of the two may be as far from the truth.
    """
    rest1, rest2 = (1 - beta**step for beta in betas)
    largest = math.sqrt(rest2 / (1 - betas[1])) / betas[1] ** ((step - 1) / 2)
    return 2 * U * largest * (6 / rest1 + 12 + 2 / rest1 + 1 / rest2)
