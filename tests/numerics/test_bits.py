"""Bits: what is packed is what is unpacked, for every word and every length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics.bits import Bits

CODEC = Bits()


def test_every_word_is_its_bits() -> None:
    every = torch.arange(2**16)
    masks = (every[:, None] >> torch.arange(16)) & 1 == 1
    (codes,) = CODEC.encode(masks)
    assert codes.dtype is torch.int16 and torch.equal(codes.long() & 0xFFFF, every)
    assert torch.equal(CODEC.decode(codes, masks.shape), masks)


@pytest.mark.parametrize("length", range(50))
def test_every_length_comes_back(length: int) -> None:
    mask = torch.rand(length, generator=torch.Generator().manual_seed(length)) < 0.5
    (codes,) = CODEC.encode(mask)
    assert codes.nbytes == CODEC.nbytes(mask.shape) == 2 * -(-length // 16)
    assert torch.equal(CODEC.decode(codes, mask.shape), mask)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4, 8), (7, 0)])
def test_every_shape_comes_back(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    (codes,) = CODEC.encode(mask)
    assert torch.equal(CODEC.decode(codes, shape), mask)


@pytest.mark.parametrize("shape", [(64, 64), (5, 13)])
def test_generated_code_packs_the_same(shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    x = torch.randn(shape)

    def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
        (codes,) = CODEC.encode(x > 0)
        return codes, CODEC.decode(codes, x.shape)

    codes, mask = torch.compile(there_and_back)(x)
    assert torch.equal(mask, x > 0) and torch.equal(codes, CODEC.encode(x > 0)[0])
