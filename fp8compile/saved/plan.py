"""What becomes of each saved tensor, decided once on both graphs: passes act on it, budgets and the report read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from fp8compile.fx.graph import storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.regions import saves_itself
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Skip
from fp8compile.saved.allowance import Allowance
from fp8compile.saved.judge import Judge, Unencoded
from fp8compile.saved.kept_beside import KeptBeside
from fp8compile.saved.keys import missing
from fp8compile.saved.stored import Stored


@dataclass(frozen=True)
class SavedPlan:
    """The decision for each tensor that a graph saves itself.

    Attributes:
        decisions: in the order in which the backward takes the tensors.
        beside: what is kept once for several of them.
        missing: entries for the report, of values that the recipe names and the graph does not save.
    """

    decisions: tuple[tuple[SavedTensor, Stored | Unencoded], ...]
    beside: KeptBeside
    missing: tuple[Skip, ...]

    @cached_property
    def nbytes(self) -> dict[Node, int]:
        """For each storage that is to be codes, the bytes that these take."""
        return {
            storage_root(edge.forward): stored.nbytes(edge.forward.meta["val"]) + self.beside.nbytes(stored)
            for edge, stored in self.decisions
            if isinstance(stored, Stored)
        }


def plan_saved(split: PartitionedGraph, ctx: Context) -> SavedPlan:
    """Decide for each tensor that is saved; nothing is changed."""
    judge = Judge(split, ctx)
    decided = [(edge, judge.decide(edge)) for edge in split.edges if saves_itself(split, edge)]
    rounded = [(edge, found) for edge, found in decided if isinstance(found, Stored) and not found.is_exact]
    dear = Allowance(split, ctx).reasons_against(rounded)
    decisions = [(e, Unencoded(dear[e.backward]) if e.backward in dear else found) for e, found in decided]
    codes = (edge for edge, found in decisions if isinstance(found, Stored) or found.operand)
    beside = KeptBeside(split, judge.sensitivity.recomputed, codes)
    stores = any(isinstance(found, Stored) for _, found in decisions)
    return SavedPlan(tuple(decisions), beside, missing(judge.keys, ctx) if stores else ())
