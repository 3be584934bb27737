"""What a loss scaler can be told, and its checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8compile.amp.policies import Dynamic, Histogram, Policy, Static
from fp8compile.amp.watching import KINDS, check_kinds
from fp8compile.numerics.histogram import THRESHOLD

HISTOGRAM, DYNAMIC, STATIC = MODES = ("histogram", "dynamic", "static")
STARTS = {HISTOGRAM: 1.0, DYNAMIC: 2.0**16, STATIC: 2.0**10}
INTERVALS = {HISTOGRAM: 64, DYNAMIC: 2000, STATIC: 1}
BOUNDS = {HISTOGRAM: (2.0**-24, 2.0**24), DYNAMIC: (0.0, math.inf), STATIC: (0.0, math.inf)}
FP16_POWER = 2.0**15  # the largest that FP16 has


@dataclass(frozen=True)
class Options:
    """Of ``LossScaler``; see there. Raises ValueError for what makes no sense, with the cure."""

    mode: str = HISTOGRAM
    init_scale: float | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | None = None
    period: int = 1
    threshold: float = THRESHOLD
    floor: float | None = None
    ceiling: float | None = None
    kinds: Sequence[str] = KINDS
    modules: Sequence[str] = ("*",)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: one of {', '.join(map(repr, MODES))}")
        low, high = self.bounds
        if not 0 < self.start < math.inf or not low <= self.start <= high:
            raise ValueError(f"init_scale={self.start} must be positive, finite and within [floor, ceiling] = "
                             f"[{low}, {high}]")  # fmt: skip
        if not (self.growth_factor > 1 and 0 < self.backoff_factor < 1):
            raise ValueError(f"growth_factor={self.growth_factor} must be above 1, backoff_factor={self.backoff_factor} "
                             "between 0 and 1")  # fmt: skip
        for name in ("period", "growth_interval"):
            value = getattr(self, name) if name == "period" else self.interval
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: a number of updates, 1 or more")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold={self.threshold}: a fraction of all gradients, such as 1e-7")
        check_kinds(self.kinds)

    @property
    def start(self) -> float:
        return STARTS[self.mode] if self.init_scale is None else float(self.init_scale)

    @property
    def interval(self) -> int:
        return INTERVALS[self.mode] if self.growth_interval is None else self.growth_interval

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = BOUNDS[self.mode]
        return low if self.floor is None else self.floor, high if self.ceiling is None else self.ceiling

    def policy(self) -> Policy:
        """The rule of the mode."""
        low, high = self.bounds
        if self.mode == HISTOGRAM:
            return Histogram(self.period, low, high, self.threshold, self.interval)
        if self.mode == DYNAMIC:
            return Dynamic(self.growth_factor, self.backoff_factor, self.interval, low, high)
        return Static(low, high)

    def for_fp16_loss(self) -> Options:
        """With a ceiling that FP16 can represent: the gradient of a loss is the scale, in the loss's dtype."""
        low, high = self.bounds
        return replace(self, init_scale=min(self.start, FP16_POWER), floor=low, ceiling=min(high, FP16_POWER))
