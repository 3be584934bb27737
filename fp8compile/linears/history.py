"""What a compiled graph with one set of parameters remembers of its operands: their last amaxes, and what they were clipped.

An entry of the history is one backward pass: with micro-batches, one micro-batch (as in Transformer Engine). A pass in which
an operand is all zeros is no entry of its. Nothing waits for a device but ``must_measure``. It asks whether the last backward
clipped too much, or left an operand unknown: an answer that was sent to the host when that backward ended.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.fx.provenance import parameter_names
from fp8compile.linears import growth
from fp8compile.linears.agreed import Since
from fp8compile.linears.known_scales import GRADIENT
from fp8compile.linears.sent import PendingBool
from fp8compile.numerics import E4M3, E5M2
from fp8compile.numerics.delayed import (
    AMAX,
    CLIPPED,
    COLUMNS,
    NON_FINITE,
    PATIENCE,
    entry_of,
    falls_back,
    grown_by,
    inv_scale_from,
    is_unknown,
    next_history,
    next_patience,
    or_amax_of_kind,
    without_zeros,
)
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Operand

MAX = {fmt.name: fmt.max for fmt in (E4M3, E5M2)}
SHOWN = 4  # names of operands in a warning
STARVED = (
    "delayed scaling: {} had no value but 0 in {} backward passes. So far the graph took all scales from its tensors, which "
    "is slow; from here on they are known ones. If a value comes, its first pass has the scale of the largest operand of its "
    "kind (inputs, weights, gradients); what is larger is clipped, and counted in fp8compile.tools.scaling_state(model). "
    "Recipe.linears.skip leaves such a linear out; linears.scaling='dynamic' clips nothing"
)


class Histories:
    """The amax histories of a graph's operands, and the scales that follow from them.

    Attributes:
        operands: what each row of the tensors below is about.
        amaxes: float32 ``[V, amax_history_len]``, newest first; 0 where there is none.
        entry: float32 ``[V]``, their amaxes in the last backward; 0 for no entry of the history.
        scales: float32 ``[rows, 4]``, what the graph takes: in column 0 an operand's inv_scale, in its row. NaN elsewhere, so
            that a scale that nobody measures cannot go unseen.
        totals: float32 ``[V, 3]``: over all steps, elements clipped, elements not finite, steps that fell back.
        entries: how many backward passes the history has seen.
        fell_back: bool ``[V]``, of which too much was clipped in the last backward.
        patience: how long it waits for operands that are unknown (``next_patience``).
        since: what it learned since ranks agreed last.
        parameters: weak references to the parameters of the graph; ``names`` are the graph's names of them.
    """

    def __init__(
        self,
        operands: Sequence[Operand],
        rows: int,
        recipe: Recipe,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        names: Iterable[str] = (),
    ) -> None:
        self.operands, self.recipe = tuple(operands), recipe
        self.parameters, self.names = tuple(map(weakref.ref, parameters)), tuple(names)
        self._rows = torch.tensor([o.row for o in operands], dtype=torch.int64, device=device)
        self._places = torch.tensor([o.place for o in operands], dtype=torch.int64, device=device)
        self._largest = torch.tensor([MAX[o.format] for o in operands], dtype=torch.float32, device=device)
        self.amaxes = torch.zeros(len(operands), recipe.linears.amax_history_len, dtype=torch.float32, device=device)
        roles = list(dict.fromkeys(o.role for o in operands))
        self._kinds = torch.tensor([roles.index(o.role) for o in operands], dtype=torch.int64, device=device)
        self.entry = self.amaxes[:, 0]
        late = sorted((o.order, i) for i, o in enumerate(operands) if o.role == GRADIENT)
        self._gradients = torch.tensor([i for _, i in late], dtype=torch.int64, device=device)
        self.patience = torch.tensor([0, PATIENCE], device=device)
        self._due = torch.zeros((), dtype=torch.bool, device=device)  # somebody fell back since a step measured
        self.scales = torch.full((rows, COLUMNS), torch.nan, dtype=torch.float32, device=device)
        self.totals = torch.zeros(len(operands), 3, dtype=torch.float32, device=device)
        self.entries, self._measured, self._said = 0, False, False
        self.fell_back = torch.zeros(len(operands), dtype=torch.bool, device=device)
        self.since = Since(self.amaxes, self.patience, self._due)
        self._measures_next = PendingBool(is_unknown(self.amaxes).any())
        _alive.append(weakref.ref(self, _alive.remove))
        for waiting in list(_waiting):
            waiting.offer(self)

    @property
    def paths(self) -> dict[int, str]:
        """By identity, the graph's name of each of its parameters that still exists."""
        named = zip(self.parameters, self.names, strict=True)
        return {id(p): name for ref, name in named if (p := ref()) is not None}

    def is_of(self, model: nn.Module) -> bool:
        """Whether its graph reads a parameter of ``model``."""
        return bool(self.paths.keys() & parameter_names(model).keys())

    def must_measure(self) -> bool:
        """Whether the next step must take its scales from its own tensors: too much was clipped, or an operand that is
        unknown is waited for."""
        measured, self._measured = self._measured, bool(self._measures_next)
        if measured and not self._measured and not self._said:
            self._say_who_starves()
        if self._measured:
            self._due = torch.zeros_like(self._due)
            self.since.measured()
        return self._measured

    def add(self, statistics: Tensor, scales: Tensor | None = None) -> None:
        """Take over what one backward returned, float32 ``[rows, 4]``; ``scales`` are those that its forward took, if others
        than those of now."""
        seen = statistics.index_select(0, self._places)
        fell_back = falls_back(seen)
        self.totals = self.totals + torch.stack([seen[:, CLIPPED], seen[:, NON_FINITE], fell_back.float()], 1)
        self.entries += 1
        self.entry = entry_of(seen, is_unknown(self.amaxes))
        entry = self._enlarged(self.entry, seen[:, AMAX], fell_back, scales)
        self.since.add(entry, fell_back)
        self._learn(entry, fell_back)

    def _enlarged(self, entry: Tensor, amax: Tensor, fell_back: Tensor, scales: Tensor | None) -> Tensor:
        """The entries, those of gradients that were computed from clipped ones as large as they may be."""
        late, inv_scales = self._gradients, (self.scales if scales is None else scales)[self._rows, AMAX]
        before = growth.so_far(entry)
        by = grown_by(amax[late], inv_scales[late], self._largest[late], fell_back[late], before)
        growth.note(by[-1])
        largest = torch.finfo(torch.float32).max
        return entry.index_copy(0, late, (entry[late] * by[:-1]).clamp_max(largest))

    def agree(self, since: Tensor) -> None:
        """Take over what all ranks together learned since they agreed last: ``since.packed(self.amaxes)``, the largest of
        each number."""
        self.amaxes, self.patience, self._due, entry, fell_back = self.since.unpacked(since)
        self.entry = entry
        self._learn(entry, fell_back)
        self.since = Since(self.amaxes, self.patience, self._due)

    def _learn(self, entry: Tensor, fell_back: Tensor) -> None:
        self.fell_back, self._due = fell_back, self._due | fell_back.any()
        self.patience = next_patience(self.patience, (is_unknown(self.amaxes) & (entry > 0)).any())
        self.remember(next_history(self.amaxes, entry, fell_back))

    def state(self) -> dict[str, Any]:
        """What it remembers, on the CPU."""
        kept = {
            "amaxes": self.amaxes,
            "totals": self.totals,
            "fell_back": self.fell_back,
            "patience": self.patience,
        }
        return {"entries": self.entries} | {name: value.detach().cpu().clone() for name, value in kept.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        device = self.amaxes.device
        self.entries, self.totals = state["entries"], state["totals"].to(device)
        self.fell_back, self._due = state["fell_back"].to(device), state["fell_back"].any().to(device)
        self.patience = state.get("patience", torch.tensor([0, PATIENCE])).to(device)  # states of old have none
        self.entry = torch.zeros_like(self.entry)
        self.remember(without_zeros(state["amaxes"].to(device)))
        self.since = Since(self.amaxes, self.patience, self._due)

    def remember(self, amaxes: Tensor) -> None:
        """Make this the history, float32 ``[V, amax_history_len]``, and the scales what follows from it."""
        self.amaxes = amaxes
        ago, most = self.patience.unbind()
        self._measures_next = PendingBool(self._due | (is_unknown(amaxes) & (ago < most)).any())
        amax = or_amax_of_kind(amaxes.amax(1), self._kinds)
        inv_scales = inv_scale_from(amax, self._largest, self.recipe.linears.margin)
        scales = torch.full_like(self.scales, torch.nan)  # a new tensor: a backward may still read the old one
        scales[self._rows, AMAX] = inv_scales
        self.scales = scales

    def _say_who_starves(self) -> None:
        starved = is_unknown(self.amaxes).tolist()  # waits for the device, behind a step that ran node by node
        names = [o.label for o, each in zip(self.operands, starved, strict=True) if each]
        self._said = bool(names)
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            warnings.warn(STARVED.format(", ".join(names[:SHOWN]) + more, self.entries), stacklevel=2)

    @property
    def inv_scales(self) -> Tensor:
        """Float32 ``[V]``: the scales of the next step."""
        return self.scales[self._rows, AMAX]


class Waiting:
    """Graphs of a saved state that no graph of the model has taken over yet."""

    def __init__(
        self,
        model: weakref.ref[nn.Module],
        graphs: list[Mapping[str, Any]],
        labels: Callable[[nn.Module, Histories], Sequence[str]],
    ) -> None:
        self.model, self.graphs, self.labels = model, graphs, labels

    def match(self, labels: Sequence[str], each: Histories) -> Mapping[str, Any] | None:
        """The first graph of the state with these operands, which waits no more.

        Raises:
            ValueError: its history has another length than the recipe says.
        """
        formats = [o.format for o in each.operands]
        fits = (g for g in self.graphs if list(g["operands"]) == list(labels) and g["formats"] == formats)
        found = next(fits, None)
        if found is not None and found["amaxes"].shape != each.amaxes.shape:
            length, own = found["amaxes"].shape[1], each.amaxes.shape[1]
            raise ValueError(
                f"the state's histories have {length} steps and Recipe.linears.amax_history_len is {own}: set it to {length}"
            )
        if found is not None:
            self.graphs = [g for g in self.graphs if g is not found]
        return found

    def offer(self, each: Histories) -> None:
        """Let a graph that is called for the first time take its history."""
        model = self.model()
        if model is None:
            _waiting.remove(self)
        elif each.is_of(model) and (found := self.match(self.labels(model, each), each)) is not None:
            each.load(found)


def wait(waiting: Waiting) -> None:
    """Keep what is left of a state for graphs to come, instead of an earlier state of the same model."""
    _waiting[:] = [w for w in _waiting if w.model() not in (None, waiting.model())] + [waiting]


_waiting: list[Waiting] = []
_alive: list[weakref.ref[Histories]] = []  # in the order in which they were made


def alive() -> list[Histories]:
    """All histories of this process whose graph still exists, oldest first."""
    return [each for ref in list(_alive) if (each := ref()) is not None]
