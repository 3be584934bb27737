"""Which modules to leave exact so that all gradients are above the bar: found by encoding parts of the model alone.

    candidate     (module path, "saved" | "linears"): the tensors made in that module and stored as codes, or its FP8 linear:
                  what a recipe can name
    E_p(S)        |g - g'|^2 of parameter p when only the candidates S are encoded
    prediction    E_p(S + T) = E_p(S) + E_p(T): errors that are small beside the gradient add as vectors, and those of
                  different tensors have no common direction. Only a guide: what is returned has been run

The group with the largest E_p(S) relative to what p may have is halved, in the order of the graph, and each half is encoded
alone, until it is a single candidate, which is left exact. When the rest is predicted to be within bounds, it is run; if that
fails, the next largest group is halved. Then each choice is undone once, smallest first, and stays undone if all is well.
k causes among n candidates take about 2 k log2(n) + k steps. After ``most`` steps the groups that are too large are left
exact as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fp8compile.numerics.gradient_quality import GradientJudge
from fp8compile.reporting.compiled_graph import GraphReport

SAVED, LINEAR = "saved", "linears"
Errors = Mapping[str, float]


@dataclass(frozen=True)
class RepairCandidate:
    """What can be left exact in one module: its encoded tensors, or its FP8 linears."""

    module: str
    kind: str  # SAVED or LINEAR

    def __str__(self) -> str:
        what = "encoded tensors" if self.kind == SAVED else "FP8 linear"
        return f"{what} of {self.module or 'the model itself'}"


@dataclass
class CandidateGroup:
    """Candidates next to each other in the graph, and the errors when they alone are encoded."""

    members: tuple[RepairCandidate, ...]
    errors: Errors


Measure = Callable[[frozenset[RepairCandidate]], tuple[Errors, tuple[GraphReport, ...]]]


def candidates_of(reports: Iterable[GraphReport]) -> dict[RepairCandidate, list[str]]:
    """What is encoded, in the order of the graphs, with the tensors and matmuls behind each."""
    found: dict[RepairCandidate, list[str]] = {}
    for report in reports:
        for saved in report.notes.saved:
            text = f"{saved.origin.op} {saved.info} at {saved.origin.source or '-'}, {saved.codec}"
            found.setdefault(RepairCandidate(saved.origin.module, SAVED), []).append(text)
        for linear in report.notes.linears:
            text = f"{linear.direction} {linear.M} x {linear.K} x {linear.N}, {linear.formats}"
            found.setdefault(RepairCandidate(linear.origin.module, LINEAR), []).append(text)
    return found


@dataclass
class Search:
    """Looks for a small set of candidates that, left exact, brings every gradient above the bar.

    Attributes:
        judge: tells which errors are too large.
        measure: runs a step in which these candidates are exact; returns its errors and reports.
        most: how many steps may be run to find the set; verifying it, and one last resort, come on top.
        alone: the errors of each candidate that was encoded by itself.
        minimal: whether each member of the result is known to be needed.
    """

    judge: GradientJudge
    measure: Measure
    most: int
    alone: dict[RepairCandidate, Errors] = field(default_factory=dict)
    steps: int = 0
    minimal: bool = False
    everything: list[RepairCandidate] = field(default_factory=list)

    def run(
        self, candidates: Sequence[RepairCandidate], errors: Errors
    ) -> tuple[list[RepairCandidate], Errors] | None:
        """The candidates to leave exact, and the errors then; None if the gradients fail with every candidate exact."""
        self.everything = list(candidates)
        kinds = [tuple(c for c in candidates if c.kind == kind) for kind in (SAVED, LINEAR)]
        parts = [part for part in kinds if part]
        whole = tuple(candidates)
        groups = [CandidateGroup(whole, errors)] if len(parts) == 1 else [self._alone(part) for part in parts]
        failing, chosen = set(self.judge.failing(errors)), list[RepairCandidate]()
        while True:
            if not self._predicted(groups, failing):
                left = self._try(chosen, groups)
                if not self.judge.failing(left):
                    return self._minimal(chosen, left)
                failing |= set(self.judge.failing(left))
                if groups and self.steps > self.most:  # the prediction was wrong; no steps are left to learn where
                    chosen += [member for group in groups for member in group.members]
                    groups = []
                    continue
            if not groups:
                return None
            self._take(groups, chosen, failing)

    def _take(self, groups: list[CandidateGroup], chosen: list[RepairCandidate], failing: set[str]) -> None:
        """Halve the largest group, or leave it exact: as a single candidate, or whole where the steps are spent."""
        worst = max(groups, key=lambda group: self._excess(group.errors, failing))
        groups.remove(worst)
        if len(worst.members) == 1 or self.steps >= self.most:
            chosen += worst.members
            return
        middle = len(worst.members) // 2
        groups += [self._alone(half) for half in (worst.members[:middle], worst.members[middle:])]

    def _alone(self, members: tuple[RepairCandidate, ...]) -> CandidateGroup:
        errors, _ = self._step(set(self.everything) - set(members))
        if len(members) == 1:
            self.alone[members[0]] = errors
        return CandidateGroup(members, errors)

    def _try(self, chosen: Iterable[RepairCandidate], groups: list[CandidateGroup]) -> Errors:
        """Run a step with ``chosen`` exact. Candidates that are encoded only now, instead of these, become a group."""
        errors, reports = self._step(set(chosen))
        if new := [c for c in candidates_of(reports) if c not in self.everything]:
            self.everything += new
            groups.append(CandidateGroup(tuple(new), errors))
        return errors

    def _step(self, exact: set[RepairCandidate]) -> tuple[Errors, tuple[GraphReport, ...]]:
        self.steps += 1
        return self.measure(frozenset(exact))

    def _minimal(self, chosen: list[RepairCandidate], errors: Errors) -> tuple[list[RepairCandidate], Errors]:
        """``chosen`` without the candidates that are not needed, as far as the steps last."""
        if len(chosen) == 1:
            self.minimal = True
            return chosen, errors
        for candidate in sorted(chosen, key=lambda c: self._excess(self.alone.get(c, {}), self.judge.allowed)):
            if self.steps >= self.most:
                return chosen, errors
            fewer = [c for c in chosen if c is not candidate]
            without, _ = self._step(set(fewer))
            if not self.judge.failing(without):
                chosen, errors = fewer, without
        self.minimal = True
        return chosen, errors

    def _predicted(self, groups: Iterable[CandidateGroup], failing: set[str]) -> bool:
        """Whether what is still encoded is expected to be too much for any of these parameters."""
        sums = {name: sum(group.errors[name] for group in groups) for name in failing}
        return any(error > self.judge.allowed[name] for name, error in sums.items())

    def _excess(self, errors: Errors, names: Iterable[str]) -> float:
        """The largest error as a multiple of what is allowed."""
        return max((_ratio(errors.get(name, 0.0), self.judge.allowed[name]) for name in names), default=0.0)


def _ratio(error: float, allowed: float) -> float:
    if allowed == 0:
        return float("inf") if error else 0.0
    return error / allowed
