"""``fp8compile.tools.scaling_state(model)``: what delayed scaling remembers of a model, to look at, save and share among
ranks; and the codes of its weights that are kept (``Recipe.linears.cache_weights``), to look at and to drop."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8compile._messages import nearest
from fp8compile._text import printed, table
from fp8compile.fx.provenance import beginning, module_names, parameter_names
from fp8compile.linears import history, weight_scales
from fp8compile.linears.history import Histories
from fp8compile.linears.weight_codes import store
from fp8compile.numerics.delayed import AMAX

FORMAT = 1  # of state dicts
NONE_YET = (
    "no FP8 linear with delayed scales has run yet: Recipe.linears.scaling is 'dynamic', or no step has been taken"
)


def scaling_state(model: nn.Module) -> ScalingState:
    """The amax histories of ``model``'s FP8 linears under ``Recipe(linears="delayed")``; and the codes of its weights
    that ``linears.cache_weights`` keeps: ``weight_bytes``, ``forget_weights()``.

    Printed, it is a table: for each operand its scale, its newest amax, and what its scales have clipped so far.

    Raises:
        ValueError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"scaling_state takes the model that was compiled, not {model!r:.80}")
    return ScalingState(model)


class ScalingState:
    """The histories of one model, graph by graph, in the order in which the graphs were first called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    @property
    def graphs(self) -> list[tuple[tuple[str, ...], Histories]]:
        """Each graph's operands by name, ``layers.0.attn.q.input``, and its histories."""
        model = self._model()
        return (
            [] if model is None else [(labels_of(model, each), each) for each in history.alive() if each.is_of(model)]
        )

    def state_dict(self) -> dict[str, Any]:
        """All histories, on the CPU, by name: equal ones give equal steps. Small: 4 bytes an operand and step.

        And, where optimizers write codes of weights (``weight_codes=True``), the scales of these: 12 bytes a weight.
        """
        model = self._model()
        weights = {} if model is None else weight_scales.state_of(model)
        return ({"weights": weights} if weights else {}) | {
            "format": FORMAT,
            "graphs": [
                {"operands": list(labels), "formats": [o.format for o in each.operands]} | each.state()
                for labels, each in self.graphs
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. A graph that is compiled only later takes its history at its first call.

        Scales of weights are those of the weights as they are: load model and optimizer before.

        Raises:
            ValueError: not such a state; or it names modules that the model does not have; or a graph's operands, or the
                length of its history, are others than the state's. Nothing is loaded then.
        """
        model = self._model()
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ValueError(f"not a state of scaling_state(model).state_dict(), format {FORMAT}: {state!r:.80}")
        _check_modules(state["graphs"], {} if model is None else module_names(model).values())
        weights = state.get("weights", {})
        if model is not None:
            weight_scales.check(model, weights)
        waiting = history.Waiting(self._model, list(state["graphs"]), labels_of)
        graphs = self.graphs
        matched = [(each, waiting.match(labels, each)) for labels, each in graphs]
        if graphs and not any(found for _, found in matched):
            theirs = state["graphs"][0]["operands"] if state["graphs"] else ()
            raise ValueError(
                f"no graph of this model has the operands of the state: it has {_some(graphs[0][0])}, the state "
                f"{_some(theirs)}. The recipe that compiled it must be the same."
            )
        for each, found in matched:
            if found:
                each.load(found)
        history.wait(waiting)
        if model is not None:
            weight_scales.load(model, weights)

    def all_reduce(self, group: Any = None) -> None:
        """Let all ranks go on with the largest amaxes of them all, by one small exchange; call it behind each backward.

        Ranks may have run other graphs in this pass, and other operands of one graph, or nothing. But each must have called
        the same graphs once. Without it each rank's scales are its own, which is as exact.
        """
        named = sorted((labels, i, each) for i, (labels, each) in enumerate(self.graphs) if each.operands)
        learned = [each.since.packed(each.amaxes) for _, _, each in named]
        if not learned:
            return
        largest = torch.cat(learned)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        for (_, _, each), own in zip(named, torch.split(largest, [len(each) for each in learned]), strict=True):
            each.agree(own)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the codes that ``linears.cache_weights`` keeps of this model's weights. The weights are not counted."""
        model = self._model()
        return 0 if model is None else store.bytes_of(model.parameters())

    def forget_weights(self) -> None:
        """Drop the codes that are kept of this model's weights. The next call that needs them encodes the weights anew.

        Call it behind a change that no version counter sees, as one through ``.data``. It costs one encoding of each weight.
        """
        model = self._model()
        if model is not None:
            store.forget(model.parameters())

    def __str__(self) -> str:
        rows = [row for labels, each in self.graphs for row in _rows(labels, each)]
        model = self._model()
        weights = [] if model is None else weight_scales.rows(model)
        if not rows and not weights:
            return NONE_YET
        heads = ("operand", "format", "inv_scale", "amax", "clipped", "not finite", "fell back")
        tables = [table("", heads, rows)] if rows else []
        tables += [table("", ("weight", "inv_scale", "amax", "scale"), weights)] if weights else []
        return printed(tables)


def labels_of(model: nn.Module, each: Histories) -> tuple[str, ...]:
    """The names of a graph's operands in the model; of those of one name the second is ``name#2``, and so on."""
    begin = beginning(each.paths, parameter_names(model)) or ""
    seen: dict[str, int] = {}
    labels = []
    for operand in each.operands:
        label = ".".join(part for part in (begin, operand.label) if part)
        seen[label] = seen.get(label, 0) + 1
        labels.append(label if seen[label] == 1 else f"{label}#{seen[label]}")
    return tuple(labels)


def _check_modules(graphs: Sequence[Mapping[str, Any]], modules: Any) -> None:
    known = set(modules)
    for label in (label for graph in graphs for label in graph["operands"]):
        module = label.partition("#")[0].rpartition(".")[0]
        if module not in known:
            raise ValueError(
                f"the state is another model's: this one has no module {module!r}.{nearest(module, sorted(known))}"
            )


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _rows(labels: Sequence[str], each: Histories) -> list[tuple[str, ...]]:
    columns: list[Tensor] = [each.inv_scales, each.amaxes[:, AMAX], *each.totals.unbind(1)]
    values = torch.stack(columns, 1).tolist()
    return [
        (label, operand.format, f"{inv_scale:.3g}", f"{amax:.4g}", f"{clipped:.0f}", f"{lost:.0f}", f"{fell:.0f}")
        for label, operand, (inv_scale, amax, clipped, lost, fell) in zip(labels, each.operands, values, strict=True)
    ]
