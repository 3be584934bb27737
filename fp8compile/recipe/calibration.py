"""The measurements of a model's 16-bit values over a few steps: a plain file, part of the recipe and of the cache key.

    a value fits   2**-14 * headroom <= amax <= 65504 / headroom: FP16 holds it at full precision, with room on both
                   sides; or amax == 0
    a gradient     the same for amax * S: a loss scale moves all gradients at once, so only a gradient that no single scale
                   fits is unsafe. S is the power of two that brings the median of their amax nearest 1
    BF16           always fits: its range is FP32's

A graph is recognised by its 16-bit operations in order, each with its module, direction and dtype. Shapes may differ, and so
may views and the names of nodes, which symbolic shapes shift. ``fp8compile/tools/calibrate.py`` takes the measurements.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass

import torch

from fp8compile.fx.aot import BACKWARD
from fp8compile.numerics.formats import FP16_MAX, FP16_NORMAL
from fp8compile.recipe.in_a_file import InAFile

FORMAT = 1
TRAINING, INFERENCE = "training", "inference"
LIMITS = {
    "headroom": (
        1.0,
        (FP16_MAX / FP16_NORMAL) ** 0.5,
        "how often a value goes into FP16's range; beyond, nothing fits. Default: 8",
    ),
    "loss_scale": (0.0, float("inf"), "what the loss is multiplied by in training"),
}
RECALIBRATE = "Calibrate again: fp8compile.calibrate(model, batches)"
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class CalibratedValue:
    """One 16-bit value of a graph.

    Attributes:
        name: the node's name in the graph that was measured.
        op, module, source: the aten operation, the path of its module, the user's source line.
        direction: "backward" for what depends on an incoming gradient, else "forward".
        dtype: "f16" or "bf16".
        amax: the largest finite magnitude, computed in FP32, over all batches; for a gradient, at loss scale 1.
    """

    name: str
    op: str
    module: str
    source: str
    direction: str
    dtype: str
    amax: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.amax < float("inf"):
            raise ValueError(f"amax={self.amax!r} of {self} is no magnitude; calibrate with data that is finite.")

    @property
    def key(self) -> Key:
        """The key by which another compilation of the model recognises it."""
        return self.op, self.module, self.direction, self.dtype

    def __str__(self) -> str:
        return f"{self.name} = {self.op} of {self.module or 'the model'} ({self.direction}, {self.dtype})"


@dataclass(frozen=True)
class Measurements:
    """The values of one graph in its order; ``kind`` is "training" or "inference"."""

    kind: str
    values: tuple[CalibratedValue, ...]

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """The keys by which the graph is recognised."""
        return tuple(value.key for value in self.values)


@dataclass(frozen=True)
class Calibration(InAFile):
    """What ``fp8compile.calibrate`` has measured: a value for ``Recipe.fp32.islands``, a plain file by ``save`` and ``load``.

    Attributes:
        graphs: the measurements, in the order in which the graphs were compiled.
        headroom: how far from the ends of FP16's range a value must stay; ``dataclasses.replace`` may change it.
        loss_scale: the loss scale S that gradients are judged at: what to train with, or to start from.
        keep_fp32, modules: what the recipe kept in FP32 when the calibration was made: ``Recipe.fp32.keep``, and the value
            for each pattern in ``Recipe.modules`` that differs from it.
        torch: the version of torch that it was made with.
    """

    KIND = "calibration"
    AGAIN = RECALIBRATE

    graphs: tuple[Measurements, ...]
    headroom: float = 8.0
    loss_scale: float = 1.0
    keep_fp32: tuple[str, ...] = ()
    modules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    torch: str = torch.__version__.partition("+")[0]

    def __post_init__(self) -> None:
        for name, (low, high, what) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not low < value < high:
                raise ValueError(f"{name}={value!r} must be a number above {low:g} and below {high:g}: {what}.")
            object.__setattr__(self, name, float(value))

    def overflow_reason(self, value: CalibratedValue) -> str | None:
        """Why a value does not fit FP16, None if it does."""
        scale = self.loss_scale if value.direction == BACKWARD else 1.0
        amax = value.amax * scale
        if value.dtype != "f16" or amax == 0 or FP16_NORMAL * self.headroom <= amax <= FP16_MAX / self.headroom:
            return None
        measured = f"amax {amax:.2g} measured" + (f" at loss scale {scale:g}" if value.direction == BACKWARD else "")
        if amax > 1:
            near = "above" if amax > FP16_MAX else f"less than {self.headroom:g} times below"
            return f"{measured}: {near} FP16's {FP16_MAX:.0f}"
        near = "below" if amax < FP16_NORMAL else f"less than {self.headroom:g} times above"
        return f"{measured}: {near} 2**-14, where FP16 loses bits"

    @functools.cached_property
    def text(self) -> str:
        """What ``save`` writes: JSON, a value a line. Equal calibrations have equal texts."""
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "graphs"}
        head = {"format": FORMAT, **head, "modules": dict(self.modules)}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        graphs = []
        for graph in self.graphs:
            values = ",\n".join(f"   {json.dumps(dataclasses.asdict(value))}" for value in graph.values)
            graphs.append(f'  {{"kind": {json.dumps(graph.kind)}, "values": [\n{values}\n  ]}}')
        return "{\n " + ",\n ".join(lines) + ',\n "graphs": [\n' + ",\n".join(graphs) + "\n ]\n}\n"

    @classmethod
    def from_text(cls, text: str, where: str = "this text") -> Calibration:
        """The calibration that ``text`` holds; ``where`` is what errors call it.

        Raises:
            ValueError: it holds none, or one of another version of torch or of the file format.
        """
        try:
            found = json.loads(text)
            made_by = {"format": found.pop("format"), "torch": found["torch"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{where} is no calibration of fp8compile. {RECALIBRATE}.save(path).") from None
        for name, ours in (("format", FORMAT), ("torch", cls.torch)):
            if made_by[name] != ours:
                raise ValueError(
                    f"{where} was made with {name} {made_by[name]}, and this is {name} {ours}: graphs may differ. "
                    f"{RECALIBRATE}.save(path)."
                )
        try:
            graphs = [
                Measurements(g["kind"], tuple(CalibratedValue(**v) for v in g["values"])) for g in found.pop("graphs")
            ]
            found["modules"] = tuple((pattern, tuple(kept)) for pattern, kept in found["modules"].items())
            return cls(tuple(graphs), **{**found, "keep_fp32": tuple(found["keep_fp32"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is no whole calibration: {error}. {RECALIBRATE}.save(path).") from None

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Calibration({self.digest}, {len(self.graphs)} graphs, headroom={self.headroom:g})"
