"""Kernels of codes are compiled in one choice of blocks; others, and all where the user asks for tuning, are Inductor's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8compile import _torch as private
from fp8compile.compiler import group_kernels
from fp8compile.compiler.code_kernels import with_known_blocks
from fp8compile.linears.first_amax import GROUP

DTYPES = {"codes": torch.float8_e4m3fn, "integers": torch.int8, "values": torch.bfloat16}
LARGE = {"y": 4096, "x": 4096}


def blocks(
    monkeypatch: pytest.MonkeyPatch, tiling: dict[str, Any], *writes: str, reduces: int = 1, **theirs: Any
) -> dict[str, int] | None:
    """The blocks of a kernel that writes these, and reduces so many elements; None: they are Inductor's choice."""
    virtualized, found = private.inductor_virtualized, list[dict[str, Any]]()
    monkeypatch.setattr(group_kernels, "sums_along_rows", lambda node: True)
    node = SimpleNamespace(read_writes=SimpleNamespace(writes=[SimpleNamespace(name=name) for name in writes]))
    features: Any = SimpleNamespace(
        reduction_numel=reduces,
        is_reduction=lambda: reduces > 1,
        reduction_nodes=lambda: [node],
        scheduler_nodes=lambda: [node],
    )
    sizes = SimpleNamespace(
        statically_known_equals=lambda a, b: a == b,
        statically_known_geq=lambda a, b: isinstance(a, int) and a >= b,
    )
    graph: Any = SimpleNamespace(sizevars=sizes, get_dtype=DTYPES.__getitem__)
    handler: Any = SimpleNamespace(triton_kernel_kwargs=lambda kernel, features, sizes, kwargs: kwargs)

    def inner() -> None:
        with virtualized.set_graph_handler(graph):
            found.append(virtualized.choices.triton_kernel_kwargs(object, features, [tiling], dict(theirs)))

    with virtualized.set_choices_handler(handler):
        with_known_blocks(inner)()
    fixed = found[0].pop("fixed_config", None)
    assert found[0] == {name: value for name, value in theirs.items() if name != "fixed_config"}
    return fixed.config if isinstance(fixed, private.FixedTritonConfig) else None


def test_codes_in_order_in_tiles_and_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = blocks(monkeypatch, {"x": 1 << 20, "r0_": 1}, "values", "codes")
    assert in_order == {"XBLOCK": 1024, "num_warps": 4, "num_stages": 1}
    tiles = blocks(monkeypatch, {**LARGE, "r0_": 1}, "codes")
    assert tiles == {"XBLOCK": 32, "YBLOCK": 32, "num_warps": 4, "num_stages": 1}
    groups = blocks(monkeypatch, {"x": 64, "r0_": GROUP}, "integers", reduces=GROUP)
    assert groups == {"XBLOCK": 8, "num_warps": 2, "num_stages": 1}
    assert blocks(monkeypatch, {"x": 64, "r0_": GROUP}, "values", reduces=GROUP) == groups  # an amax, without codes


@pytest.mark.parametrize(
    ("tiling", "writes", "reduces"),
    [
        (LARGE, ("values",), 1),
        ({"x": 1000}, ("codes",), 1),
        ({"y": 16, "x": 4096}, ("codes",), 1),
        ({"y": 4096, "x": torch.SymInt}, ("codes",), 1),
        ({"z": 64, "y": 64, "x": 64}, ("codes",), 1),
        ({"x": 64, "r0_": 2 * GROUP}, ("codes",), 2 * GROUP),
        ({"x": 4, "r0_": GROUP}, ("codes",), GROUP),
        ({"y": 64, "x": 64, "r0_": GROUP}, ("codes",), GROUP),
    ],
    ids=[
        "no codes",
        "short",
        "narrow",
        "of unknown length",
        "three axes",
        "longer sums",
        "few groups",
        "two axes of groups",
    ],
)
def test_others_are_inductor_s(
    monkeypatch: pytest.MonkeyPatch, tiling: dict[str, Any], writes: tuple[str, ...], reduces: int
) -> None:
    assert blocks(monkeypatch, tiling, *writes, reduces=reduces) is None


@pytest.mark.parametrize("setting", ["max_autotune", "max_autotune_pointwise"])
def test_who_asks_for_tuning_gets_it(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    with private.inductor_config.patch({setting: True}):
        assert blocks(monkeypatch, LARGE, "codes") is None


@pytest.mark.parametrize("decided", [{"fixed_config": "theirs"}, {"mix_order_reduction": True}])
def test_what_is_decided_stays(monkeypatch: pytest.MonkeyPatch, decided: dict[str, Any]) -> None:
    assert blocks(monkeypatch, LARGE, "codes", **decided) is None
