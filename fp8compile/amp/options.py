"""The options of a loss scaler, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from fp8compile._arguments import FLAGS, check_one_of, is_count, is_number
from fp8compile._messages import nearest
from fp8compile.amp.collapse import Limits
from fp8compile.amp.policies import Dynamic, Histogram, Policy, Static
from fp8compile.amp.watching import KINDS, check_are_patterns, check_kinds
from fp8compile.numerics.histogram import THRESHOLD

HISTOGRAM, DYNAMIC, STATIC = MODES = ("histogram", "dynamic", "static")
STARTS = {HISTOGRAM: 1.0, DYNAMIC: 2.0**16, STATIC: 2.0**10}
INTERVALS = {HISTOGRAM: 64, DYNAMIC: 2000, STATIC: 1}
BOUNDS = {HISTOGRAM: (2.0**-24, 2.0**24), DYNAMIC: (0.0, math.inf), STATIC: (0.0, math.inf)}
FP16_POWER = 2.0**15  # the largest power of two that FP16 has
NO_FP16 = (
    "no gradient behind the loss is FP16, so there is nothing to scale: the loss scaler does nothing. (BF16 and FP32 have "
    "the range; mode='static' scales all the same.)"
)
CAPPED_WARNING = (
    "the loss is FP16, whose gradient is the loss scale itself: its ceiling is now %g instead of %g; compute "
    "it in FP32"
)


# The modes in which an option has an effect, where these are not all.
ONLY_IN = {
    "growth_factor": (DYNAMIC,),
    "backoff_factor": (DYNAMIC,),
    "growth_interval": (HISTOGRAM, DYNAMIC),
    "period": (HISTOGRAM,),
    "threshold": (HISTOGRAM,),
}


@dataclass(frozen=True)
class ScalerOptions:
    """The options of ``LossScaler``; see there. Raises ValueError for one that makes no sense, and says what to do."""

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
        check_one_of("mode", self.mode, MODES)
        self._check_types()
        low, high = self.bounds
        if not 0 <= low <= high:
            raise ValueError(f"floor={low} and ceiling={high}: 0 <= floor <= ceiling is needed")
        if not 0 < self.start < math.inf or not low <= self.start <= high:
            raise ValueError(f"init_scale={self.start} must be positive, finite and within [floor, ceiling] = "
                             f"[{low}, {high}]")  # fmt: skip
        if not (1 < self.growth_factor < math.inf and 0 < self.backoff_factor < 1):
            raise ValueError(f"growth_factor={self.growth_factor} must be above 1 and finite, "
                             f"backoff_factor={self.backoff_factor} between 0 and 1")  # fmt: skip
        for name, value in (("period", self.period), ("growth_interval", self.interval)):
            if not is_count(value) or value < 1:
                raise ValueError(f"{name}={value!r}: a number of updates, 1 or more")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold={self.threshold}: a fraction of all gradients, such as 1e-7")
        check_kinds(self.kinds)
        check_are_patterns(self.modules)
        self._check_effects()

    def _check_types(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "threshold", "floor", "ceiling"):
            value = getattr(self, name)
            optional = name in ("init_scale", "floor", "ceiling")
            if not is_number(value) and not (value is None and optional):
                cure = "a tensor's is value.item()" if isinstance(value, torch.Tensor) else "as 2.0**10 is one"
                raise ValueError(f"{name}={value!r}: a number{' or None' if optional else ''} is needed; {cure}")

    def _check_effects(self) -> None:
        """Raises ValueError for an option of another mode that differs from its default."""
        defaults = {each.name: each.default for each in fields(self)}
        for name, modes in ONLY_IN.items():
            value = getattr(self, name)
            if value != defaults[name] and self.mode not in modes:
                named = " or ".join(map(repr, modes))
                raise ValueError(f"{name}={value!r} has no effect with mode={self.mode!r}: set mode={named}, or leave "
                                 f"{name} out")  # fmt: skip

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

    def for_fp16_loss(self) -> ScalerOptions:
        """These options with a ceiling that FP16 can represent: the gradient of a loss is the scale, in the loss's dtype."""
        low, high = self.bounds
        return replace(self, init_scale=min(self.start, FP16_POWER), floor=low, ceiling=min(high, FP16_POWER))


def check_are(
    collapse: object, limits: object, process_group: object, enabled: object, options: Mapping[str, Any]
) -> None:
    """Raises ValueError for an argument of a type that LossScaler does not take, and for options that do not exist."""
    check_one_of("enabled", enabled, FLAGS)
    check_one_of("collapse", collapse, (*FLAGS, None))
    if not (limits is None or isinstance(limits, Limits)):
        raise ValueError(f"limits={limits!r}: fp8compile.amp.Limits(warmup=..., halvings=...) or None is needed")
    if not (process_group is None or (dist.is_available() and isinstance(process_group, dist.ProcessGroup))):
        raise ValueError(f"process_group={process_group!r}: what torch.distributed.new_group() returns is needed, or None "
                         "for all ranks")  # fmt: skip
    known = [each.name for each in fields(ScalerOptions)]
    for name in options:
        if name not in known:
            raise ValueError(f"LossScaler has no option {name!r}.{nearest(name, known)}")
