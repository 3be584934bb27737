"""Statistics of a model that fp8compile has not compiled, by hooks.

    a parameter         the gradient of each backward, before it is added to ``.grad``       weight, backward
    a leaf module       the gradient of each tensor it returns, and of each one it is given
                        that no other leaf module returned                                    activation, backward
                        what it returns                                                      activation, forward
    the model           what it is given: an inf or NaN there is the data's                  data, forward

All hooks are on tensors (as ``Tensor.register_hook``), so that modules may work in place, and sums over several uses of a
tensor are seen as autograd has summed them. A row is created when its tensor is first seen.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fp8compile.fx.aot import BACKWARD, FORWARD
from fp8compile.fx.graph import dtype_text
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import COLUMNS, EDGES, fold, statistics
from fp8compile.observe.records import ACTIVATION, DATA, WEIGHT, Observations, StatisticsRow
from fp8compile.recipe.patterns import in_module

KINDS = (WEIGHT, ACTIVATION)
INPUT = "input"  # StatisticsRow.op of what the model is given, as in compiled graphs


class Watched(Observations):
    """What hooks see of a model; ``remove()`` takes them off. Made by ``watch``.

    Attributes:
        hooked_ids: ids of the parameters whose gradients are seen. Sharded ones (fully_shard) are not among them: autograd
            never sees those, so a scaler counts their ``.grad``.
        paths: the paths of all modules of the model, also of those without a row yet.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        super().__init__((), device, parameters)
        self.saturates = False
        self.hooked_ids: set[int] = set()
        self.paths: set[str] = set()
        self._index: dict[StatisticsRow, int] = {}
        self._handles: list[Any] = []

    def saturate(self, on: bool) -> None:
        super().saturate(on)
        self.saturates = on

    def remove(self) -> None:
        """Take all hooks off; what was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.hooked_ids.clear()

    @torch.no_grad()
    def see(self, x: Tensor, row: StatisticsRow) -> None:
        """Fold the statistics of ``x`` into its row. A dtype without edges (float64, integers) has no statistics."""
        if x.dtype in EDGES and x.numel():
            i = self._row(row)
            new = statistics(x.detach()).to(self.current.device, non_blocking=True)
            self.current[i] = fold(self.current[i], new)

    def _row(self, row: StatisticsRow) -> int:
        if row not in self._index:
            self._index[row] = len(self.rows)
            self.rows = (*self.rows, row)
            zeros = self.current.new_zeros(1, len(COLUMNS))
            self.current = torch.cat([self.current, zeros])
            self.first = torch.cat([self.first, self.first.new_full((1,), -1)])
            past = [(step, torch.cat([seen, zeros])) for step, seen in self.history]
            self.history.clear()
            self.history.extend(past)
        return self._index[row]

    def on_gradient(self, path: str, op: str, kind: str) -> Callable[[Tensor], Tensor | None]:
        """A tensor hook: sees the gradient, and clips it where that is asked for."""

        def hook(gradient: Tensor) -> Tensor | None:
            values = gradient
            if gradient.layout == torch.sparse_coo:
                gradient = gradient.coalesce()
                values = gradient._values()
            self.see(values, StatisticsRow(path, "", op, kind, BACKWARD, dtype_text(values)))
            self.additions += 1
            if not self.saturates or values.dtype != torch.float16:
                return None
            clipped = values.clamp(-FP16_MAX, FP16_MAX)
            if values is gradient:
                return clipped
            return torch.sparse_coo_tensor(
                gradient._indices(), clipped, gradient.shape, is_coalesced=True, check_invariants=False
            )

        return hook


def watch(model: nn.Module, kinds: Sequence[str] = KINDS, modules: Sequence[str] = ("*",)) -> Watched:
    """Observe a model that is not compiled, until ``remove()``. The hooks do not keep the model alive.

    Args:
        model: the model, or the DistributedDataParallel around it. Build it, shard it and move it before.
        kinds: some of ("weight", "activation").
        modules: fnmatch patterns on module paths; "layers.*" is all under layers.

    Raises:
        ValueError: a kind that does not exist, a pattern that matches no module, a model made by torch.compile.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("hooks do not see into a compiled model: watch the module before torch.compile, or compile it "
                         'with backend="fp8compile", which keeps statistics of its own')  # fmt: skip
    check_kinds(kinds)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    check_patterns(modules, [name for name, _ in model.named_modules() if name])
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    watched = Watched(parameters, device)
    watched.paths = {name for name, _ in model.named_modules()}
    if WEIGHT in kinds:
        _watch_weights(watched, model, modules)
    _watch_modules(watched, model, modules, gradients=ACTIVATION in kinds)
    return watched


def check_kinds(kinds: Sequence[str]) -> None:
    """Raises ValueError for a kind that does not exist, or for none at all."""
    is_list = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    if not is_list or not kinds or any(each not in KINDS for each in kinds):
        raise ValueError(f"kinds={kinds!r}: a tuple of {', '.join(map(repr, KINDS))}")


def check_are_patterns(patterns: Sequence[str]) -> None:
    """Raises ValueError for what is not a sequence of patterns."""
    if isinstance(patterns, str):
        raise ValueError(f"modules={patterns!r} must be a tuple of patterns: modules=({patterns!r},)")
    is_list = isinstance(patterns, Sequence) and all(isinstance(each, str) for each in patterns)
    if not is_list or not patterns:
        raise ValueError(f'modules={patterns!r}: a tuple of patterns on module paths is needed, ("*",) for all')


def check_patterns(patterns: Sequence[str], paths: Sequence[str]) -> None:
    """Raises ValueError for a pattern that matches none of the paths, with the nearest of them."""
    check_are_patterns(patterns)
    for pattern in patterns:
        if pattern != "*" and not any(in_module(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or list(paths[:3])
            raise ValueError(f"modules: {pattern!r} matches no module; near it: {', '.join(near) or 'none at all'}")


def chosen(path: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns matches the module at ``path``."""
    return any(pattern == "*" or in_module(path, pattern) for pattern in patterns)


def _watch_weights(watched: Watched, model: nn.Module, modules: Sequence[str]) -> None:
    owners = {name: type(module).__name__ for name, module in model.named_modules()}
    for name, p in model.named_parameters():
        owner = name.rpartition(".")[0]
        if p.requires_grad and chosen(owner, modules) and not isinstance(p, DTensor):
            watched._handles.append(_on_tensor(p, watched.on_gradient(name, owners[owner], WEIGHT)))
            watched.hooked_ids.add(id(p))


def _watch_modules(watched: Watched, model: nn.Module, modules: Sequence[str], *, gradients: bool) -> None:
    watched._handles.append(model.register_forward_pre_hook(_see_data(watched), with_kwargs=True))
    for path, module in model.named_modules():
        if next(module.children(), None) is None and chosen(path, modules):
            op = type(module).__name__
            if gradients:
                hook = _hook_inputs(watched, path, f"{op}.input")
                watched._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            watched._handles.append(module.register_forward_hook(_hook_outputs(watched, path, op, gradients)))


def _see_data(watched: Watched) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        for x in _tensors((args, kwargs)) if torch.is_grad_enabled() else ():
            watched.see(x, StatisticsRow("", "", INPUT, DATA, FORWARD, dtype_text(x)))

    return hook


def _hook_inputs(watched: Watched, path: str, op: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        for x in _tensors((args, kwargs)):
            if x.requires_grad and not x.is_leaf and getattr(x, "_fp8compile_watched", None) is not watched:
                x._fp8compile_watched = watched  # type: ignore[attr-defined]
                _on_tensor(x, watched.on_gradient(path, op, ACTIVATION))

    return hook


def _hook_outputs(watched: Watched, path: str, op: str, gradients: bool) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output) if torch.is_grad_enabled() else ():  # not in an evaluation
            watched.see(x, StatisticsRow(path, "", op, ACTIVATION, FORWARD, dtype_text(x)))
            if gradients and x.requires_grad and not x.is_leaf:
                x._fp8compile_watched = watched  # type: ignore[attr-defined]
                _on_tensor(x, watched.on_gradient(path, op, ACTIVATION))

    return hook


def _on_tensor(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    return x.register_hook(hook)  # type: ignore[no-untyped-call]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
