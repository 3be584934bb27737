"""The most memory that forward and backward have alive at one time, for a model of several graphs.

    forward of a graph     what the graphs before it keep, and its own most
    backward of a graph    what the graphs before it still keep, its own most, and the gradients that the backwards of the
                           graphs behind it have made

Backwards run in the reverse order of forwards. Bytes of the caller's tensors are counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peaks:
    """Bytes of one graph: the most alive in its forward and in its backward, kept values and gradients made in it included,
    and the gradients of parameters that its backward leaves."""

    forward: int = 0
    backward: int = 0
    gradients: int = 0


@dataclass
class GeneratedPeaks:
    """The same out of the generated code.

    Attributes:
        halves: bytes by half, and those that its backward counts as ``kept`` for it. A backward's are known when it has been
            generated, at its first run.
    """

    halves: dict[str, int] = field(default_factory=dict)

    def instead_of(self, estimate: Peaks, kept: int) -> Peaks:
        """What is known of it; the estimate until both halves are known.

        Code does not say which saved tensors are views of one storage, or of the caller's. So the estimate stands too where
        what the backward counts is not what is ``kept``.
        """
        if not {"forward", "backward"} <= self.halves.keys() or self.halves.get("kept") != kept:
            return estimate
        return Peaks(self.halves["forward"], self.halves["backward"], estimate.gradients)


def most_running(graphs: Sequence[tuple[Peaks, int]], all_gradients: int) -> int:
    """The most alive in a step, of the graphs' calls in the order of their forwards, each with the bytes it keeps.

    ``all_gradients`` are those of the model: shared parameters have one gradient, whichever backwards add to it.
    """
    most = before = after = 0
    for peaks, kept in graphs:
        most = max(most, before + peaks.forward)
        before += kept
    for peaks, kept in reversed(graphs):
        before -= kept
        made = min(after, max(0, all_gradients - peaks.gradients))
        most = max(most, before + peaks.backward + made)
        after += peaks.gradients
    return most
