"""What a whole step has done, as numbers and as lines of text."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile._text import human


@dataclass(frozen=True)
class WholeStep:
    """What ``TrainStep.summary`` says.

    Attributes:
        reason: why forward, backward and step run by themselves; None where they are one graph.
        compilations: how many whole steps were compiled: one, as long as shapes and options stay.
        updated, parameters: how many parameters the last of them updates, and how many the optimizer has.
        gradient_bytes: of all gradients that it makes.
        gradient_peak: bytes of those alive at one time, by the order of the graph.
        clip_norm: as given.
        codes: of how many weights that it updates the graph takes codes with its inputs (``Recipe.linears.cache_weights``).
        coded: of how many of them its updates write the codes of the new weight.
        not_coded: why they write none of a weight, the first reason.
    """

    reason: str | None
    compilations: int
    updated: int
    parameters: int
    gradient_bytes: int
    gradient_peak: int
    clip_norm: float | None = None
    codes: int = 0
    coded: int = 0
    not_coded: str | None = None

    @property
    def is_one_graph(self) -> bool:
        return self.reason is None and self.compilations > 0

    def __str__(self) -> str:
        if self.reason is not None:
            return f"forward, backward and step run by themselves: {self.reason}"
        if not self.compilations:
            return "nothing was compiled yet"
        share = self.gradient_peak / max(1, self.gradient_bytes)
        lines = [
            f"forward, backward and update are one graph, compiled {self.compilations} time"
            f"{'s' * (self.compilations != 1)}; it updates {self.updated} of the optimizer's {self.parameters} parameters",
            f"gradients: at most {human(self.gradient_peak)} of {human(self.gradient_bytes)} are alive at one time "
            f"({share:.0%}), by the order of the graph",
        ]
        if self.clip_norm is not None:
            lines.append(f"clip_norm={self.clip_norm:g}: all gradients are alive when their norm is known")
        if self.codes:
            lines.append(
                f"codes of {self.coded} of {self.codes} weights are written by their updates"
                + (f"; the others are made anew between steps: {self.not_coded}" if self.not_coded else "")
            )
        return "\n".join(lines)
