"""Code that fits parameters of all shapes: which layouts are one, what fits them, and that numbers stay as they are."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.optim import compiled_step, open_sizes, row_views
from fp8compile.optim.open_sizes import Fakes, Open, TensorLayout, closed

CPU = torch.device("cpu")
opened = functools.partial(open_sizes.opened, rows_alone=False)
ROWS, GROUPS = Open("rows", 1), Open("groups", 1)


def of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def signature(p: nn.Parameter, **options: Any) -> list[Any]:
    """What the pieces of one parameter's update are compiled as."""
    p.grad = torch.zeros_like(p)
    optimizer = optim.AdamW([("w", p)], overrides={"*": "e4m3_expanded"}, compiled=False, **options)
    plan, tensors = optimizer.step_function(p)
    return [
        compiled_step.signed(piece, row_views.viewed(tensors, view))[0] for piece, view in row_views.pieces(plan, p)
    ]


ALIKE = {
    "rows of whole groups": [(64, 256), (2, 128), (100, 3, 128), (64, 128, 3, 3)],
    "rows that end in a short group": [(64, 320), (7, 64, 5, 5), (96, 1176)],
    "rows that end in a short group, odd": [(64, 259), (8, 401)],
    "rows that end in a short group behind one": [(64, 192), (7, 248)],
    "one short group a row": [(300, 24), (5, 120), (12, 8, 3, 3)],
    "one short group a row, odd": [(64, 3), (5, 127), (8, 3, 3, 3)],
    "64 a row": [(64, 64), (5, 64), (32, 16, 2, 2)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ALIKE)
def test_shapes_of_a_kind_are_one(kind: str, dtype: torch.dtype) -> None:
    found = [signature(nn.Parameter(torch.zeros(shape, dtype=dtype, device="meta"))) for shape in ALIKE[kind]]
    assert all(each == found[0] for each in found)
    assert len(found[0]) == (2 if "end in" in kind else 1)


def test_kinds_are_different() -> None:
    """But for short groups behind others: their code is one, however many there are before."""
    found = [signature(nn.Parameter(torch.zeros(ALIKE[kind][0], device="meta"))) for kind in ALIKE]
    assert len({first for first, *_ in found}) == len(ALIKE)
    assert len({tail for _, *tails in found for tail in tails}) == 2


def test_what_is_left_open() -> None:
    long = {"param": of((6, 3, 128), (400, 128, 1)), "amax": of((6, 3, 1), (4, 1, 1))}
    layouts, sizes = opened(long)
    stride, across = Open("stride 0", 8), Open("stride 1", 1)
    assert layouts["param"] == TensorLayout((ROWS, GROUPS, 128), (stride, 128, 1), torch.float32, CPU)
    assert layouts["amax"] == TensorLayout((ROWS, GROUPS, 1), (across, 1, 1), torch.float32, CPU, aligned=False)
    assert sizes == {ROWS: 6, GROUPS: 3, stride: 400, across: 4}


def test_on_a_cpu_rows_alone_are_left_open() -> None:
    for kind, shapes in ALIKE.items():
        found = [signature(nn.Parameter(torch.zeros(shape))) for shape in ((8, *shapes[0][1:]), shapes[0])]
        assert found[0] == found[1], kind
        layouts = [layout for each in found[0] for _, layout in each.layouts]
        assert {n for each in layouts for n in (*each.shape, *each.stride) if isinstance(n, Open)} == {ROWS}


def test_sizes_of_one_are_not() -> None:
    """What is one may be broadcast, and its stride is nobody's."""
    layouts, sizes = opened({"param": of((1, 1, 128), (128, 128, 1)), "amax": of((1, 1, 1), (1, 1, 1))})
    assert layouts["param"].shape == (1, 1, 128) and layouts["amax"].shape == (1, 1, 1) and sizes == {}


def test_planes_of_a_group_are_not() -> None:
    """128 bytes apart is a multiple of 16, which a GPU's loads ask for."""
    layouts, _ = opened({"param/0": of((6, 64), (128, 1)), "codes": of((6, 64), (64, 1)), "amax": of((6, 1), (1, 1))})
    assert layouts["param/0"].stride == (128, 1) and layouts["amax"].stride == (1, 1)
    assert {each.shape[1] for each in layouts.values()} == {64, 1}, "a loop of known length is none"


def test_equal_strides_have_one_name() -> None:
    layouts, _ = opened({"param": of((6, 40), (168, 1)), "codes": of((6, 40), (168, 1)), "amax": of((6, 1), (2, 1))})
    assert layouts["param"] == layouts["codes"]
    assert layouts["amax"].stride != layouts["param"].stride


def test_what_32_bits_do_not_count_has_code_of_its_own() -> None:
    with torch.device("meta"):
        large, small = (torch.empty(rows, 128) for rows in (2**24 + 1, 2**24 - 1))
    assert opened({"param": large}) == (closed({"param": large}), {})
    assert opened({"param": small})[1] == {ROWS: 2**24 - 1}


def test_what_compiling_assumed_is_what_code_fits() -> None:
    fakes = Fakes()
    layouts, sizes = opened({"param": torch.empty(6, 128)})
    first = fakes.of(layouts, sizes)["param"]
    fakes.of(layouts, sizes)
    assert fakes.fit([{ROWS: 6}, {ROWS: 7}]) and fakes.fit([{ROWS: 2**24 - 1}, {ROWS: 2}])
    assert not fakes.fit([{ROWS: 2**24}, {ROWS: 2}]) and not fakes.fit([{ROWS: 6}, {ROWS: 1}])
    assert first.shape[0] % 2 == 0  # a guard
    assert fakes.fit([{ROWS: 8}, {ROWS: 7}]) and not fakes.fit([{ROWS: 7}, {ROWS: 8}])


def stepped(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Parameters after two compiled steps."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    options: Any = {"overrides": {"*": "int8_companded"}, "lr": 1e-2, "momentum": 0.9}
    optimizer = optim.SGD([(f"w{i}", p) for i, p in enumerate(parameters)], **options)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        versions = [p._version for p in parameters]
        optimizer.step()
        assert all(p._version > before for p, before in zip(parameters, versions, strict=True)), (
            "autograd must see it"
        )
    return parameters


SHAPES = [(40, 128), (3, 640), (8, 208)]


@pytest.mark.parametrize("rows_alone", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_numbers_are_those_of_code_for_each_shape(rows_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded stochastically, by element number: in the second piece of a row too."""
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    monkeypatch.setattr(compiled_step, "pieces_of_all", lambda several: [row_views.pieces(*each) for each in several])
    monkeypatch.setattr(compiled_step, "rows_alone", lambda _: rows_alone)
    open_to_all = stepped(SHAPES)
    assert len(compiled_step.COMPILED) == 3  # whole groups; a group before a short one; a short one
    monkeypatch.setattr(compiled_step, "opened", lambda tensors, **_: (closed(tensors), {}))
    each = stepped(SHAPES)
    assert all(map(torch.equal, open_to_all, each))


def test_what_does_not_fit_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped([SHAPES[0], (8, 128)])
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    monkeypatch.setattr(open_sizes.Fakes, "fit", lambda self, sizes: False)
    found = stepped([SHAPES[0], (8, 128)])
    layouts = [dict(signature.layouts)["param"].shape for signature in compiled_step.COMPILED]
    assert layouts == [(ROWS, 128), (40, 128), (8, 128)]
    assert all(map(torch.equal, found, expected))


PROGRAM = """
import json, torch
from fp8compile import optim
p = torch.nn.Parameter(torch.randn({rows}, 128))
p.grad = torch.randn_like(p)
optim.SGD([("w", p)], lr=0.1).step()
print(json.dumps(torch._dynamo.utils.counters["inductor"]))
"""


def test_a_second_process_finds_it_compiled(tmp_path: Path) -> None:
    found = []
    for rows in (8, 21):
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(rows=rows)],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(told.stdout.splitlines()[-1]))
    assert found[0]["fxgraph_cache_miss"] == 1 and "fxgraph_cache_hit" not in found[0]
    assert found[1]["fxgraph_cache_hit"] == 1 and "fxgraph_cache_miss" not in found[1]
