"""Updates put behind the graph of forward and backward, and what they write; ``early.py`` moves them to their gradients.

    g_2, g_1, ...        new p_2, states_2 = plan(p_2, g_2, states_2);  p_2.copy_(new p_2) ...        new p_1 ...

With ``clip_norm`` all gradients are alive at one time, since their norm is known behind the last one:

    g <- g min(1, clip_norm / (|all gradients| + 1e-6))        as torch.nn.utils.clip_grad_norm_ does
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import copy_graph, insertion_point_after, is_tensor, splice, storage_root
from fp8compile.optim.code_writer import CLIPPED, TRANSPOSED, finished, finished_and_transposed, side_by_side
from fp8compile.optim.plan import UpdatePlan
from fp8compile.optim.step_codes import AMAX, INV_SCALE, KNOWN, REACH, ROWS, Wanted
from fp8compile.whole_step.early import GRADIENT, alive_at_once, place_early
from fp8compile.whole_step.joined import APART, BACKWARD, FIRST_UPDATE, PART, Joined
from fp8compile.whole_step.rows import updated_in_rows

aten = torch.ops.aten
Source = tuple[int, str]
STEP, ACCUMULATED = "step", "accumulated"
NONE: Mapping[int, Tensor] = {}
ADDED = 1e-6  # to the norm, by torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class UpdateTask:
    """The update of one parameter.

    Attributes:
        at: the parameter's position among the inputs of the graph that Dynamo captured.
        plan: the update.
        tensors: what the plan takes beside parameter, gradient and step, by its names.
        step: its count of steps, this one included, 0-d. An input of its own: a place in a tensor of all of them would be
            part of the generated code, and no two parameters would share a kernel's code.
        accumulated: its gradient from earlier calls, if there is one.
    """

    at: int
    plan: UpdatePlan
    tensors: Mapping[str, Tensor]
    step: Tensor
    accumulated: Tensor | None = None


@dataclass(frozen=True)
class Placed:
    """A graph with updates.

    Attributes:
        module: takes the inputs of ``Joined`` and then ``extra``; returns the results by position, then statistics, then the
            norm of all gradients where they are clipped.
        positions: of the inputs that it takes, among those of the graph that Dynamo captured.
        extra: where each input that it takes in addition comes from: the number of a task and the name of its tensor.
        writes: positions among ``positions`` of those that it overwrites.
        gradient_bytes: of all gradients.
        gradient_peak: of those that are alive at one time, where updates are placed early.
    """

    module: GraphModule
    positions: tuple[int, ...]
    extra: tuple[Source, ...]
    writes: tuple[int, ...]
    gradient_bytes: int
    gradient_peak: int


def with_updates(
    whole: Joined,
    tasks: Sequence[UpdateTask],
    clip_norm: float | None,
    own: Mapping[int, Tensor] = NONE,
    *,
    returns_statistics: bool = False,
) -> Placed:
    """Complete the graph of forward and backward.

    Args:
        whole: is changed.
        tasks: the updates.
        clip_norm: the largest norm that all gradients together have behind the clipping.
        own: what the graph takes behind the inputs that Dynamo has captured, by position; a task's tensors may be among them.
        returns_statistics: whether the first of them is scales, whose gradient is returned behind the results.
    """
    placing = _Placing(whole, own)
    placing.copy_results({task.at for task in tasks})
    gradients = {task.at: placing.gradient(row, task) for row, task in enumerate(tasks)}
    norm = None
    if clip_norm is not None:
        norm = placing.marked(BACKWARD, whole.end, lambda end: _norm(whole.graph, gradients.values(), end))
    for row, task in enumerate(tasks):
        placing.update(row, task, gradients[task.at], norm, clip_norm)
    for at, node in whole.overwritten.items():
        _write(whole.graph, whole.inputs[at], node, whole.end)
    statistics = whole.gradients[min(own)] if returns_statistics else None
    _return(whole, [each for each in (statistics, norm) if each is not None])
    module = private.LazyGraphModule(whole.owner, whole.graph)
    place_early((spare := copy_graph(module)).graph)
    every, most = alive_at_once(spare.graph)
    return Placed(module, tuple(whole.inputs), tuple(placing.sources), _overwritten(whole), every, most)


class _Placing:
    """Puts nodes into one graph; ``sources`` says where the inputs come from that it has added."""

    def __init__(self, whole: Joined, own: Mapping[int, Tensor]) -> None:
        self.whole, self.graph = whole, whole.graph
        self._fake_mode: Any = private.detect_fake_mode(
            [n.meta["val"] for n in whole.inputs.values() if is_tensor(n)]
        )
        self._last = self.graph.find_nodes(op="placeholder")[-1]
        self._inputs = {id(tensor): whole.inputs[at] for at, tensor in own.items() if at in whole.inputs}
        self.sources: list[Source] = []

    def _input(self, tensor: Tensor, source: Source) -> Node:
        """The graph's input for a tensor of the optimizer."""
        if id(tensor) not in self._inputs:
            with self.graph.inserting_after(self._last):
                self._last = self.graph.placeholder(f"of_optimizer_{len(self.sources)}")
            self._last.meta["val"] = fake_of(tensor, self._fake_mode)
            self._inputs[id(tensor)] = self._last
            self.sources.append(source)
        return self._inputs[id(tensor)]

    def copy_results(self, updated: Iterable[int]) -> None:
        """A result in the memory of a parameter is copied, since the parameter is overwritten."""
        own = {self.whole.inputs[at] for at in updated}
        for at, result in self.whole.results.items():
            if isinstance(result, Node) and is_tensor(result) and storage_root(result) in own:
                before = insertion_point_after(result)
                self.whole.results[at] = splice(self.graph, torch.clone, result, before=before)

    def gradient(self, row: int, task: UpdateTask) -> Node:
        """The gradient of a task's parameter, with what earlier calls have left of it."""
        made = self.whole.gradients[task.at]
        made.meta[GRADIENT] = True
        if task.accumulated is None:
            return made
        before, earlier = insertion_point_after(made), self._input(task.accumulated, (row, ACCUMULATED))
        summed: Node = self.marked(
            BACKWARD, before, lambda spot: splice(self.graph, _sum, earlier, made, before=spot)
        )
        summed.meta[GRADIENT] = True
        return summed

    def update(self, row: int, task: UpdateTask, gradient: Node, norm: Node | None, clip_norm: float | None) -> None:
        """The update of one parameter at the end, written in place."""
        param, names = self.whole.inputs[task.at], tuple(task.tensors)
        taken = [self._input(tensor, (row, name)) for name, tensor in task.tensors.items()]
        step = self._input(task.step, (row, STEP))
        to = {"param": param} | dict(zip(names, taken, strict=True))

        def insert(before: Node) -> None:
            norms = [] if norm is None else [norm]
            fn = _update(task.plan, names, clip_norm)
            new = splice(self.graph, fn, param, gradient, step, *taken, *norms, before=before)
            for name in (each for each in new if each in to):
                _write(self.graph, to[name], new[name], before)
            if task.plan.codes is not None:
                self.finish_codes(task.plan.codes, new, to, before)

        self.marked(FIRST_UPDATE + row, self.whole.end, insert)

    def finish_codes(self, wanted: Wanted, new: Mapping[str, Node], to: Mapping[str, Node], before: Node) -> None:
        """Write what is known of the codes that an update has made, and transpose them: apart from the kernel of the update,
        which holds few rows at a time and waits for no amax."""
        codes = to[ROWS] if wanted.by_rows else new[ROWS]  # as they are written: no kernel makes them twice
        every = splice(self.graph, side_by_side, new[AMAX], new[REACH], before=before)  # by the update's kernel
        last, fn = before.prev, finished_and_transposed if wanted.transposed else finished
        made = splice(self.graph, fn, every, new[INV_SCALE], codes, before=before)
        for name, node in zip((KNOWN, CLIPPED, TRANSPOSED), made, strict=False):
            _write(self.graph, to[name], node, before)
        while last.next is not before:
            last = last.next
            last.meta[APART] = True

    def marked(self, part: int, before: Node, insert: Callable[[Node], Any]) -> Any:
        """What ``insert`` gives; all that it puts before the node belongs to this part of the step."""
        last = before.prev
        made = insert(before)
        node = before.prev
        while node is not last:
            node.meta[PART] = part
            node = node.prev
        return made


def fake_of(tensor: Tensor, mode: Any) -> Tensor:
    """A tensor of the optimizer as the graph sees it."""
    fake: Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake


def _update(plan: UpdatePlan, names: tuple[str, ...], clip_norm: float | None) -> Callable[..., dict[str, Tensor]]:
    def update(param: Tensor, grad: Tensor, step: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        tensors = dict(zip(names, rest, strict=False))
        if clip_norm is not None:
            coefficient = (clip_norm / (rest[-1] + ADDED)).clamp(max=1.0)
            grad = (grad * coefficient).to(grad.dtype)
        return updated_in_rows(plan, {"param": param, "grad": grad, "step": step} | tensors)

    return update


def _sum(earlier: Tensor, grad: Tensor) -> Tensor:
    return earlier + grad


def _norm(graph: Graph, gradients: Iterable[Node], before: Node) -> Any:
    def norm_of_all(*grads: Tensor) -> Tensor:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    return splice(graph, norm_of_all, *gradients, before=before)


def _write(graph: Graph, to: Node, value: Node, before: Node) -> None:
    """Write ``value`` where ``to`` lies. A view of rows is written as rows: in the shape of the kernel that makes them, for
    whose end Inductor would not take a copy of another shape."""
    with graph.inserting_before(before):
        if value.target is aten.view.default and to.meta["val"].is_contiguous():
            value = value.args[0]  # type: ignore[assignment]
            shape = [*value.meta["val"].shape]
            known = to.meta["val"].view(shape)
            to = graph.call_function(aten.view.default, (to, shape))
            to.meta["val"] = known
        write = graph.call_function(aten.copy_.default, (to, value))
    write.meta["val"] = to.meta["val"]


def _return(whole: Joined, behind: Sequence[Node]) -> None:
    results = [*(whole.results[at] for at in sorted(whole.results)), *behind]
    whole.end.args = (tuple(results),)
    whole.end.meta["user_visible_output_idxs"] = [i for i, each in enumerate(results) if isinstance(each, Node)]
    whole.graph.eliminate_dead_code()
    whole.graph.lint()


def _overwritten(whole: Joined) -> tuple[int, ...]:
    """Which of the inputs from Dynamo's graph the graph writes into."""
    writes = whole.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {storage_root(node.args[0]) for node in writes}
    return tuple(i for i, node in enumerate(whole.inputs.values()) if node in written)
