"""What is run, most wanted first: kinds of arms, and the list of a lease of nine minutes, then of one of four.

An arm is written as words, ``layer default 7b``; variables of its environment stand before a ``!``:
``LAYERS=2!ncu vit default``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Of arms.

    Attributes:
        module: of ``benchmarks.first`` that holds ``run``.
        compiling_gib: what it may take on the device until it is compiled.
        held_gib: and while it waits to be timed. None: it is not timed, and does not wait.
        seconds: that being timed takes, about (read on an H200).
    """

    module: str
    compiling_gib: float
    held_gib: float | None
    seconds: float = 0.0


KINDS = {
    "card": Kind("card", 4, None),
    "layer": Kind("layer", 9, 2, 8),
    "train": Kind("training", 12, 5, 8),
    "big": Kind("training", 70, 56, 25),
    "opt": Kind("optimizers", 4, 3, 4),
    "kernels": Kind("codecs", 3, 1, 6),
    "setup": Kind("setups", 14, 2, 12),
    "ncu": Kind("under_ncu", 14, 3, 50),
    "right": Kind("right", 3, None),
    "nan": Kind("finite", 9, None),
    "check": Kind("rows", 9, None),
    "trial": Kind("trial", 0, 0),
}


@dataclass(frozen=True)
class Arm:
    """One process.

    Attributes:
        words: its kind and its arguments.
        variables: of its environment.
    """

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, text: str) -> Arm:
        """An arm as it is written in a plan.

        Raises:
            ValueError: there is no such kind, or a variable without a value.
        """
        before, _, rest = text.rpartition("!")
        words = tuple(rest.split())
        if not words or words[0] not in KINDS:
            raise ValueError(f"{text!r} is no arm. Fix: begin with one of {', '.join(KINDS)}.")
        if wrong := [each for each in before.split() if "=" not in each]:
            raise ValueError(f"{wrong[0]!r} of {text!r} sets no variable. Fix: NAME=VALUE before the '!'.")
        return cls(words, tuple((name, value) for name, _, value in (each.partition("=") for each in before.split())))

    @property
    def kind(self) -> Kind:
        """What it is."""
        return KINDS[self.words[0]]

    @property
    def name(self) -> str:
        """In facts and files."""
        return "-".join((*self.words, *(f"{name.lower()}{value}" for name, value in self.variables))).replace(
            "/", "_"
        )


FIRST: Sequence[str] = (
    "card",
    *(
        f"setup {name} {way}"
        for name in ("resnet50", "vit", "gpt2", "llama", "ckpt")
        for way in ("inductor", "default")
    ),
    "setup vit codes",
    *(f"layer {way} 7b" for way in ("inductor", "default", "speed", "linears", "torchao")),
    *(f"opt {name}" for name in ("fused", "e4m3_expanded", "int8_companded", "flash", "ao_fp8")),
    "check scaled",
    "big inductor fused",
    "big default ours",
    "big torchao fused",
    "nan delayed ours",
)
THEN: Sequence[str] = (
    *(f"setup {name} codes" for name in ("resnet50", "gpt2")),
    *(f"setup mixtral {way}" for way in ("inductor", "default")),
    *(f"layer {way} {size}" for size in ("8b1", "8b") for way in ("inductor", "default", "torchao")),
    "kernels",
    "ncu resnet50 default",
    "ncu layer7b default",
)
TINY: Sequence[str] = (
    "card",
    "layer inductor 7b",
    "layer default 7b",
    "opt fused",
    "opt e4m3_expanded",
    "opt flash",
    "setup resnet50 default",
)
"""Of a CPU: a way through each room, two of them by peers that need not be there."""

PLANS = {"first": FIRST, "then": THEN, "tiny": TINY}


def arms(texts: Sequence[str]) -> list[Arm]:
    """The arms of a plan; no two may share a name, by which facts are told apart."""
    found = [Arm.of(text) for text in texts]
    if len({arm.name for arm in found}) != len(found):
        raise ValueError("The plan names an arm twice. Fix: leave one of them out.")
    return found
