"""torchtitan 0.3: overrides for its configuration, and a pass pipeline for its graph_trainer.

    --compile.enable --compile.backend fp8compile       compiles each block; FP8COMPILE_RECIPE names a file with the recipe
    --override.imports fp8compile.integrations.torchtitan.flex_attention,fp8compile.integrations.torchtitan.optimizers
    --compile.pass_pipeline fp8compile                  graph_trainer, with one of the overrides (graph_trainer.py)

torchtitan allows a model with FlexAttention no backend but "inductor" and "aot_eager": another would not lower it to its
kernel. fp8compile compiles by Inductor, which does. ``flex_attention`` puts a module of another class in its place, with the
same forward, so that the check does not find it. ``optimizers`` gives the names Adam and AdamW the optimizers of fp8compile.

torchtitan imports this module where its configuration names it. Until torchtitan is imported, nothing here imports it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fp8compile
from fp8compile.integrations.graph_trainer import register_pipeline
from fp8compile.integrations.transformers import summary

_log = logging.getLogger("fp8compile")


def flex_attention(config: Any) -> Any:
    """The override for ``FlexAttention.Config``: FlexAttention that Inductor compiles as a part of its block.

    Context parallelism looks for FlexAttention by its class too, and does not know this one: leave the override out there.
    """
    from torchtitan.config.override import derive

    return derive(config, _attention().Config)


def optimizers(config: Any, **options: Any) -> Any:
    """The override for ``OptimizersContainer.Config``: Adam and AdamW with encoded states.

    Args:
        config: the container's configuration, whose ``implementation`` means nothing here.
        options: arguments of ``fp8compile.optim.AdamW``, such as ``format``.
    """
    from torchtitan.config.override import derive

    given = {name: {**config.optimizer_factory_kwargs_by_name.get(name, {}), **options} for name in ("Adam", "AdamW")}
    kwargs = {**config.optimizer_factory_kwargs_by_name, **given}
    return derive(config, _container().Config, implementation="for-loop", optimizer_factory_kwargs_by_name=kwargs)


@functools.cache
def _attention() -> Any:
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.protocols.module import Module

    class InductorFlexAttention(Module):  # type: ignore[misc]
        """FlexAttention of another class; its configuration stays one of FlexAttention, by which masks are chosen."""

        @dataclass(kw_only=True, slots=True)
        class Config(FlexAttention.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.kernel_options = config.kernel_options

        forward = FlexAttention.forward

    return InductorFlexAttention


@functools.cache
def _container() -> Any:
    from torchtitan.components.optimizer import OptimizersContainer

    class Optimizers(OptimizersContainer):  # type: ignore[misc]
        """torchtitan's container with optimizers of fp8compile; it logs the report after the first step."""

        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):  # type: ignore[misc]
            pass

        reported = False

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
            ours: dict[str, Callable[..., Any]] = {"Adam": fp8compile.optim.Adam, "AdamW": fp8compile.optim.AdamW}
            found: Callable[..., Any] = ours.get(name) or OptimizersContainer._resolve_optimizer_factory(name)
            return found

        @staticmethod
        def _build_impl_kwargs(config: Any) -> dict[str, Any]:
            return {}  # fused and foreach choose among torch's own implementations

        def step(self, closure: None = None) -> None:
            super().step(closure)
            if not self.reported:
                self.reported = True
                tell(*self.model_parts)

    return Optimizers


def tell(*parts: Any) -> None:
    """Log what was compiled of each model part, with the file the recipe came from; or warn that nothing was."""
    for part in parts:
        try:
            report = fp8compile.report(part)
        except ValueError as error:
            _log.warning("%s", error)
            continue
        _log.info("%s", "; ".join((summary(report), report.recipe, *report.remarks)))


def _register() -> None:
    """Register the overrides with torchtitan under their names, and in a program of graph_trainer the pass pipeline."""
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import override
    from torchtitan.models.common.attention import FlexAttention

    override(target=FlexAttention.Config, exact=True, description="FlexAttention under fp8compile")(flex_attention)
    override(target=OptimizersContainer.Config, exact=True, description="FP8 optimizer states")(optimizers)
    if "torchtitan.experiments.graph_trainer.registry" in sys.modules:
        register_pipeline()


if "torchtitan" in sys.modules:
    _register()
