"""The shell of every optimizer: torch.optim.Optimizer's interface around the compiled step.

    optimizer.state[p] = {"step", "exp_avg.e4m3_expanded.codes", "exp_avg.e4m3_expanded.amax", ..., "exp_avg_sq. ..."}

Every value is a plain tensor (or a DTensor, where the parameter is one), and its key says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fp8compile._distributed import complete_grad, first_element, is_cut, lies_by_channels, local_grad, local_part
from fp8compile.numerics.rounding import stream_of
from fp8compile.optim import checking, checkpoint, pickling
from fp8compile.optim.beginning import completed, name_of
from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.code_writer import CodeWriter
from fp8compile.optim.compiled_step import PreparedStep
from fp8compile.optim.edits import Edits
from fp8compile.optim.formats import StateFormat
from fp8compile.optim.gradient_release import Release, release_gradients
from fp8compile.optim.interface import OWN_NAMES, Parameter
from fp8compile.optim.placement import DEFAULT_FORMAT, Names, Placement, check_parameter, choose_placement
from fp8compile.optim.plan import Tensors, UpdatePlan
from fp8compile.optim.state_report import StatesReport, report
from fp8compile.optim.steady import Options, Steady, layout_of
from fp8compile.optim.step_numbers import ParameterRows, StepNumbers, count, join


class EncodedOptimizer(torch.optim.Optimizer):
    """Base class. A subclass names its defaults, and ``plain``, the optimizer whose step is captured.

    Args:
        params: parameters, groups, ``model.named_parameters()``, or the model itself, of which embeddings and overrides
            of modules are known then.
        defaults: of the parameter groups.
        state_format: of the states; a pair gives the first moments' and the second moments'. Groups may differ.
        master: for 16-bit parameters: "none" rounds updates stochastically, "split" keeps 8 more bits, "fp32" a copy,
            "fp16_scaled" a copy in FP16 under a scale of its tensor.
        overrides: formats by patterns (fnmatch) on parameter names.
        seed: of the stochastic rounding.
        compiled: whether the step is compiled; otherwise it runs operation by operation, for debugging.
        weight_codes: whether the step also writes the FP8 codes of weights that ``linears.cache_weights`` keeps, under scales
            that are predicted: Adam, AdamW, Lion, RMSprop. Numbers change (docs/guide/cached-weights.md).

    Raises:
        ValueError: an option or a format that does not exist; a parameter that is not float32, bfloat16 or float16.
    """

    plain: type[torch.optim.Optimizer]
    refused_ways: tuple[str, ...] = ("foreach", "fused")  # of torch to run a step: ours has one
    own_names: tuple[str, ...] = OWN_NAMES

    def __init__(
        self,
        params: ParamsT | nn.Module,
        defaults: dict[str, Any],
        *,
        state_format: StateFormat = DEFAULT_FORMAT,
        master: str = "none",
        overrides: Mapping[str, StateFormat] | None = None,
        seed: int = 0,
        compiled: bool = True,
        weight_codes: bool = False,
    ) -> None:
        checking.check_arguments(seed, compiled, overrides, weight_codes)
        model = params if isinstance(params, nn.Module) else None
        self.seed, self.compiled, self.weight_codes = int(seed), compiled, weight_codes
        self.patterns = dict(overrides or {})
        self._model_names = Names.of(model) if model is not None else Names()
        ours = {"state_format": state_format, "master": master, checkpoint.VERSION_KEY: checkpoint.VERSION}
        self._placements: dict[Tensor, Placement] = {}  # decided once: states are stored accordingly
        super().__init__(model.named_parameters() if model is not None else cast(ParamsT, params), defaults | ours)
        checking.check_overrides(self.patterns, [*self.names.names.values()])
        self.clear_caches()

    def clear_caches(self) -> None:
        """Drop all that was derived from groups and parameters, after they have changed."""
        self._streams: dict[Tensor, Tensor] = {}
        self._numbers, self._updates = StepNumbers(compiled=self.compiled), CapturedUpdates(self)
        self._begun: dict[Tensor, tuple[Any, ...]] = {}
        self._steady: Steady | None = None
        self._steps: dict[tuple[int, ...], tuple[tuple[Any, ...], PreparedStep]] = {}
        self._plans: dict[tuple[Tensor, torch.dtype, bool, int, str], UpdatePlan] = {}
        self._writer, self._edits = CodeWriter(self), Edits()

    def __getstate__(self) -> dict[str, Any]:
        return pickling.packed(self, super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(pickling.unpacked(state))
        self.clear_caches()

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for options of a group that ``plain`` does not support."""
        checking.check_numbers(group)

    def update_of(self, p: Tensor, group: Mapping[str, Any]) -> CapturedUpdate:
        """What a step does to one parameter. Raises ValueError for a step that is not captured."""
        return self._updates.of(tuple(p.shape), group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, but the group's options are checked first: if one is refused, group and optimizer are unchanged.

        Raises:
            ValueError: see ``__init__``.
        """
        with checking.unchanged(param_group):
            checking.check_group(self, param_group)
            super().add_param_group(param_group)

    def check_parameter(self, p: Tensor, name: str) -> None:
        """Raises ValueError for a parameter that this optimizer does not update."""
        check_parameter(p, name)

    @property
    def names(self) -> Names:
        """Names by parameter: the model's, or those that ``named_parameters()`` gave."""
        named = dict(self._model_names.names)
        for group in self.param_groups:
            named.update(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
        return Names(named, self._model_names.embeddings, self._model_names.overridden)

    def placement(self, p: Tensor, group: Mapping[str, Any]) -> Placement:
        """How the states of ``p`` are stored; decided once."""
        if p not in self._placements:
            self._placements[p] = self._placed(p, group)
        return self._placements[p]

    def _placed(self, p: Tensor, group: Mapping[str, Any]) -> Placement:
        return choose_placement(p, group["state_format"], self.names, self.patterns)

    def plan_of(self, p: Tensor, group: Mapping[str, Any]) -> UpdatePlan:
        """Everything that fixes the compiled update of ``p``. Raises ValueError for a shard if that needs all of ``p``."""
        update = self.update_of(p, group)
        master = group["master"] if p.dtype != torch.float32 else "none"
        key = p, p.dtype, lies_by_channels(p), id(update), master  # equal updates may begin with other states
        if key not in self._plans:
            if is_cut(p) and update.whole_tensor:
                raise ValueError(
                    f"{name_of(self.names.names, p)} is sharded, and "
                    f"{type(self).__name__} works on whole parameters: use AdamW, or leave it out of what is sharded"
                )
            self._plans[key] = self.placement(p, group).plan(update, p, master, self.seed)
        return self._plans[key]

    def step_function(self, p: Tensor) -> tuple[UpdatePlan, Tensors]:
        """The pure update of one parameter and the tensors it takes, for benchmarks, lowering and tests.

        ``plan(tensors)`` returns the new values of the tensors of the same names, and changes nothing.

        Raises:
            ValueError: ``p`` is not a parameter of this optimizer, or has no gradient.
        """
        for index, group, each in self._parameters():
            if each is p:
                if p.grad is None:
                    raise ValueError("the parameter has no gradient: call backward first")
                self._updates.check()
                self._edits.take_over([p], self.state)
                self._start(p, group)
                complete_grad(p)
                self._refresh_numbers([(index, group, p)])
                return self.plan_of(p, group), self._tensors(index, p, group, self.state[p]["step"] + 1)
        raise ValueError("not a parameter of this optimizer")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            RuntimeError: a sparse gradient; as with every error before the update itself, nothing has changed then.
            ValueError: a sharded parameter of which the update needs the whole.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if self._steady is not None and self._steady.goes_on(self.param_groups, self.state, self._options()):
            self._steady(self._numbers)
        else:
            self.update_parameters([each for each in self._parameters() if each[2].grad is not None], again=True)
        return loss

    @torch.no_grad()
    def update_parameters(self, parameters: list[Parameter], *, again: bool = False) -> None:
        """Update the given parameters, all of which have a gradient; ``again``: as the next step may, being all that have."""
        if not parameters:
            return
        options = self._options()
        checking.check_gradients(self, parameters)
        here = [each for each in parameters if local_part(each[2]).numel()]
        self._edits.take_over((p for _, _, p in here), self.state)
        with checking.started(self, parameters):
            places = self._refresh_numbers(parameters)
            join(places)
            codes = self._writer.fresh(here)
            step = self._prepared(here, codes, options)
        count(places)
        step([{"grad": local_grad(p)} | new for (_, _, p), new in zip(here, codes, strict=True)])
        self._writer.leave(here, codes)
        self._edits.leave((p for _, _, p in here), self.state)
        self._numbers.leave()
        steady = again and not self.weight_codes
        self._steady = Steady(self.param_groups, parameters, self.state, options, step, places) if steady else None

    def _options(self) -> Options:
        return {id(group): (self._updates.version(group), group["master"]) for group in self.param_groups}

    def _prepared(self, parameters: list[Parameter], codes: list[Tensors], options: Options) -> PreparedStep:
        """The step of these parameters; prepared again if a tensor, a layout or an option has changed."""
        which = tuple(index for index, _, _ in parameters)
        wanted = [self._writer.wanted(p, group) for _, group, p in parameters]
        fixed = (
            (options[id(group)], id(self.numbers_of(p, group)), *layout_of(p, self.state[p]))
            for _, group, p in parameters
        )
        key = (*fixed, *wanted)
        known, step = self._steps.get(which, (None, None))
        if step is None or known != key:
            tensors = [self._tensors(index, p, group, self.state[p]["step"]) for index, group, p in parameters]
            plans = [
                replace(self.plan_of(p, g), codes=each) for (_, g, p), each in zip(parameters, wanted, strict=True)
            ]
            several = [(plan, each | new) for plan, each, new in zip(plans, tensors, codes, strict=True)]
            step = PreparedStep(several, compiled=self.compiled)
            self._numbers.keep(self.param_groups)
            if len(self._steps) > 2 * len(self.state) + 16:  # sets of parameters that come and go
                self._steps.clear()
            self._steps[which] = key, step
        return step

    def _parameters(self) -> Iterable[tuple[int, dict[str, Any], Tensor]]:
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                yield index, group, p
                index += 1

    def _start(self, p: Tensor, group: dict[str, Any]) -> None:
        """Create what the state of a parameter lacks: all at first, parts where an option, dtype or layout has changed."""
        kind = p.dtype, group["master"], lies_by_channels(p), id(self._updates.current(p, group))
        state = self.state[p]
        if state and self._begun.get(p) == kind:
            return
        undamped = group.get("dampening") == 0
        made = completed(p, self.plan_of(p, group), state, name_of(self.names.names, p), undamped=undamped)
        if made is not None:
            self.state[p] = made
        self._begun[p] = kind

    def _tensors(self, index: int, p: Tensor, group: dict[str, Any], step: Tensor) -> Tensors:
        return {"param": local_part(p), "grad": local_grad(p)} | self._kept(index, p, group, step)

    def _kept(self, index: int, p: Tensor, group: dict[str, Any], step: Tensor) -> Tensors:
        """What ``UpdatePlan.__call__`` takes, all of it on this rank, without parameter and gradient."""
        tensors, single = {"step": step, "numbers": self.numbers_of(p, group)}, self.update_of(p, group).singles
        tensors |= {n: local_part(part) for n, part in self.state[p].items() if n not in ("step", *single)}
        if self.plan_of(p, group).rounds_stochastically:
            if p not in self._streams:
                self._streams[p] = torch.tensor([stream_of(self.seed, index), first_element(p)], device=p.device)
            tensors["stream"] = self._streams[p]
        return tensors

    def numbers_of(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The numbers of its step, FP32, on the device: always the same tensor for a parameter."""
        return self._numbers.row(p, self._updates.current(p, group))

    def _refresh_numbers(self, parameters: Iterable[Parameter]) -> list[ParameterRows]:
        current = self._updates.current
        return self._numbers.compute([(p, group, current(p, group), self.state[p]) for _, group, p in parameters])

    def state_dict(self) -> dict[str, Any]:
        """As in torch; states as plain tensors in their encoded form, FP8 codes as bytes."""
        return checkpoint.as_saved(self, super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state: its own, torch.optim's in FP32, or one in another format, which is encoded again.

        Raises:
            ValueError: the state does not fit; this optimizer is then unchanged.
        """
        checkpoint.load(self, state_dict)

    def export_fp32_state_dict(self) -> dict[str, Any]:
        """A state dict in FP32 that the optimizer of the same name in torch.optim loads."""
        return checkpoint.export_fp32(self, super().state_dict())

    def report(self) -> StatesReport:
        """How every parameter's states are stored, their bits, and why some are kept whole."""
        return report(self)

    def release_gradients(self, model: nn.Module | None = None) -> Release:
        """Update each parameter as soon as its gradient is complete, and drop the gradient."""
        return release_gradients(self, model)
