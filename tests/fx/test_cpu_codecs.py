"""Codecs in C++ are those in torch, bit for bit: every value of BF16 in every format, FP32 from random bits, every group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.fx.cpu_codecs import DECODED, ENCODED, FEWEST, compiled
from fp8compile.numerics import E4M3, E5M2, INT8, Groupwise, Rowwise, Tensorwise
from fp8compile.numerics.formats import Format

FORMATS = [INT8, E4M3, E5M2]
SCALES = [torch.bfloat16, torch.float32]
SHAPES = [(7, 128), (3, 5, 192), (2, 50, 257), (1, 19), (4, 16), (300, 128)]


def every_bf16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def values() -> Iterator[Tensor]:
    bf16 = every_bf16()
    mixed = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))
    finite = bf16[bf16.isfinite()][: 300 * 200]
    yield from (bf16.reshape(512, 128), bf16[mixed].reshape(256, 256), finite.sort().values.reshape(300, 200))
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1024, 128), generator=generator).to(torch.int32)
    yield bits.view(torch.float32)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator)
        for factor in (0.0, 1e-40, 1e-20, 1.0, 1e30, 3e38):
            yield from ((x * factor).clamp(-3.4e38, 3.4e38), (x * factor).bfloat16())


def groups_of(codec: Groupwise | Rowwise | Tensorwise, x: Tensor) -> tuple[int, int, int]:
    if isinstance(codec, Tensorwise):
        return 1, x.numel(), x.numel()
    if isinstance(codec, Rowwise):
        return x.numel() // x.shape[-1], x.shape[-1], x.shape[-1]
    row = codec.groups.row(x.shape)
    return codec.groups.rows(x.shape), row, codec.groups.size(row)  # type: ignore[return-value]


def is_same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    number = torch.float32 if a.dtype.is_floating_point else a.dtype
    nan = a.to(number).isnan() & b.to(number).isnan()
    return torch.equal(a.view(whole).masked_fill(nan, 0), b.view(whole).masked_fill(nan, 0))


def assert_same(codec: Groupwise | Rowwise | Tensorwise, x: Tensor) -> None:
    groups = groups_of(codec, x)
    codes, inv_scale = codec.encode(x)
    ours, inv_ours, amax = ENCODED(x, codec.format.dtype, codec.scale_dtype, True, *groups)
    assert is_same(inv_scale.reshape(-1, 1), inv_ours)
    back = codec.decode(codes, inv_scale, torch.float32)
    known = ~back.isnan() if codec.format is INT8 else torch.ones_like(back, dtype=torch.bool)  # any code is a NaN's
    assert torch.equal(codes.view(torch.uint8)[known], ours.view(torch.uint8)[known])
    for dtype in (torch.float32, torch.bfloat16):
        found = DECODED(codes, inv_scale, dtype, *groups)
        assert is_same(codec.decode(codes, inv_scale, dtype), found)
    rows, row, size = groups
    lines = torch.nn.functional.pad(x.abs().reshape(rows, row), (0, -row % size)).reshape(-1, size)
    assert is_same(lines.amax(1), amax)


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_groups_have_the_codes_and_scales_of_torch(fmt: Format, scale_dtype: torch.dtype) -> None:
    for x in values():
        assert_same(Groupwise(fmt, 128, scale_dtype), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_one_scale_for_a_row_or_a_tensor(fmt: Format) -> None:
    for x in values():
        assert_same(Rowwise(fmt), x)
        assert_same(Tensorwise(fmt), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_code_under_every_kind_of_scale(fmt: Format) -> None:
    codes = torch.arange(256).to(torch.uint8).view(fmt.dtype).repeat(6, 1)
    inv_scale = torch.tensor([2.0**-126, 1.0, 3e-5, 7e35, torch.nan, 0.1])[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        expected = Rowwise(fmt).decode(codes, inv_scale, dtype)
        assert is_same(expected, DECODED(codes, inv_scale, dtype, 6, 256, 256))


def test_values_in_another_order_than_their_memory() -> None:
    x = torch.randn(256, 64).t()
    ours, *_ = ENCODED(x, torch.int8, torch.bfloat16, False, 64, 256, 128)
    assert torch.equal(ours, Groupwise(INT8, 128).encode(x)[0]) and ours.is_contiguous()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_what_is_large_and_change_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    x = torch.randn(FEWEST // 64 + 1, 128)
    try:
        torch.set_num_threads(threads)
        assert_same(Groupwise(E4M3), x)
        assert_same(Tensorwise(E4M3), x)
    finally:
        torch.set_num_threads(before)


def test_it_is_compiled_once_whatever_options_a_graph_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for simdlen in (None, 256):
        compiled.cache_clear()
        with private.inductor_config.patch({"cpp.simdlen": simdlen}):
            compiled(torch.int8)
    compiled.cache_clear()
    found = [path for path in tmp_path.rglob("*.main.cpp") if "codec_of_groups" in path.read_text()]
    assert len(found) == 1


def test_amaxes_are_made_where_they_are_asked_for() -> None:
    x = torch.randn(4, 128)
    *_, none = ENCODED(x, torch.int8, torch.bfloat16, False, 4, 128, 128)
    assert none.shape == (0,)
