"""Lightning: a callback that compiles what a LightningModule trains, in place, and says what came of it.

    Trainer(callbacks=[Fp8CompileCallback()])       lightning.pytorch or pytorch_lightning, whichever the program has imported

Lightning calls ``training_step``, and that calls a module inside. So the inner module is compiled, and not the
LightningModule, whose own ``forward`` no step may run. It is compiled in ``on_fit_start``. ``setup`` is too early: it comes
before ``configure_model``, which may make the module. In ``on_fit_start`` it has its weights, its device, its strategy's
wrapper and its optimizer. None of them is touched: a module compiled in place keeps its class, its parameters and its keys.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

import fp8compile
from fp8compile.integrations.transformers import summary
from fp8compile.reporting.report import Report
from fp8compile.tools.compiled_module import active_recipes

_log = logging.getLogger("fp8compile")
NAMES = ("lightning.pytorch", "pytorch_lightning")
WHICH = (
    "Fp8CompileCallback compiles the one module of {kind} that trains, and {kind} has {found}. "
    "Name what to compile: Fp8CompileCallback(modules={example!r})"
)
MISSING = "Fp8CompileCallback(modules={name!r}): {kind} has no such module; it has {found}"
NOTHING = (
    "Fp8CompileCallback compiled {path!r} of {kind}, and the first step ran no graph of it: {error}. A module that torch.nn "
    "defines, such as nn.Sequential, goes into the forward of a class of its own"
)


class Fp8CompileCallback:
    """A Lightning ``Callback`` that turns fp8compile on.

    Where ``fit`` begins it compiles modules of the LightningModule in place, unless fp8compile has compiled them or a part
    of them already. After the first batch it logs what was compiled under "fp8compile", and warns of each module of which
    that is nothing. The figures ``fp8_matmuls``, ``saved_bytes`` and ``saved_bytes_plain`` go to the Trainer's loggers, once.

    Args:
        options: as in ``torch.compile(options=...)``: a preset, fields of Recipe.
        modules: paths of the modules to compile, from the LightningModule; by default the only one in it that has parameters
            to train.
        show: print the report after the first batch.

    Attributes:
        report: the report after the first batch; None before it, and where nothing was compiled.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Fp8CompileCallback:
        own: Any = cls
        made: Fp8CompileCallback = object.__new__(_with_base(own, _callback_of_lightning()))
        return made

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        modules: str | Sequence[str] | None = None,
        show: bool = False,
    ) -> None:
        self.options, self.modules, self.show = options, modules, show
        self.report: Report | None = None
        self._paths: tuple[str, ...] = ()
        self._looked = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Fp8CompileCallback, (), vars(self)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Compile the modules in place.

        Raises:
            ValueError: no single module that trains, or a path that leads to none.
        """
        self._looked, self.report = False, None
        self._paths = () if self.modules is None and active_recipes(pl_module) else self._chosen(pl_module)
        for path in self._paths:
            if not active_recipes(module := pl_module.get_submodule(path)):
                module.compile(backend="fp8compile", options=None if self.options is None else dict(self.options))

    def _chosen(self, pl_module: nn.Module) -> tuple[str, ...]:
        trained = [n for n, m in pl_module.named_children() if any(p.requires_grad for p in m.parameters())]
        kind, found = type(pl_module).__name__, ", ".join(trained) or "none"
        if self.modules is None:
            if len(trained) != 1:
                raise ValueError(WHICH.format(kind=kind, found=found, example=trained or ["model"]))
            return (trained[0],)
        paths = (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        known = dict(pl_module.named_modules(remove_duplicate=False))
        for name in paths:
            if name not in known or name == "":
                raise ValueError(MISSING.format(name=name, kind=kind, found=found))
        return paths

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """After the first batch: log what was compiled, or warn that nothing was."""
        if self._looked:
            return
        self._looked = True
        for path in self._paths:
            self._warn_of_nothing(pl_module, path)
        try:
            self.report = fp8compile.report(pl_module)
        except ValueError as error:
            if not self._paths:
                _log.warning("%s", error)
            return
        if trainer.is_global_zero:
            self._tell(trainer, self.report)

    def _warn_of_nothing(self, pl_module: nn.Module, path: str) -> None:
        try:
            fp8compile.report(pl_module.get_submodule(path))
        except ValueError as error:
            _log.warning("%s", NOTHING.format(path=path, kind=type(pl_module).__name__, error=error))

    def _tell(self, trainer: Any, report: Report) -> None:
        _log.info("%s", summary(report))
        if self.show:
            print(report)
        figures = {
            "fp8_matmuls": len(report.linears),
            "saved_bytes": report.saved_bytes,
            "saved_bytes_plain": report.saved_bytes_plain,
        }
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)


def _callback_of_lightning() -> type:
    """``Callback`` of the Lightning that the program has imported; else of the one that is installed.

    Raises:
        ImportError: neither is.
    """
    imported = [name for name in NAMES if name in sys.modules]
    for name in (*imported, *NAMES):
        try:
            found: type = importlib.import_module(name).Callback
            return found
        except ModuleNotFoundError:
            continue
    raise ImportError("Fp8CompileCallback needs Lightning: pip install lightning")


@functools.cache
def _with_base(cls: type, base: type) -> Any:
    """``cls`` as a subclass of Lightning's Callback too, whose methods it overrides; Lightning takes no others."""
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), own)
