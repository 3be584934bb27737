"""Times of kernels that were read on a card, by the rows of the benchmarks that time the same kernels.

    codecs and casts   ``kernel encode int8`` ... of 16384 x 4096           the fastest of 30 calls
    matmuls            ``matmul MxKxN TFLOP/s``                             2 M K N / the rate of the median of 20
    optimizers         ``optimizer``, 256M BF16 parameters, ours and peers  the fastest of 20 steps

Facts are those of a first contact (benchmarks/first/facts.py). What was read has no cold L2 cache; of these sizes nothing
would be in it. Where the host took as long for a call as events around it tell, the device may have waited for it, and took
no longer than that: such a time is ``HOST_BOUND``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.results import key_of

HOST_BOUND = "host_bound"
Where = tuple[str, str, str, str]  # benchmark, case, arm, lap
SHAPE, STEP = "16384x4096", "256M bfloat16"
CODECS: Mapping[str, Where] = {
    **{
        f"kernel {lap} {codec}": ("group_codecs", f"{SHAPE} {codec}", "ours", lap)
        for codec in ("int8", "e4m3")
        for lap in ("encode", "decode")
    },
    "kernel cast transpose amax": ("cast_transpose", SHAPE, "ours, scale known", "cast"),
    "kernel amax": ("amax", SHAPE, "ours", "amax"),
}
PRODUCTS = {
    "bf16": "bf16 products",
    "fp8 slow": "fp8 products",
}  # of a product that accumulates in FP32, as benchmarks do
OPTIMIZERS = {"fused": "torch fused", "ao_fp8": "torchao fp8", "ao_8bit": "torchao 8bit", "flash": "flashoptim"}
CARD_JOBS = ("card", "env")
CARD = {  # a fact, its figure, and what it is a second
    "copy": ("copy", "gb_s", 1e9),
    "bf16 matmul": ("bf16", "tflops", 1e12),
    "fp8 matmul fast=True": ("fp8", "tflops", 1e12),
}
REWRITTEN = {"34b1c85": (("optimizer_step", "ours"),)}  # by commit, whose kernels are others since: benchmark, arm


@dataclass(frozen=True)
class Measured:
    """Rows of benchmarks as a results file holds them.

    Attributes:
        where: device, versions, commit.
        rows: by "benchmark: case".
        rewritten: benchmarks and beginnings of arms whose kernels were others then.
        few: it holds some rows alone.
    """

    where: str
    rows: Mapping[str, Mapping[str, Any]]
    rewritten: Sequence[tuple[str, str]] = ()
    few: bool = False

    def lap(self, benchmark: str, case: str, arm: str, lap: str) -> Mapping[str, Any]:
        """What was measured of a lap; nothing where it was not."""
        arms: Any = self.rows.get(key_of(benchmark, case), {}).get("arms", {})
        found: Mapping[str, Any] = arms.get(arm, {}).get(lap, {})
        return found

    def reached(self, benchmark: str, case: str) -> Mapping[str, float]:
        """What the card did beside a row: bytes and operations a second."""
        found: Mapping[str, float] = self.rows[key_of(benchmark, case)]["rates"]
        return found

    def is_of_other_kernels(self, benchmark: str, arm: str) -> bool:
        """Whether what was timed is not what is lowered now."""
        return any(benchmark == name and arm.startswith(prefix) for name, prefix in self.rewritten)


def read(
    where: str, commit: str, facts: Sequence[Mapping[str, Any]], prices: Sequence[Mapping[str, Any]]
) -> Measured:
    """The rows that facts tell; matmuls are found by the shapes of ``prices``."""
    rates = {name: fact[key] * unit for fact in facts for name, key, unit in _card(fact)}
    rows: dict[str, Any] = collections.defaultdict(lambda: {"arms": collections.defaultdict(dict), "rates": rates})
    for (benchmark, case, arm, lap), found in _times(facts, prices):
        rows[key_of(benchmark, case)]["arms"][arm][lap] = found
    return Measured(where, rows, REWRITTEN.get(commit, ()), few=True)


def _card(fact: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    if fact["job"] in CARD_JOBS and fact["what"] in CARD:
        yield CARD[fact["what"]]


def _times(
    facts: Iterable[Mapping[str, Any]], prices: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Where, Mapping[str, Any]]]:
    shapes = {tuple(row["shape"].values()): row["case"] for row in prices if row["benchmark"] == "linear"}
    for fact in facts:
        if fact["what"] in CODECS and "min_ms" in fact:
            yield CODECS[fact["what"]], _fastest(fact)
        if fact["what"] == "optimizer":
            name = fact["job"].removeprefix("opt-")
            yield ("optimizer_step", STEP, OPTIMIZERS.get(name, f"ours {name}"), "step"), _fastest(fact)
        if fact["what"].startswith("matmul "):
            yield from _products(fact, shapes)


def _fastest(fact: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fastest call; the host's time is the mean of all but the longest, which may have compiled."""
    calls = fact["n"]
    of_host = (fact["enqueue_ms"] * calls - fact["max_ms"]) / (calls - 1)
    return {"seconds": fact["min_ms"] / 1e3, HOST_BOUND: of_host >= fact["min_ms"]}


def _products(
    fact: Mapping[str, Any], shapes: Mapping[tuple[Any, ...], str]
) -> Iterator[tuple[Where, Mapping[str, Any]]]:
    m, k, n = map(int, fact["what"].split()[1].split("x"))
    for name, arm in PRODUCTS.items():
        if (m, k, n) in shapes and isinstance(fact[name], (int, float)):
            yield ("linear", shapes[m, k, n], arm, "forward"), {"seconds": 2 * m * k * n / fact[name] / 1e12}
