"""A step in planes computes what the step in one piece does, bit for bit; which steps are taken in planes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8compile import optim
from fp8compile.optim.compiled_step import in_place
from fp8compile.optim.plan import Tensors, UpdatePlan
from fp8compile.optim.planes import named_planes, parted, planes_of
from fp8compile.optim.row_views import pieces, viewed

LOG, NARROW = "4bit_log", ("int4_companded", "log2")
FORMATS: dict[str, Any] = {
    "4bit_log": LOG,
    "2 bits": NARROW,
    "m whole": ("fp32", "log4"),
    "v whole": ("int4_companded", "bf16"),
}


def started(
    shape: tuple[int, ...],
    state_format: Any,
    dtype: torch.dtype = torch.float32,
    master: str = "none",
    **options: Any,
) -> tuple[nn.Parameter, UpdatePlan, Tensors]:
    """A parameter after two steps, and what its third takes."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = optim.AdamW(
        [("w", p)], lr=1e-2, master=master, overrides={"*": state_format}, compiled=False, **options
    )
    for _ in range(2):
        p.grad = torch.randn(shape).to(dtype)
        optimizer.step()
    p.grad = torch.randn(shape).to(dtype)
    return p, *optimizer.step_function(p)


def assert_alike(p: nn.Parameter, plan: UpdatePlan, tensors: Tensors) -> None:
    """The pieces, written where ``viewed`` says, are the step in one piece."""
    expected = plan(tensors)
    found = {name: t.clone() for name, t in tensors.items()}
    for piece, view in pieces(plan, p):
        in_place(piece, viewed(found, view))
    for name, t in expected.items():
        assert torch.equal(found[name], t), name


@pytest.mark.parametrize("state_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(4, 128), (3, 384), (3, 208), (5, 72), (5, 7), (4, 3, 43)], ids=str)
def test_planes_are_the_whole(shape: tuple[int, ...], state_format: Any) -> None:
    """Full groups, rows with a short group, rows of one short group, and lengths that have no planes."""
    assert_alike(*started(shape, state_format))


@pytest.mark.parametrize(
    ("dtype", "master"),
    [("bfloat16", "none"), ("bfloat16", "split"), ("float16", "fp32"), ("bfloat16", "fp16_scaled")],
)
def test_planes_keep_the_bits_of_16_bit_parameters_and_their_random_numbers(dtype: str, master: str) -> None:
    assert_alike(*started((3, 208), LOG, getattr(torch, dtype), master))
    assert_alike(*started((3, 208), NARROW, getattr(torch, dtype), master))


def test_as_many_planes_as_the_narrowest_has_codes_to_a_byte() -> None:
    _, plan, _ = started((4, 128), LOG)
    assert [planes_of(plan, size) for size in (128, 80, 2, 7)] == [2, 2, 1, 1]
    _, plan, _ = started((4, 128), NARROW)
    assert [planes_of(plan, size) for size in (128, 80, 6, 4)] == [4, 4, 1, 1]


@pytest.mark.parametrize(
    "state_format", ["e4m3_expanded", "4bit", ("int4_companded", "e4m3_expanded"), "fp32"], ids=str
)
def test_formats_that_are_not_packed_by_planes_have_none(state_format: Any) -> None:
    _, plan, _ = started((4, 128), state_format)
    assert planes_of(plan, 128) == 1


def test_a_part_is_cut_by_its_width_and_metadata_are_not() -> None:
    whole, code_bytes, amax = torch.arange(256).reshape(2, 128), torch.zeros(2, 32), torch.zeros(2, 1)
    parts = parted(whole, 128, 4)
    assert [*named_planes("grad", parts)] == ["grad/0", "grad/1", "grad/2", "grad/3"]
    assert isinstance(parts, tuple) and parts[1][0, 0] == 32
    assert len(parted(code_bytes, 128, 4)) == 1 and parted(amax, 128, 4) is amax


@pytest.mark.parametrize("shape", [(8, 512), (33, 200)], ids=str)
@pytest.mark.parametrize("state_format", [LOG, NARROW], ids=str)
def test_the_compiled_step_follows_the_eager_one(shape: tuple[int, int], state_format: Any) -> None:
    """v decoded is one of the two levels beside it; which one, an ulp of v decides. Levels are ``step`` octaves apart."""
    found: list[dict[str, torch.Tensor]] = []
    for compiled in (True, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(shape))
        optimizer = optim.AdamW([("w", p)], lr=1e-2, overrides={"*": state_format}, compiled=compiled)
        p.grad = torch.randn(shape)
        optimizer.step()
        decoded = optimizer.export_fp32_state_dict()["state"][0]
        found.append(
            decoded
            | {"param": p.detach(), "amax": optimizer.state[p][f"exp_avg_sq.{state_format_of(p, optimizer)}.amax"]}
        )
    ours, eager = found
    assert torch.allclose(ours["param"], eager["param"], rtol=1e-6, atol=1e-7)
    assert torch.allclose(ours["exp_avg"], eager["exp_avg"], rtol=1e-6, atol=0)
    assert torch.allclose(ours["amax"], eager["amax"], rtol=2.0**-18, atol=0)
    step = 2.0 if state_format is NARROW else 2.0 ** (((ours["amax"].view(torch.int32) & 31).max().item()) / 2 - 8)
    apart = (ours["exp_avg_sq"] / eager["exp_avg_sq"]).log2().abs()
    assert apart.max() <= step * (1 + 2.0**-10)
    assert (apart > 2.0**-10).double().mean() < 0.5, "most are the same"


def state_format_of(p: nn.Parameter, optimizer: optim.AdamW) -> str:
    [name] = {key.split(".")[1] for key in optimizer.state[p] if key.startswith("exp_avg_sq")}
    return name
