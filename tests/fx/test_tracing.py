"""A function is traced once for values that are alike, and what is put into a graph computes what the function does."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile import _torch as private
from fp8compile.fx import tracing
from fp8compile.fx.graph import splice
from fp8compile.fx.tracing import LAYOUT, fake_result
from fp8compile.numerics import E4M3, INT8, Groupwise


@pytest.fixture(autouse=True)
def nothing_traced() -> None:
    tracing._traced.clear()


class Spliced:
    """A graph with inputs of the given values, and functions spliced into it; counts how many were traced."""

    def __init__(self, *values: Tensor) -> None:
        self.mode, self.graph, self.values = FakeTensorMode(), Graph(), values
        self.inputs = [self.graph.placeholder(f"x{i}") for i in range(len(values))]
        for node, value in zip(self.inputs, values, strict=True):
            node.meta["val"] = self.mode.from_tensor(value)
        self.out = self.graph.output(())
        self.traces = 0

    def splice(self, fn: Callable[..., Any], *nodes: Node) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return make_fx(*args, **kwargs)

        make_fx = private.make_fx
        with mock.patch.object(private, "make_fx", counted):
            return splice(self.graph, fn, *nodes, before=self.out)

    def run(self, results: Any) -> Any:
        self.out.args = (results,)
        return GraphModule({}, self.graph)(*self.values)


def encoding(codec: Groupwise) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        return codec.encode(x)

    return encode


def scaling(by: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        return x * by

    return scaled


def test_values_alike_are_traced_once_and_each_result_is_its_own() -> None:
    a, b = torch.randn(4, 64), torch.randn(4, 64)
    spliced = Spliced(a, b)
    codec = Groupwise(INT8, 16)
    made = [spliced.splice(encoding(codec), node) for node in spliced.inputs]
    assert spliced.traces == 1
    storages = {part.meta["val"].untyped_storage()._cdata for parts in made for part in parts}
    assert len(storages) == 4, "what lies in one storage is taken for one value"
    for found, expected in zip(spliced.run(made), map(codec.encode, (a, b)), strict=True):
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(8, 32),
        torch.randn(4, 64).to(torch.bfloat16),
        torch.randn(64, 4).t(),
        torch.randn(4, 128)[:, :64],
    ],
    ids=["shape", "dtype", "strides", "rows apart"],
)
def test_values_that_differ_are_traced_by_themselves(other: Tensor) -> None:
    spliced = Spliced(torch.randn(4, 64), other)
    made = [spliced.splice(encoding(Groupwise(INT8, 16)), node) for node in spliced.inputs]
    assert spliced.traces == 2
    for (codes, _), value in zip(made, spliced.values, strict=True):
        assert codes.meta["val"].shape == Groupwise(INT8, 16).encode(value)[0].shape


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (encoding(Groupwise(INT8, 16)), encoding(Groupwise(E4M3, 16))),
        (encoding(Groupwise(INT8, 16)), encoding(Groupwise(INT8, 32))),
        (scaling(2), scaling(2.0)),
        (scaling(0.5), scaling(0.25)),
        (scaling(0.0), scaling(-0.0)),
        (lambda x: x + 1, lambda x: x + 2),
    ],
)
def test_functions_that_differ_are_traced_by_themselves(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    spliced = Spliced(torch.randn(4, 64))
    made = [spliced.splice(fn, *spliced.inputs) for fn in (one, other)]
    assert spliced.traces == 2
    for found, fn in zip(spliced.run(made), (one, other), strict=True):
        expected = fn(*spliced.values)
        assert all(map(torch.equal, found, expected)) if isinstance(found, tuple) else torch.equal(found, expected)


def test_one_value_for_two_operands_is_another_function_than_two() -> None:
    a, b = torch.randn(4, 64), torch.randn(4, 64)
    spliced = Spliced(a, b)

    def less(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    (x, y), results = spliced.inputs, []
    for operands in ((x, x), (x, y), (y, x)):
        results.append(spliced.splice(less, *operands))
    assert spliced.traces == 2
    assert all(map(torch.equal, spliced.run(results), (a - a, a - b, b - a)))


def test_what_is_closed_over_and_cannot_be_compared_is_traced_each_time() -> None:
    spliced = Spliced(torch.randn(4, 64))
    factors = {"by": 2.0}

    def scaled(x: Tensor) -> Tensor:
        return x * factors["by"]

    first = spliced.splice(scaled, *spliced.inputs)
    factors["by"] = 3.0
    results = [first, spliced.splice(scaled, *spliced.inputs)]
    assert spliced.traces == 2
    [x] = spliced.values
    assert all(map(torch.equal, spliced.run(results), (x * 2, x * 3)))


def test_values_of_copies_are_what_their_operations_give() -> None:
    """Not a second trace but a layout that was noted makes most of them."""
    spliced = Spliced(torch.randn(4, 64).to(torch.bfloat16), torch.randn(4, 64).to(torch.bfloat16))
    for node in spliced.inputs:
        spliced.splice(encoding(Groupwise(INT8, 16)), node)
    checked = 0
    for node in (n for n in spliced.graph.nodes if n.op == "call_function"):
        with spliced.mode:
            expected, found = fake_result(node), node.meta["val"]
        assert private.is_plain_fake(found) and (found.dtype, found.device) == (expected.dtype, expected.device)
        assert (found.shape, found.stride(), found.storage_offset()) == (expected.shape, expected.stride(), 0)
        checked += LAYOUT not in node.meta
    assert checked > 40


def test_a_nan_in_two_copies_is_no_constant_that_they_share() -> None:
    """What two encodings share would be saved for backward by the one's half for the other's."""
    spliced = Spliced(torch.randn(4, 64), torch.randn(4, 64))
    for node in spliced.inputs:
        spliced.splice(encoding(Groupwise(INT8, 16)), node)
    constants = [n for n in spliced.graph.nodes if n.target is torch.ops.aten.scalar_tensor.default]
    first, second = (n.args[0] for n in constants)
    assert math.isnan(first) and math.isnan(second) and first is not second  # type: ignore[arg-type]


def test_a_view_shares_the_memory_of_what_it_looks_at() -> None:
    spliced = Spliced(torch.randn(4, 64), torch.randn(4, 64))

    def turned(x: Tensor) -> Tensor:
        return x.permute(1, 0)

    for node in spliced.inputs:
        made = spliced.splice(turned, node)
        assert made.meta["val"].untyped_storage()._cdata == node.meta["val"].untyped_storage()._cdata
    assert spliced.traces == 1


def test_a_later_compilation_takes_what_an_earlier_one_traced() -> None:
    x = torch.randn(4, 256)
    for traces in (1, 0):
        spliced = Spliced(x)
        codes, inv_scale = spliced.splice(encoding(Groupwise(E4M3, 128)), spliced.inputs[0])
        assert spliced.traces == traces
        assert all(private.detect_fake_mode([n.meta["val"]]) is spliced.mode for n in (codes, inv_scale))
        assert all(
            torch.equal(a, b)
            for a, b in zip(spliced.run((codes, inv_scale)), Groupwise(E4M3, 128).encode(x), strict=True)
        )


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch._inductor.config.patch(fallback_random=True),
        lambda: torch._inductor.config.patch(emulate_precision_casts=True),
        torch.no_grad,
        lambda: torch.autocast("cpu"),
    ],
    ids=["decompositions", "a setting of Inductor", "grad mode", "autocast"],
)
def test_other_settings_are_traced_by_themselves(other: Callable[[], Any]) -> None:
    one, two = Spliced(torch.randn(4)), Spliced(torch.randn(4))
    one.splice(scaling(2), one.inputs[0])
    with other():
        two.splice(scaling(2), two.inputs[0])
    assert (one.traces, two.traces) == (1, 1)


def test_no_more_than_so_many_graphs_are_kept() -> None:
    spliced = Spliced(torch.randn(4))
    with mock.patch.object(tracing, "MOST", 2):
        for by in range(5):
            spliced.splice(scaling(by), spliced.inputs[0])
            assert len(tracing._traced) <= 2
    assert spliced.traces == 5


def test_no_compilation_outlives_itself() -> None:
    """A fake mode holds every value of its compilation; what is kept holds none. Symbols go with their compilation."""
    spliced = Spliced(torch.randn(4))
    spliced.splice(scaling(2), spliced.inputs[0])
    mode = weakref.ref(spliced.mode)
    del spliced
    gc.collect()
    assert mode() is None and len(tracing._traced) == 1

    symbolic, x = FakeTensorMode(shape_env=ShapeEnv()), torch.randn(4)
    size = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    value = symbolic.from_tensor(x, symbolic_context=size)
    tracing.traced(scaling(2), [value], symbolic)
    assert len(tracing._traced) == 1 and len(tracing._of_symbols[symbolic]) == 1
