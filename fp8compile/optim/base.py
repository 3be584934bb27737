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

from fp8compile._distributed import complete_grad, first_element, is_cut, local_grad, local_part
from fp8compile.optim import checking, checkpoint, pickling
from fp8compile.optim.code_writer import CodeWriter
from fp8compile.optim.compiled_step import PreparedStep
from fp8compile.optim.edits import Edits
from fp8compile.optim.formats import StateFormat
from fp8compile.optim.gradient_release import Release, release_gradients
from fp8compile.optim.group_numbers import GroupNumbers
from fp8compile.optim.interface import Parameter
from fp8compile.optim.low_bits import initial_state, kept_beside
from fp8compile.optim.placement import DEFAULT_FORMAT, Names, Placement, check_parameter, choose_placement
from fp8compile.optim.plan import Plan, Tensors
from fp8compile.optim.state_report import StatesReport, report
from fp8compile.optim.updates import Number, Update

PARTS_BY = ("master", "momentum", "amsgrad", "centered")  # options that decide which parts a state has


class EncodedOptimizer(torch.optim.Optimizer):
    """Base class. A subclass names its defaults and its ``update_of(group)``.

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
        weight_codes: whether the step also writes the FP8 codes of weights that ``Recipe.cache_weights`` keeps, under scales
            that are predicted: Adam, AdamW, Lion, RMSprop. Numbers change (docs/guide/cached-weights.md).

    Raises:
        ValueError: an option or a format that does not exist; a parameter that is not float32, bfloat16 or float16.
    """

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
        self._numbers = GroupNumbers()
        self._begun: dict[Tensor, tuple[Any, ...]] = {}
        self._steps: dict[tuple[int, ...], tuple[tuple[Any, ...], PreparedStep]] = {}
        self._plans: dict[tuple[Tensor, torch.dtype, Update, str, bool], Plan] = {}
        self._writer, self._edits = CodeWriter(self), Edits()

    def __getstate__(self) -> dict[str, Any]:
        return pickling.packed(self, super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(pickling.unpacked(state))
        self.clear_caches()

    def update_of(self, group: Mapping[str, Any]) -> Update:
        """The arithmetic of a parameter group. Raises ValueError for options that it does not support."""
        raise NotImplementedError

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

    @staticmethod
    def _in_group(group: Mapping[str, Any], i: int) -> str:
        return f"parameter {group['param_names'][i]}" if "param_names" in group else f"parameter {i} of its group"

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

    def plan_of(self, p: Tensor, group: Mapping[str, Any]) -> Plan:
        """Everything that fixes the compiled update of ``p``. Raises ValueError for a shard if that needs all of ``p``."""
        update, maximize = self.update_of(group), bool(group.get("maximize", False))
        master = group["master"] if p.dtype != torch.float32 else "none"
        key = p, p.dtype, update, master, maximize
        if key not in self._plans:
            if is_cut(p) and getattr(update, "whole_tensor", False):
                raise ValueError(
                    f"{self.names.names.get(id(p), f'a parameter of shape {[*p.shape]}')} is sharded, and "
                    f"{type(self).__name__} works on whole parameters: use AdamW, or leave it out of what is sharded"
                )
            placed = self.placement(p, group)
            codecs = tuple((state, placed.codec(signed)) for state, signed in update.states.items())
            self._plans[key] = Plan(
                update, codecs, tuple(update.numbers(group)), p.dtype, master, maximize, self.seed
            )
        return self._plans[key]

    def step_function(self, p: Tensor) -> tuple[Plan, Tensors]:
        """The pure update of one parameter and the tensors it takes, for benchmarks, lowering and tests.

        ``plan(tensors)`` returns the new values of the tensors of the same names, and changes nothing.

        Raises:
            ValueError: ``p`` is not a parameter of this optimizer, or has no gradient.
        """
        for index, group, each in self._parameters():
            if each is p:
                if p.grad is None:
                    raise ValueError("the parameter has no gradient: call backward first")
                self._edits.take_over([p], self.state)
                self._start(p, group)
                complete_grad(p)
                return self.plan_of(p, group), self._tensors(index, p, group, self.state[p]["step"] + 1)
        raise ValueError("not a parameter of this optimizer")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            RuntimeError: a sparse gradient; as with every error before the update itself, nothing has changed then.
            ValueError: a sharded parameter of which the update needs the whole.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_parameters([each for each in self._parameters() if each[2].grad is not None])
        return loss

    @torch.no_grad()
    def update_parameters(self, parameters: list[tuple[int, dict[str, Any], Tensor]]) -> None:
        """Update the given parameters (number, group, parameter), all of which have a gradient."""
        if not parameters:
            return
        checking.check_gradients(self, parameters)
        here = [each for each in parameters if local_part(each[2]).numel()]
        self._edits.take_over((p for _, _, p in here), self.state)
        with checking.started(self, parameters):
            self._numbers.keep(self.param_groups)
            for group in self.param_groups:
                self._refresh_numbers(group)
            codes = self._writer.fresh(here)
            step = self._prepared(here, codes)
        torch._foreach_add_([self.state[p]["step"] for _, _, p in parameters], 1)
        step([{"grad": local_grad(p)} | new for (_, _, p), new in zip(here, codes, strict=True)])
        self._writer.leave(here, codes)
        self._edits.leave((p for _, _, p in here), self.state)

    def _prepared(self, parameters: list[Parameter], codes: list[Tensors]) -> PreparedStep:
        """The step of these parameters; prepared again if a tensor, a layout or an option has changed."""
        options = {
            id(group): (self.update_of(group), group["master"], group.get("maximize")) for group in self.param_groups
        }
        which = tuple(index for index, _, _ in parameters)
        wanted = [self._writer.wanted(p, group) for _, group, p in parameters]
        places = {(id(group), p.device): group for _, group, p in parameters}
        numbers = {place: id(self._numbers_of(group, place[1])) for place, group in places.items()}
        fixed = ((options[id(group)], numbers[id(group), p.device], *self._layout(p)) for _, group, p in parameters)
        key = (*fixed, *wanted)
        known, step = self._steps.get(which, (None, None))
        if step is None or known != key:
            several = [
                (
                    replace(self.plan_of(p, group), codes=each),
                    self._tensors(index, p, group, self.state[p]["step"]) | new,
                )
                for (index, group, p), each, new in zip(parameters, wanted, codes, strict=True)
            ]
            step = PreparedStep(several, compiled=self.compiled)
            if len(self._steps) > 2 * len(self.state) + 16:  # sets of parameters that come and go
                self._steps.clear()
            self._steps[which] = key, step
        return step

    def _layout(self, p: Tensor) -> tuple[Any, ...]:
        """What a prepared step relies on: the same tensor objects of parameter and state, and the gradient's layout."""
        g = local_grad(p)
        return id(p), p.dtype, local_part(p).data_ptr(), g.dtype, g.stride(), *map(id, self.state[p].values())

    def _parameters(self) -> Iterable[tuple[int, dict[str, Any], Tensor]]:
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                yield index, group, p
                index += 1

    def _start(self, p: Tensor, group: dict[str, Any]) -> None:
        """Create what the state of a parameter lacks: all of it at first, parts where an option or the dtype has changed."""
        kind, state = (p.dtype, *map(group.get, PARTS_BY)), self.state[p]
        if state and self._begun.get(p) == kind:
            return
        plan, here = self.plan_of(p, group), local_part(p)
        needed = {"step", *kept_beside(plan.master)}.union(*(plan.part_keys(name) for name, _ in plan.codecs))
        if not needed <= state.keys():
            made = {"step": torch.zeros((), dtype=torch.float32, device=here.device), **initial_state(plan, p)}
            self.state[p] = made | state
        self._begun[p] = kind

    def _tensors(self, index: int, p: Tensor, group: dict[str, Any], step: Tensor) -> Tensors:
        """What ``Plan.__call__`` takes, all of it on this rank."""
        return {"param": local_part(p), "grad": local_grad(p)} | self._kept(index, p, group, step)

    def _kept(self, index: int, p: Tensor, group: dict[str, Any], step: Tensor) -> Tensors:
        """The same without parameter and gradient."""
        here = local_part(p)
        tensors = {"step": step, "numbers": self._numbers_of(group, here.device)}
        tensors |= {name: local_part(part) for name, part in self.state[p].items() if name != "step"}
        if self.plan_of(p, group).rounds_stochastically:
            if p not in self._streams:
                self._streams[p] = torch.tensor([index, first_element(p)], device=here.device)
            tensors["stream"] = self._streams[p]
        return tensors

    def _numbers_of(self, group: Mapping[str, Any], device: torch.device) -> Tensor:
        """The update's numbers as one FP32 tensor on the device; a group always gets the same tensor."""
        return self._numbers.of(group, self._values(group), device)

    def _refresh_numbers(self, group: Mapping[str, Any]) -> None:
        self._numbers.refresh(group, self._values(group))

    def _values(self, group: Mapping[str, Any]) -> tuple[Number, ...]:
        return tuple(self.update_of(group).numbers(group).values())

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
