"""A step's graph without AOTAutograd: what it may write, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.optim.open_sizes import Fakes, Open, closed, opened
from fp8compile.optim.traced_once import lowered, traced

ROWS = Open("rows", 1)


def fakes_of(**tensors: Tensor) -> tuple[Fakes, list[Tensor]]:
    fakes = Fakes()
    return fakes, [*fakes.of(closed(tensors), {}).values()]


def test_copies_into_inputs_are_written_and_sizes_stay_open() -> None:
    layouts, sizes = opened({"x": torch.zeros(6, 128), "y": torch.zeros(6, 128)}, rows_alone=True)
    fakes = Fakes()
    like = fakes.of(layouts, sizes)
    flat = [*fakes.sizes, *like.values()]

    def step(rows: int, x: Tensor, y: Tensor) -> tuple[()]:
        new = torch.lerp(x, y, 0.25)
        x.copy_(new)
        return ()

    code = lowered(traced(step, flat), flat, fakes.mode)
    for rows in (6, 9):
        x, y = torch.randn(rows, 128), torch.randn(rows, 128)
        expected = torch.lerp(x, y, 0.25)
        code(rows, x, y)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x, y: (x.copy_(y), x + 1)[1], "reads what the step has written"),
        (lambda x, y: (x * 2).add_(y), "writes what is no input"),
        (lambda x, y: x.mul_(y), "writes what is no input"),
    ],
    ids=["read behind it", "a value in place", "an input in place"],
)
def test_what_aotautograd_would_be_needed_for_is_refused(step: object, why: str) -> None:
    _, flat = fakes_of(x=torch.zeros(4), y=torch.zeros(4))
    with pytest.raises(AssertionError, match=why):
        traced(step, flat)  # type: ignore[arg-type]


def test_a_dump_shows_operations_as_they_were_written() -> None:
    _, flat = fakes_of(x=torch.zeros(4), y=torch.zeros(4))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * y

    names = [str(node.target) for node in traced(step, flat, decomposed=False).graph.nodes]
    assert "aten.silu.default" in names
    assert "aten.silu.default" not in [str(node.target) for node in traced(step, flat).graph.nodes]


def test_what_does_nothing_is_left_out() -> None:
    """Bits viewed as another dtype's and back, an alias; not bits that are computed with between."""
    _, flat = fakes_of(x=torch.zeros(4), y=torch.zeros(4))

    def step(x: Tensor, y: Tensor) -> tuple[Tensor]:
        back = torch.ops.aten.alias(x).view(torch.int32).view(torch.float32)
        kept = (y.view(torch.int32) & 1).view(torch.float32)
        return (back + kept,)

    operations = [n.target for n in traced(step, flat).graph.nodes if n.op == "call_function"]
    aten = torch.ops.aten
    view = aten.view.dtype
    assert operations == [view, aten.bitwise_and.Scalar, view, aten.add.Tensor]


def test_it_is_inductors_cache_that_finds_it_again() -> None:
    """Its key needs the sizes' own names, which the context of the trace has."""
    counted = private.counters["inductor"]
    fakes, flat = fakes_of(x=torch.zeros(4, 128))
    graph = traced(lambda x: (x.sin() * 1.2345,), flat)
    before = counted["fxgraph_cache_bypass"]
    lowered(graph, flat, fakes.mode)
    assert counted["fxgraph_cache_bypass"] == before
