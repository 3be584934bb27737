"""Script, under ``TRITON_INTERPRET=1``: bugs in the kernels of a small layer with delayed scales, cached weights and merged
dgrads, one at a time, against the same graph node by node. Prints JSON.

What is compared: the result, all gradients, and all four statistics of each operand. Every operand has a scale of its own, or
an exchange of two would not show. Three situations, since a clip that is not counted shows only where there is one:
scales of the right size, scales that are too small, and a NaN in the input.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fp8compile.compiler.backend import fp8compile
from fp8compile.linears import history
from fp8compile.linears import reasons as linear_reasons
from fp8compile.linears.history import Histories
from fp8compile.numerics.delayed import total_statistics
from fp8compile.recipe.recipe import Recipe

from . import fake_h100, flash_on_cpu, interpreter
from .delayed_bugs import BUGS, CLIPPED, EQUIVALENT, KNOWN, NAN, TOTALS_ALONE
from .lowering import Lowered, Rewrite, lower, lower_backend, lowering_config
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers_interpreted import AS_IF_LARGE, Tensors, difference, small
from .run_model import fp8compile_backend

MERGED = Recipe(
    linears={"mode": "tensorwise", "scaling": "delayed", "cache_weights": True, "merge_dgrads": True}, saved="off"
)
RIGHT = [4 * (1 + i / 8) for i in range(11)]  # of the 4 operands of the forward, then of the 7 gradients
SMALL = [1 / 4, 1 / 32, 3 / 16, 1 / 64, *(1 / n for n in (512, 640, 768, 1024, 1280, 4, 5))]
AMAXES: Mapping[str, Sequence[float]] = {KNOWN: RIGHT, CLIPPED: SMALL, NAN: RIGHT}
ROWS = 16  # of partial statistics, and operands, where they are totalled alone
STATISTICS = ("amax", "clipped", "not finite", "elements")


@contextmanager
def knowing(module: nn.Module, amaxes: Sequence[float]) -> Iterator[list[Tensor]]:
    """The operands had these amaxes; no step changes that. Gives the statistics that come back."""
    returned = list[Tensor]()

    def know(each: Histories) -> None:
        each.remember(torch.tensor(amaxes)[:, None].expand_as(each.amaxes).contiguous())

    def make(self: Histories, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        know(self)

    init = Histories.__init__
    for each in history.alive():
        if each.is_of(module):
            know(each)
    added = lambda self, statistics: returned.append(statistics.clone())  # noqa: E731
    with mock.patch.multiple(Histories, __init__=make, add=added, must_measure=lambda self: False):
        yield returned


class Steps:
    """A layer that is compiled once and run in each situation."""

    def __init__(self, backend: Any) -> None:
        self.module, self.args = small("llama")
        torch._dynamo.reset()
        self.fn = torch.compile(self.module, backend=backend, fullgraph=True)

    def results(self, situation: str) -> Tensors:
        """The result, the gradients, and each statistic of each row of the scales."""
        first = self.args[0].detach().clone().requires_grad_()
        if situation == NAN:
            first.data[1, 3, 5] = torch.nan
        self.module.zero_grad()
        with knowing(self.module, AMAXES[situation]) as returned:
            out = self.fn(first, *self.args[1:])
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
            (out * weight).sum().backward()
        (statistics,) = returned
        named = {name: p.grad for name, p in self.module.named_parameters()} | {"x": first.grad}
        found = {name: gradient.clone() for name, gradient in named.items() if gradient is not None}
        assert len(found) == len(named)
        each = {
            f"{what} {i}": row[column] for i, row in enumerate(statistics) for column, what in enumerate(STATISTICS)
        }
        return {"out": out.detach()} | found | each


class Interpreted(Steps):
    """The kernels as generated for sm_90, or with a bug in them."""

    def __init__(self) -> None:
        self.lowered = Lowered()
        backend, inner = fp8compile_backend(MERGED), lower_backend(self.lowered, execute=True)
        super().__init__(lambda gm, inputs: backend(gm, inputs, inner))

    def with_bug(self, situation: str, rewrite: Rewrite | None = None) -> Tensors:
        self.lowered.rewrite = rewrite
        with lowering_config({JOINT_PASS: to_cuda, **AS_IF_LARGE}):
            return self.results(situation)


class Totals:
    """What makes one number of an operand's partial statistics, alone: operand i has its largest in row i.

    In a layer a partial maximum that is lost shows only where it is the largest: in 4 rows of 16.
    """

    def __init__(self) -> None:
        amax = 1 + torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(0)) + torch.eye(ROWS)
        self.parts = amax, *(torch.arange(ROWS * ROWS).reshape(ROWS, ROWS).float() * n for n in (1, 1000))
        self.expected = self.by_column(self.totals(*self.parts))
        self.lowered = lower(self.totals, *self.parts, execute=True)

    @staticmethod
    def totals(*parts: Tensor) -> Tensor:
        return total_statistics([*zip(*(part.unbind() for part in parts), strict=True)], [64] * ROWS)

    def with_bug(self, situation: str, rewrite: Rewrite | None = None) -> Tensors:
        return self.by_column(self.lowered.rerun(*self.parts, rewrite=rewrite))

    @staticmethod
    def by_column(totals: Tensor) -> Tensors:
        return dict(zip(STATISTICS, totals.unbind(1), strict=True))


def node_by_node() -> dict[str, Tensors]:
    backend = functools.partial(fp8compile, options={"recipe": MERGED.changed({"debug.codegen": "eager"})})
    with mock.patch.object(linear_reasons, "fp8_unsupported_reason", lambda device: None):
        steps = Steps(backend)
        return {situation: steps.results(situation) for situation in AMAXES}


def report() -> dict[str, Any]:
    """``{"differences": {situation: number}, "bugs": {bug: number}, "equivalent": {change: number}}``."""
    fake_h100.install()
    interpreter.install()
    flash_on_cpu.install()
    torch.set_num_threads(1)
    totals, layer = Totals(), Interpreted()
    expected = node_by_node() | {TOTALS_ALONE: totals.expected}
    run_in: dict[str, Interpreted | Totals] = dict.fromkeys(AMAXES, layer) | {TOTALS_ALONE: totals}
    found: dict[str, Any] = {
        "differences": {each: difference(run_in[each].with_bug(each), value) for each, value in expected.items()}
    }
    changes = {"bugs": BUGS, "equivalent": {name: bug for name, (bug, _) in EQUIVALENT.items()}}
    for kind, bugs in changes.items():
        found[kind] = {}
        for name, bug in bugs.items():
            results = run_in[bug.situation].with_bug(bug.situation, bug.rewrite())
            found[kind][name] = difference(results, expected[bug.situation])
            assert bug.sites, f"{name}: no kernel {bug.kernel!r} has {bug.before!r}; break something else"
    return found


if __name__ == "__main__":
    print_json(report)
