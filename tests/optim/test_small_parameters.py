"""Small parameters share a kernel whatever their shapes: which ones, in which pieces, and with which numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import _torch as private
from fp8compile import optim
from fp8compile.numerics.states.registry import ALIASES, SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY
from fp8compile.optim import compiled_step
from fp8compile.optim.row_views import pieces, viewed
from fp8compile.optim.small_parameters import SLOTS, pieces_of_all

SHARED = [(8, 24), (5, 127), (8, 3, 3, 3), (64, 64), (2, 200), (64, 320), (7, 64, 5, 5), (96, 401)]
SHAPES = [(8, 24), (2, 200), (9, 3, 3, 3)]  # of a short group; of two, the second short; odd
PACKED = {"dynamic4", "linear4", "rank1_linear4", "int4_companded", "log4", "log2"}
OTHERS = [(64, 256), (3, 24), (1, 200), (8, 129), (300,), (4096, 130)]


def step_of(shape: tuple[int, ...], device: str = "cpu", **options: Any) -> tuple[Any, dict[str, Tensor]]:
    p = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device))
    p.grad = torch.zeros_like(p)
    options = {"overrides": {"*": "e4m3_expanded"}} | options
    return optim.AdamW([("w", p)], compiled=False, **options).step_function(p)


def pieces_of(*shapes: tuple[int, ...], **options: Any) -> list[Any]:
    return pieces_of_all(
        (plan, tensors["param"]) for plan, tensors in (step_of(shape, **options) for shape in shapes)
    )


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_pieces_are_the_parameter_and_all_have_one_signature(shape: tuple[int, ...]) -> None:
    plan, tensors = step_of(shape)
    [mine] = pieces_of_all([(plan, tensors["param"])])
    numbers = torch.arange(tensors["param"].numel()).view(shape)
    assert torch.cat([view(numbers).flatten() for _, view in mine]).sort().values.equal(numbers.flatten())
    assert all(view(numbers)[0, 0] == piece.offset for piece, view in mine)
    found = {compiled_step.signed(piece, viewed(tensors, view))[0] for piece, view in mine}
    other_plan, other = step_of((6, 40))
    [[(piece, view), *_]] = pieces_of_all([(other_plan, other["param"])])
    assert found == {compiled_step.signed(piece, viewed(other, view))[0]}
    [signature] = found
    assert {name for name, layout in signature.layouts if layout.aligned} == {"step", "numbers", "stream"}


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_others_are_as_they_were(shape: tuple[int, ...]) -> None:
    """Whole groups; few rows; one row; a tail of one element, a size that is never left open; what is large."""
    assert not any(piece.any_width for piece, _ in pieces_of(shape)[0])


FORMATS = [
    *((a, "e4m3_expanded") for a in STATE_FORMATS if a not in UNSIGNED_ONLY),
    *(("fp32", b) for b in STATE_FORMATS if b not in SIGNED_ONLY),
    *ALIASES.values(),
]


@pytest.mark.parametrize("state_format", FORMATS, ids="-".join)
def test_formats_that_are_packed_or_have_no_groups_are_as_they_were(state_format: tuple[str, str]) -> None:
    """Whatever they are, pieces have signatures: parts of one do not differ in width."""
    plan, tensors = step_of((64, 320), overrides={"*": state_format})
    [mine] = pieces_of_all([(plan, tensors["param"])])
    for piece, view in mine:
        compiled_step.signed(piece, viewed(tensors, view))
    by_groups = not PACKED & {*state_format} and not {*state_format} <= {"fp32", "bf16"}
    assert all(piece.any_width == by_groups for piece, _ in mine)


def test_other_layouts_are_as_they_were() -> None:
    plan, tensors = step_of((64, 320))
    transposed = tensors["param"].t()
    assert not pieces_of_all([(plan, transposed)])[0][0][0].any_width


def test_many_small_ones_have_kinds_of_their_own() -> None:
    """LoRA's [4096, 16]: a kernel that holds 128 elements a row would compute eight times as many."""
    shape, slots = (4096, 16), 4096 * 128
    few = pieces_of(*[shape] * (SLOTS // slots))
    many = pieces_of(*[shape] * (SLOTS // slots + 1))
    assert all(piece.any_width for each in few for piece, _ in each)
    assert not any(piece.any_width for each in many for piece, _ in each)


def stepped(monkeypatch: pytest.MonkeyPatch, *, shared: bool) -> list[Tensor]:
    """Parameters and states after two compiled steps."""
    if not shared:
        monkeypatch.setattr(compiled_step, "pieces_of_all", lambda several: [pieces(*each) for each in several])
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
    optimizer = optim.AdamW(
        [(f"w{i}", p) for i, p in enumerate(parameters)], overrides={"*": "e4m3_expanded"}, lr=1e-2
    )
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [*parameters, *(t for p in parameters for t in optimizer.state[p].values())]


@pytest.mark.parametrize("generated", [False, True], ids=["node by node", "generated"])
def test_code_for_all_gives_the_numbers_of_code_for_each(generated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded stochastically, by element number. One graph for all shapes, of no size in particular."""
    if not generated:
        monkeypatch.setattr(private, "compile_fx_inner", lambda graph, *_, **__: lambda taken: graph(*taken))
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    # Loops of torch 2.11 end in scalar code, which has a logarithm of its own: all of it is scalar there.
    scalar = {"cpp.simdlen": 1} if torch.__version__ < "2.12" else {}
    with private.inductor_config.patch(scalar):
        found = stepped(monkeypatch, shared=True)
    [(_, fakes)] = compiled_step.COMPILED.values()
    assert not [guard for guard in fakes.env.guards if "Eq(" in str(guard.expr)]
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    with private.inductor_config.patch(scalar):
        expected = stepped(monkeypatch, shared=False)
    assert len(compiled_step.COMPILED) == 4
    assert all(map(torch.equal, map(_bits, found), map(_bits, expected)))


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)
