"""The part of an optimizer that its helpers use: checks, checkpoints, pickles, reports, gradient release.

The shell (``base.EncodedOptimizer``) imports the helpers; they know the shell only by these members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.placement import Names, Placement
from fp8compile.optim.plan import Tensors, UpdatePlan

Group = dict[str, Any]
OWN_NAMES = (  # attributes of the shell, which no captured step knows
    *("seed", "compiled", "weight_codes", "patterns", "_model_names", "_placements"),
    *("_streams", "_numbers", "_updates", "_begun", "_steady", "_steps", "_plans", "_writer", "_edits"),
)
Parameter = tuple[int, Group, Tensor]  # its number, its group, itself


class OptimizerShell(Protocol):
    """A ``torch.optim.Optimizer`` around the compiled step; the docstrings are those of ``EncodedOptimizer``."""

    plain: Any  # the class whose step is captured
    refused_ways: tuple[str, ...]
    seed: int
    compiled: bool
    weight_codes: bool
    patterns: dict[str, Any]
    defaults: Group
    param_groups: list[Group]
    _placements: dict[Tensor, Placement]
    _writer: Any  # CodeWriter
    _optimizer_load_state_dict_pre_hooks: Any
    _optimizer_load_state_dict_post_hooks: Any

    @property
    def state(self) -> Any: ...

    @property
    def names(self) -> Names: ...

    def _parameters(self) -> Iterable[Parameter]: ...

    def _placed(self, p: Tensor, group: Mapping[str, Any]) -> Placement: ...

    def _start(self, p: Tensor, group: Group) -> None: ...

    def placement(self, p: Tensor, group: Mapping[str, Any]) -> Placement: ...

    def check_options(self, group: Mapping[str, Any]) -> None: ...

    def update_of(self, p: Tensor, group: Mapping[str, Any]) -> CapturedUpdate: ...

    def plan_of(self, p: Tensor, group: Mapping[str, Any]) -> UpdatePlan: ...

    def step_function(self, p: Tensor) -> tuple[UpdatePlan, Tensors]: ...

    def check_parameter(self, p: Tensor, name: str) -> None: ...

    def update_parameters(self, parameters: list[Parameter]) -> None: ...

    def clear_caches(self) -> None: ...
