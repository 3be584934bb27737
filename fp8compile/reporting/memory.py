"""Will it fit: what a training step needs on the card, from bytes that are known before it starts.

    peak = weights + buffers + states + max(running, gradients + update)

``running`` is the most that forward and backward have alive, gradients from where they are made. Of a model whose forward and
backward have been generated it is read off that code, where each buffer is made and dropped; until then it is an estimate
from the graph (fp8compile/analysis/liveness.py). ``update`` is an estimate. All else is exact for one device: each storage
once, gradients in the dtype of their parameter.

Not counted: data, the CUDA context and libraries (about 0.5 GiB of the card), what libraries take while they compute
(convolutions most of all), the allocator's fragmentation, communication buffers, gradients that are there before the step
(``zero_grad(set_to_none=False)``, accumulation over several backwards).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile._text import human
from fp8compile.reporting.optimizer_rows import Need, OptimizerFit, OptimizerFits, Trained, needs

GIB = 1024**3


@dataclass(frozen=True)
class ModelBytes:
    """What a model holds for any batch: bytes, and how many elements are trained.

    ``parameters`` are those that are trained. ``gradients_at_once`` are the bytes of gradients alive at the same time where
    each is dropped after its update: the gradients of one graph, since its backward returns them together.
    """

    weights: int
    buffers: int
    gradients: int
    trained: int
    parameters: tuple[Trained, ...] = ()
    gradients_at_once: int = 0


@dataclass(frozen=True)
class Fit:
    """A prediction for one training step, in bytes. True where the peak is no more than the card.

    Attributes:
        weights: parameters, trained or frozen, and codes that are kept of them (``Recipe.linears.cache_weights``).
        buffers: the model's buffers.
        gradients: of the parameters that are trained.
        states: of the optimizer.
        activations: saved for backward.
        workspace: the most that forward or backward needs beyond these at one time, an estimate for the device that the
            graph was captured on. A CPU stores results of exponentials that a GPU computes again where they are read.
        update: what the optimizer needs in addition while it steps, an estimate: torch.optim's default implementation on
            a GPU makes one temporary of the size of all gradients.
        card: the memory of the card.
        activations_plain, workspace_plain: the same for plain Inductor.
        running, running_plain: the most that forward and backward have alive at one time, gradients included from where they
            are made; off the generated code where there is any (``is_generated``), else estimated.
        running_released: ``running`` where each gradient is dropped after its update, in the backward.
        model: what the model holds, for ``by_optimizer``.
        host: codes that wait on the host (``Recipe.memory.offload``), no part of the peak.
    """

    weights: int
    buffers: int
    gradients: int
    states: int
    activations: int
    workspace: int
    update: int
    card: int
    activations_plain: int
    workspace_plain: int
    running: int
    running_plain: int
    running_released: int
    is_generated: bool = False
    model: ModelBytes | None = field(default=None, compare=False, repr=False)
    host: int = 0

    @property
    def peak(self) -> int:
        """The most that a step needs at one time."""
        return self._held + max(self.running, self.gradients + self.update)

    @property
    def peak_plain(self) -> int:
        """The same with plain Inductor."""
        return self._held + max(self.running_plain, self.gradients + self.update)

    @property
    def _held(self) -> int:
        return self.weights + self.buffers + self.states

    def __bool__(self) -> bool:
        return self.peak <= self.card

    def by_optimizer(self) -> OptimizerFits:
        """The same step with other optimizers, regardless of ``states``; iterate for the rows, print for a table.

        Raises:
            ValueError: the parameters are not known; ``fits`` of what ``explain`` or ``report`` returned knows them.
        """
        if self.model is None or not self.model.parameters:
            raise ValueError("by_optimizer needs a model that is trained: fp8compile.explain(model, args).fits(...)")
        return OptimizerFits(tuple(map(self._with, needs(self.model.parameters, self.model.gradients_at_once))))

    def _with(self, need: Need) -> OptimizerFit:
        running = self.running_released if need.is_released else self.running
        held = self.weights + self.buffers + need.states
        peak = held + max(running, need.gradients + need.update)
        return OptimizerFit(need.name, need.states, need.gradients, peak, self.card)

    @property
    def _source(self) -> str:
        return "from the generated code" if self.is_generated else "estimated from the graph"

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(dataclasses.replace(self, model=None))
        del fields["model"]
        return {**fields, "peak": self.peak, "peak_plain": self.peak_plain}

    def __str__(self) -> str:
        return (
            f"{_verdict(self.peak, self.card)}\n"
            f"plain Inductor: {_verdict(self.peak_plain, self.card)}\n"
            f"weights {human(self.weights)}, buffers {human(self.buffers)}, gradients {human(self.gradients)}, "
            f"optimizer states {human(self.states)}\n"
            f"saved for backward {human(self.activations)} (plain Inductor {human(self.activations_plain)})"
            f"{f', and {human(self.host)} on the host' if self.host else ''}\n"
            f"forward and backward at their most, gradients included, {self._source}: {human(self.running)} (plain "
            f"Inductor, estimated: {human(self.running_plain)}); {human(self.update)} more while the optimizer steps"
            + (f"\n{self.by_optimizer()}" if self.model and self.model.parameters else "")
        )


def predict(
    model: ModelBytes,
    activations: tuple[int, int],
    workspace: tuple[int, int],
    running: tuple[int, int, int],
    card_gib: float = 80.0,
    states: float | torch.optim.Optimizer | None = None,
    host: int = 0,
    is_generated: bool = False,
) -> Fit:
    """The Fit of a model; ``activations``, ``workspace`` and ``running`` are ours and plain Inductor's, and ours with
    gradients released: ``Report.fits``."""
    if isinstance(card_gib, bool) or not isinstance(card_gib, (int, float)) or not card_gib > 0:
        raise ValueError(f"fits: card_gib is the memory of the card in GiB, such as 80, not {card_gib!r}.")
    return Fit(
        model.weights,
        model.buffers,
        model.gradients,
        _states(model, states),
        activations[0],
        workspace[0],
        0 if _is_fused(states) else model.gradients,
        int(card_gib * GIB),
        activations[1],
        workspace[1],
        *running,
        is_generated,
        model,
        host,
    )


def model_bytes(
    model: nn.Module,
    fixed_formats: Mapping[int, tuple[str, str]] | None = None,
    in_graphs: Iterable[int] | None = None,
) -> ModelBytes:
    """What ``model`` holds on this device. Shared tensors count once, distributed tensors with their local part.

    Args:
        model: the model.
        fixed_formats: by id of the parameter, formats of states that do not follow the optimizer's ``state_format``.
        in_graphs: bytes of the gradients of each of its graphs; None: all gradients are alive together.
    """
    formats = fixed_formats or {}
    trained = [(_local(p), formats.get(id(p))) for p in model.parameters() if p.requires_grad]
    parameters = tuple(Trained(tuple(p.shape), p.element_size(), fixed) for p, fixed in trained)
    gradients = sum(p.nbytes for p in parameters)
    return ModelBytes(
        storage_bytes(model.parameters()),
        storage_bytes(model.buffers()),
        gradients,
        sum(p.numel() for p, _ in trained),
        parameters,
        gradients if in_graphs is None else max([*in_graphs, *(p.nbytes for p in parameters)], default=0),
    )


def gradient_bytes(values: Iterable[object]) -> int:
    """Bytes of the gradients of those among ``values`` that are parameters and trained, on this device."""
    trained = (_local(v) for v in values if isinstance(v, nn.Parameter) and v.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of these tensors; for a tensor made of others (DTensor), theirs."""
    storages = (inner.untyped_storage() for t in tensors for inner in _inner(t))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
    else:
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from _inner(part)


def _local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies on this device; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _states(model: ModelBytes, states: object) -> int:
    if states is None:
        return 2 * model.gradients  # AdamW: two moments in the dtype of the parameter
    if isinstance(states, torch.optim.Optimizer):
        tensors = [v for state in states.state.values() for v in state.values() if isinstance(v, Tensor)]
        if not tensors and model.trained:
            raise ValueError(
                "fits: this optimizer holds no state yet. If it has any, step once first, or give bytes per trained "
                "parameter instead: states=8 is AdamW in FP32, states=0 is SGD without momentum."
            )
        return storage_bytes(tensors)
    if isinstance(states, bool) or not isinstance(states, (int, float)) or not states >= 0:
        raise ValueError(
            f"fits: states is an optimizer or the bytes it holds per trained parameter, such as 8, not {states!r}."
        )
    return round(states * model.trained)


def _is_fused(states: object) -> bool:
    return isinstance(states, torch.optim.Optimizer) and all(group.get("fused") for group in states.param_groups)


def _verdict(peak: int, card: int) -> str:
    if peak <= card:
        return f"fits in {human(card)}: predicted peak {human(peak)}, {human(card - peak)} to spare"
    return f"does not fit in {human(card)}: predicted peak {human(peak)}, {human(peak - card)} too much"
