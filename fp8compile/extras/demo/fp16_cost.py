"""FP16 on a CPU without FP16 arithmetic: the demo would take hours, so it begins only on request.

    refused    if the training would take more than 20 minutes: the step timed by ``precision``, scaled to all bytes
    reason     no FP16 arithmetic, where a step in FP16 takes more than 4 times as long as one in FP32

A busy machine can hide the reason, since its FP32 steps are slow too; the refusal depends only on the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8compile.extras.demo.compiling import dtype_of
from fp8compile.extras.demo.estimate import clock
from fp8compile.extras.demo.precision import PROBE_TOKENS, Precision, probe_text

FAR_SLOWER = 4.0
LONG_S = 20 * 60.0


class TooSlow(RuntimeError):
    """This CPU would compute for hours; the message says why, and what can be done instead."""


def refuse_hours(precision: Precision, arms: Sequence[str], tokens: int) -> None:
    """Refuse to train ``arms`` in FP16 on a CPU that would take too long.

    Args:
        precision: holds the seconds of its probe; without any (a GPU, another dtype) nothing is refused.
        arms: the arm of every run, once for each seed.
        tokens: bytes that each run trains on.

    Raises:
        TooSlow: the message has the measured times, the estimate and the ways out.
    """
    times = precision.probe_seconds
    if "float16" not in times:
        return
    seconds = sum(times[str(dtype_of(arm)).removeprefix("torch.")] for arm in arms) * tokens / PROBE_TOKENS
    if seconds > LONG_S:
        emulated = times["float16"] > FAR_SLOWER * times["float32"]
        why = "This CPU computes FP16 without FP16 arithmetic" if emulated else "This CPU is slow, or busy"
        raise TooSlow(
            f"--precision fp16 would take about {clock(seconds)} here (an estimate). {why}: "
            f"{probe_text(times)}.\n"
            "Ways out: a machine with a GPU, or a CPU with FP16 arithmetic (AVX512-FP16, AMX-FP16); fewer arms and "
            "steps, as --arms fp32,histogram --steps 20; --tiny, a toy model in FP16; --precision auto, "
            "the demo without loss scaling. --slow trains all the same."
        )
