"""The loss scale that histogram mode should come to."""

from __future__ import annotations

from fp8compile.observe.records import Observations


def expected_scale(observations: Observations, scale: float) -> float:
    """By the text of the issue, from the rows of one step."""
    h1 = h2 = 0.0
    for row, (small, large, inf, nan, *_) in zip(
        observations.rows, observations.history[-1][1].tolist(), strict=True
    ):
        if row.direction == "backward":
            h1, h2 = h1 + small, h2 + large + inf + nan
    return scale if h1 + h2 == 0 else scale / 2 if h2 / (h1 + h2) > 1e-7 else scale * 2
