"""Codes of fewer than eight bits, several to a byte, in planes of their group.

    P = 8 / bits codes to a byte;  a group of n elements takes ceil(n / P) = B bytes
    byte w = sum over p < P of code[p * B + w] << (bits * p)              codes past the end of a group count as 0

So the first plane of a group, its elements 0 ... B - 1, has the low bits of all its bytes, the next one the next bits. A loop
over B elements that reads a group plane by plane sees all codes of a byte at once, which is what makes an optimizer's step
one kernel (``optim/planes.py``). No two groups share a byte, so no two rows do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fp8compile.numerics.states.interface import Grouped, rows_of


class Planar(Grouped):
    """Base of the grouped codecs that pack by planes. Subclasses see planes of groups and their metadata, ``[N, 1]`` each.

    ``basis`` is what the codes of a group are made by; ``metadata_of`` makes of it what is stored. Codes are FP32 whole
    numbers here, 0 ... 2**bits - 1; ``decode_groups`` works on one plane as on all of a group.
    """

    bits: ClassVar[int]

    def basis(self, planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the codes depend on beside the value, ``[N, 1]`` each, from all planes of the groups, ``[N, B]`` each."""
        raise NotImplementedError

    def metadata_of(self, *basis: Tensor) -> tuple[Tensor, ...]:
        """The stored metadata, ``[N, 1]`` each."""
        raise NotImplementedError

    def codes_of(self, x: Tensor, *basis: Tensor) -> Tensor:
        """Codes of one plane."""
        raise NotImplementedError

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        basis = self.basis((x_NG,))
        return self.codes_of(x_NG, *basis).to(torch.uint8), *self.metadata_of(*basis)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, *metadata = super().encode(x)
        return packed_planes(codes, x.shape, self.group_size, self.bits), *metadata

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        codes = unpacked_planes(parts[0], shape, self.group_size, self.bits)
        return super().decode((codes, *parts[1:]), shape)

    def encode_planes(self, planes: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Bytes, in planes too, and metadata of groups that come in a multiple of ``8 / bits`` planes."""
        basis = self.basis(planes)
        return joined_planes([self.codes_of(x, *basis) for x in planes], self.bits), self.metadata_of(*basis)

    def decode_planes(self, code_bytes: Sequence[Tensor], metadata: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of ``encode_planes``."""
        return [self.decode_groups(codes, *metadata) for codes in parted_planes(code_bytes, self.bits)]


def joined_planes(codes: Sequence[Tensor], bits: int) -> list[Tensor]:
    """Planes of codes, a multiple of ``8 / bits`` of them, as planes of bytes, uint8."""
    per_byte = 8 // bits
    several = len(codes) // per_byte
    whole = [code.to(torch.int32) for code in codes]
    joined = [sum(whole[p * several + i] << (bits * p) for p in range(per_byte)) for i in range(several)]
    return [torch.as_tensor(each).to(torch.uint8) for each in joined]


def parted_planes(code_bytes: Sequence[Tensor], bits: int) -> list[Tensor]:
    """The inverse of ``joined_planes``, int32."""
    whole = [each.to(torch.int32) for each in code_bytes]
    return [each >> (bits * p) & (2**bits - 1) for p in range(8 // bits) for each in whole]


def packed_planes(codes: Tensor, shape: Sequence[int], group_size: int | None, bits: int) -> Tensor:
    """Codes of ``shape``, whole numbers, packed by groups: ``[*rows, bytes of a row]``, uint8."""
    outer, length, size, full = _row(shape, group_size)
    rows, per_byte = math.prod(outer), 8 // bits
    if rows * length == 0:
        return codes.new_zeros((*outer, -(-length // per_byte)), dtype=torch.uint8)
    codes_RL = codes.reshape(rows, length)
    parts = [_packed(codes_RL[:, full:], bits)] if full < length else []
    if full:
        groups = codes_RL[:, :full].reshape(rows * full // size, size)
        parts = [_packed(groups, bits).reshape(rows, full // size * -(-size // per_byte)), *parts]
    joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return joined.reshape(*outer, joined.shape[1])


def unpacked_planes(code_bytes: Tensor, shape: Sequence[int], group_size: int | None, bits: int) -> Tensor:
    """The inverse of ``packed_planes``: codes of ``shape``, uint8."""
    outer, length, size, full = _row(shape, group_size)
    rows, each = math.prod(outer), -(-size // (8 // bits))
    if rows * length == 0:
        return code_bytes.new_zeros(shape)
    whole = full // size * each
    bytes_RB = code_bytes.reshape(rows, code_bytes.numel() // rows)
    parts = [_unpacked(bytes_RB[:, whole:], length - full, bits)] if full < length else []
    if full:
        groups = bytes_RB[:, :whole].reshape(rows * full // size, each)
        parts = [_unpacked(groups, size, bits).reshape(rows, full), *parts]
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).reshape(shape)


def _row(shape: Sequence[int], group_size: int | None) -> tuple[tuple[int, ...], int, int, int]:
    """The dimensions that count rows, and of each row all elements, those of a group, and those in full groups."""
    outer, length = rows_of(shape, group_size)
    size = group_size or max(1, length)
    return outer, length, size, length // size * size


def _packed(codes_NG: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    missing = -codes_NG.shape[1] % per_byte
    filled = torch.nn.functional.pad(codes_NG, (0, missing)) if missing else codes_NG
    return joined_planes(torch.split(filled, filled.shape[1] // per_byte, 1), bits)[0]


def _unpacked(bytes_NB: Tensor, size: int, bits: int) -> Tensor:
    return torch.cat(parted_planes([bytes_NB], bits), 1)[:, :size].to(torch.uint8)
