"""encode_saved on integers: in fewer bytes, exactly, where it is proven that these hold them; where they stay as they are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fp8compile.saved import integers as saved_integers
from tests.support import exactly
from tests.support.exactly import report_of
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled

Picks = Callable[[Tensor], Tensor]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of its own is worth a byte."""
    monkeypatch.setattr(saved_integers, "WORTH_A_KERNEL", 1)


class Picked(nn.Module):
    """Elements along ``dim`` are gathered by what ``pick`` makes of h, which the backward needs again."""

    def __init__(self, pick: Picks, dim: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.pick, self.dim = nn.Linear(64, 64), nn.Linear(64, 64), pick, dim

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h).gather(self.dim, self.pick(h.detach()))


narrowed = functools.partial(exactly.stored, dtype="int64")
left = functools.partial(exactly.left, dtype="int64")


@pytest.mark.usefixtures("any_size")
def test_golden_how_indices_are_read() -> None:
    split = split_of(Picked(lambda h: h.topk(8, 1)[1]), torch.randn(128, 64), linears="off")
    lines = backward_of(split).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if line.startswith(("getitem", "convert_element_type", "scatter"))),
        """\
getitem_1_codes: uint8[128, 8]
convert_element_type_2: int64[128, 8] = decode(getitem_1_codes)
scatter_add: float32[128, 64] = scatter_add(full_default, convert_element_type_2, tangents_1)""",
    )


# What picks along which dimension, of how many rows; the integer that holds all it may pick, and its bytes.
HELD: dict[str, tuple[Picks, int, int, str, int]] = {
    "the largest of 64": (lambda h: h.argmax(1, keepdim=True), 1, 100, "uint8", 1),
    "the smallest, with its place": (lambda h: h.min(1, keepdim=True)[1], 1, 100, "uint8", 1),
    "eight of 64": (lambda h: h.topk(8, 1)[1], 1, 100, "uint8", 1),
    "all in order": (lambda h: h.sort(1)[1], 1, 100, "uint8", 1),
    "halves of places": (lambda h: h.sort(0)[1] // 2, 0, 100, "int8", 1),
    "of what is sorted again": (lambda h: h.topk(8, 1)[1].sort(1)[0], 1, 100, "uint8", 1),
    "as many as a byte holds": (lambda h: h.sort(0)[1], 0, 256, "uint8", 1),
    "one more": (lambda h: h.sort(0)[1], 0, 257, "int16", 2),
    "as many as two bytes hold": (lambda h: h.topk(8, 0)[1], 0, 2**15, "int16", 2),
    "one more than that": (lambda h: h.topk(8, 0)[1], 0, 2**15 + 1, "int32", 4),
}


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("case", HELD)
def test_indices_take_what_holds_them(case: str) -> None:
    pick, dim, rows, name, itemsize = HELD[case]
    found = narrowed(report_of(Picked(pick, dim), torch.randn(rows, 64)))
    assert [codec.split(",")[0] for codec, _, _ in found] == [name]
    assert all(after * 8 == before * itemsize for _, before, after in found)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("case", ["eight of 64", "as many as a byte holds", "one more"])
def test_gradients_are_the_same_to_the_bit(case: str, codegen: str) -> None:
    pick, dim, rows, *_ = HELD[case]
    model, x, found = Picked(pick, dim), torch.randn(rows, 64), []
    for disabled in ("", "encode_saved"):
        twin = copy.deepcopy(model)
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=disabled):
            options = {"saved.min_numel": 0, "saved.format": "off" if disabled else "auto", "debug.codegen": codegen}
            fn = compiled(twin, linears="off", **options)
            fn(x).square().mean().backward()
        found.append(twin.a.bias.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("case", ["the largest of 64", "halves of places"])
def test_a_generated_kernel_stores_few_narrow_too(case: str) -> None:
    pick, dim, rows, name, _ = HELD[case]
    found = narrowed(report_of(Picked(pick, dim), torch.randn(rows, 64)))
    assert [codec.split(",")[0] for codec, _, _ in found] == [name]


# ------------------------------------------------------------------------------------------------ where it declines


def test_what_a_library_makes_takes_a_kernel_more_only_for_a_mebibyte() -> None:
    few, many = (Picked(lambda h, n=n: h.topk(n, 1)[1]) for n in (36, 37))
    x = torch.randn(4096, 64)
    report = report_of(few, x)
    assert not narrowed(report)
    assert left(report) == ["int64 in uint8: 1,032,192 bytes fewer, not worth a kernel of its own"]
    assert narrowed(report_of(many, x)) == [("uint8, which holds all of them", 4096 * 37 * 8, 4096 * 37)]


def test_what_nothing_bounds_stays() -> None:
    report = report_of(Picked(lambda h: (h * 3).long().cumsum(1) % 64), torch.randn(128, 64))
    assert not narrowed(report) and left(report) == ["int64: integers that nothing bounds and RNG states are exact"]


def test_what_was_cast_from_floats_stays_since_a_nan_has_no_range() -> None:
    report = report_of(Picked(lambda h: h.sigmoid().long().cumsum(1)), torch.randn(128, 64))
    assert not narrowed(report) and left(report) == ["int64: integers that nothing bounds and RNG states are exact"]
    of_flags = report_of(Picked(lambda h: (h > 10).long().cumsum(1)), torch.randn(128, 64))
    assert [codec.split(",")[0] for codec, *_ in narrowed(of_flags)] == ["uint8"]


def test_few_stay() -> None:
    report = report_of(Picked(HELD["eight of 64"][0]), torch.randn(8, 64), **{"saved.min_numel": 4096})
    assert not narrowed(report) and left(report) == ["fewer than 4096 elements"]


def test_what_the_recipe_skips_stays() -> None:
    assert not narrowed(report_of(Picked(HELD["eight of 64"][0]), torch.randn(128, 64), skip=["*"]))


@pytest.mark.usefixtures("any_size")
def test_places_among_rows_that_only_a_run_knows_stay_and_those_among_columns_do_not() -> None:
    rows = report_of(Picked(lambda h: h.sort(0)[1], 0), torch.randn(96, 64), dynamic=True)
    assert not narrowed(rows) and left(rows)
    columns = report_of(Picked(lambda h: h.sort(1)[1]), torch.randn(96, 64), dynamic=True)
    assert [codec.split(",")[0] for codec, _, _ in narrowed(columns)] == ["uint8"] and not left(columns)


def test_the_callers_indices_are_his() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return self.a(x).gather(1, places)

    report = report_of(Given(), torch.randn(64, 64), torch.zeros(64, 8, dtype=torch.long))
    assert not narrowed(report) and not left(report)
