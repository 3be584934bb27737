"""Two to six bits for each element, unbiased: ActNN (Chen et al. 2021) and GACT (Liu et al. 2022).

    y = (x - zero_point) / inv_scale      zero_point = min, inv_scale = (max - min) / (2**bits - 1), of a group
    code = floor(y + u)                   u uniform in (0, 1)
    decoded = zero_point + inv_scale * (code + 1/2 - u)       "dithered": the decoder knows u and takes it away again
              zero_point + inv_scale * code                   "stochastic": ActNN's

Groups are those of ``groups.py``. For any y both are unbiased over u. A step is one inv_scale. The dithered error is uniform
in half a step about 0, whatever y is: a variance of step**2 / 12. The stochastic one is up to a whole step, its variance
f (1 - f) step**2 for a rest f of y, step**2 / 6 in the mean: 3 dB more noise at equal bytes. With "nearest" u is 1/2:
half a step at most, biased for any one y.

u is a pure function: start + place * 0.618 modulo 1, start a hash (multiplications mod 2**16 and shifts, of C. Wellons'
family) of the number of the group and of the bits of its metadata. So it takes no byte and no random number of the user's,
and what is encoded again has the same codes. Unbiased *in which sense*: over groups, since sums over rows, as in a
weight's gradient, add up elements of different groups; and over steps, since a group whose zero point or scale moves by an
ulp of BF16 starts elsewhere. A tensor that never changes has the same error always, as in any format. Within a group the
draws are spread evenly and not independent: a decoder that hashed each element would take more operations than Inductor
computes again for each reader (30), and so would write what it decodes to memory. u is an odd multiple of 2**-13: that
moves either mean by at most 2**-13 of a step.

Both are BF16, rounded so that all values are inside: zero_point down (away from zero if it is negative), then inv_scale up,
from zero_point as it was rounded. So inv_scale <= ((max - min) + 2**-7 |min|) / (2**bits - 1) * (1 + 2**-7), or 2**-126 if
that is more. A group of one value that is a BF16 number, such as 0, is exact. FP32's roundings count for 2**-16 of a step.
A group with a NaN, an infinity or a value of 2**126 and more has a NaN for its scale, and decodes to NaN. What would decode
to more than FP16's largest number, in FP16, is that number.

Codes are packed within their group, so that encoding is a reduction and what follows in the same loop: of the P codes of a
word, the p-th is element p * G / P + w of the group, w the word's number. P = 8 for 3 and 5 bits, 4 for 2 and 6, 2 for 4,
which makes words of whole bytes: low bits first, all words' first bytes before their second ones. A group whose size is
no multiple of 8 is filled up with copies of the row's last element: a short last one, or the only one. Equal groups are of a
multiple of 8, or else of G.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.groups import Groups, Size

BITS = (2, 3, 4, 5, 6)
FEW_BITS = {f"{bits}bit": bits for bits in reversed(BITS)}  # by their names in recipes
ROUNDINGS = ("dithered", "stochastic", "nearest")
SMALLEST_STEP = 2.0**-126  # its reciprocal is finite
LIMIT = 2.0**126  # of values: differences, and what a code stands for, are finite
METADATA_BYTES = 4  # inv_scale and zero_point, BF16
TOGETHER = 8  # a group has a multiple of so many elements: eight codes are as many bytes as one has bits

_WORDS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3)}  # codes and bytes of a word
_HALF = 0xFFFF
_MULTIPLIERS = (0x88B5 - 0x10000, 0xDB2D - 0x10000)  # mod 2**16; no product leaves a signed 32-bit integer
_STRIDE = 2531 / 4096  # about 1 / the golden ratio


@dataclass(frozen=True)
class FewBits:
    """``bits`` per element and four bytes per group of at most ``group_size``, a multiple of 8 up to 65,536.

    Attributes:
        bits: 2 to 6.
        group_size: elements per scale at most.
        rounding: "dithered", "stochastic" or "nearest"; see the head of this file.
        row_dims: how many trailing dimensions are a row (``groups.py``).
    """

    bits: int
    group_size: int = 128
    rounding: str = "dithered"
    row_dims: int = 1

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"FewBits.bits must be 2, 3, 4, 5 or 6, not {self.bits!r}; for 8 use Groupwise")
        if self.group_size % TOGETHER or not 0 < self.group_size <= 65536:
            raise ValueError(
                f"FewBits.group_size must be a multiple of {TOGETHER} up to 65536, not {self.group_size!r}"
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"FewBits.rounding must be one of {', '.join(ROUNDINGS)}, not {self.rounding!r}")

    @property
    def name(self) -> str:
        """What reports call it, e.g. ``4bit 1x128``."""
        rounding = "" if self.rounding == "dithered" else f" {self.rounding}"
        return f"{self.bits}bit 1x{self.group_size}{rounding}"

    @property
    def levels(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    @property
    def word_dtype(self) -> torch.dtype:
        """Of a word before it is cut into bytes: signed, so that five bytes need 64 bits."""
        return torch.int64 if self.bits == 5 else torch.int32

    @property
    def groups(self) -> Groups:
        return Groups(self.group_size, self.row_dims)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of codes and metadata of a tensor of ``shape``."""
        of_a_row = sum(count * (self.bytes_of(size) + METADATA_BYTES) for _, count, size in self._parts(shape))
        return int(self.groups.rows(shape)) * of_a_row

    def count(self, shape: Sequence[int]) -> int:
        """How many groups a tensor of ``shape`` has."""
        return int(self.groups.rows(shape)) * sum(count for _, count, _ in self._parts(shape))

    def bytes_of(self, size: int) -> int:
        """Bytes of the codes of a group."""
        return size * self.bits // 8

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x -> (codes, inv_scale, zero_point)``: uint8 ``[bytes]``, or ``[..., bytes of a row]`` where only a run knows how
        many rows there are; BF16 ``[N, 1]`` each, N the number of groups."""
        parts, rows = self._parts(x.shape), self.groups.rows(x.shape)
        x_RL = x.reshape(rows, self.groups.row(x.shape))
        lengths = [length for length, _, _ in parts]
        made = [
            self._encode_part(each, *part) for each, part in zip(torch.split(x_RL, lengths, 1), parts, strict=True)
        ]
        codes, inv_scale, zero_point = (
            torch.cat(each, 1) if len(parts) > 1 else each[0] for each in zip(*made, strict=True)
        )
        before = x.shape[: x.dim() - self.groups.dims(x.shape)]
        in_rows = isinstance(
            x.numel(), torch.SymInt
        )  # the codes, which keep the other dimensions, tell them to the decoder
        codes = codes.reshape((*before, codes.shape[1]) if in_rows else codes.numel())
        return codes, inv_scale.reshape(-1, 1).to(torch.bfloat16), zero_point.reshape(-1, 1).to(torch.bfloat16)

    def decode(
        self, codes: Tensor, inv_scale: Tensor, zero_point: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """The tensor of ``shape`` and ``dtype``. Of a symbolic shape only a row's sizes are read, others off the codes."""
        parts, k = self._parts(shape), self.groups.dims(shape)
        in_rows = codes.dim() > 1
        bytes_in = [count * self.bytes_of(size) for _, count, size in parts]
        counts = [count for _, count, _ in parts]
        codes_RB = codes.reshape(-1 if in_rows else self.groups.rows(shape), sum(bytes_in))
        rows = codes_RB.shape[0]
        inv_scale, zero_point = (each.float().reshape(rows, sum(counts)) for each in (inv_scale, zero_point))
        cut = (
            torch.split(codes_RB, bytes_in, 1),
            torch.split(inv_scale, counts, 1),
            torch.split(zero_point, counts, 1),
        )
        each = zip(*cut, parts, strict=True)
        found = [_as(dtype, self._decode_part(*given)) for given in each]
        before = codes.shape[:-1] if in_rows else tuple(shape[: len(shape) - k])
        return (torch.cat(found, 1) if len(parts) > 1 else found[0]).reshape((*before, *shape[len(shape) - k :]))

    def _parts(self, shape: Sequence[Size]) -> list[tuple[int, int, int]]:
        """Of a row: ``(elements, groups, elements of a group as it is filled)`` of its equal groups, and a short last one."""
        row = self.groups.row(shape)
        assert isinstance(row, int), "codes do not tell a length that only a run knows"
        size = self.groups.size(row)
        if row <= size:
            return [(row, min(row, 1), _filled(max(row, 1)))]
        if size % TOGETHER or row % size:
            size = self.group_size
        full, tail = row // size, row % size
        return [(full * size, full, size), *([(tail, 1, _filled(tail))] if tail else [])]

    def _encode_part(self, x_RL: Tensor, length: int, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """``[rows, bytes]``, and FP32 ``[rows, count]`` each."""
        rows = x_RL.shape[0]
        planes = self._planes(x_RL, length, count, size)
        lo = functools.reduce(torch.minimum, planes).amin(-1, keepdim=True)
        hi = functools.reduce(torch.maximum, planes).amax(-1, keepdim=True)
        inv_scale, zero_point = frame(lo, hi, self.levels)
        word = torch.zeros_like(planes[0], dtype=self.word_dtype)
        for p, (plane, u) in enumerate(zip(planes, self._dither(inv_scale, zero_point, size), strict=True)):
            word = word | self._codes(plane, inv_scale, zero_point, u) << (self.bits * p)
        codes = torch.cat([((word >> (8 * q)) & 255).to(torch.uint8) for q in range(_WORDS[self.bits][1])], -1)
        return (
            codes.reshape(rows, count * self.bytes_of(size)),
            inv_scale.reshape(rows, count),
            zero_point.reshape(rows, count),
        )

    def _decode_part(
        self, codes: Tensor, inv_scale: Tensor, zero_point: Tensor, part: tuple[int, int, int]
    ) -> Tensor:
        """FP32 ``[rows, length]``."""
        rows, (length, count, size), (per_word, size_of_word) = inv_scale.shape[0], part, _WORDS[self.bits]
        parts = codes.reshape(rows * count, size_of_word, size // per_word).to(self.word_dtype).unbind(1)
        word = functools.reduce(torch.bitwise_or, [part << (8 * q) for q, part in enumerate(parts)])
        shifts = torch.arange(per_word, device=codes.device, dtype=self.word_dtype).unsqueeze(1) * self.bits
        code = ((word.unsqueeze(1) >> shifts) & self.levels).float()
        inv_scale_N11, zero_point_N11 = inv_scale.reshape(rows * count, 1, 1), zero_point.reshape(rows * count, 1, 1)
        if self.rounding == "dithered":
            code = code - distance(start_of(inv_scale_N11, zero_point_N11), self._places(size, codes.device))
        found = (zero_point_N11 + code * inv_scale_N11).reshape(rows, count * size)
        return found.narrow(1, 0, length) if length < count * size else found

    def _planes(self, x_RL: Tensor, length: int, count: int, size: int) -> tuple[Tensor, ...]:
        """The P elements of each word, ``[N, G / P]`` each, FP32."""
        per_word, rows = _WORDS[self.bits][0], x_RL.shape[0]
        if (missing := count * size - length) and length:
            x_RL = torch.cat([x_RL, x_RL.narrow(1, length - 1, 1).expand(rows, missing)], 1)
        return x_RL.reshape(rows * count, per_word, size // per_word).float().unbind(1)

    def _codes(self, x: Tensor, inv_scale: Tensor, zero_point: Tensor, u: Tensor | float) -> Tensor:
        y = torch.where(
            inv_scale > 0, (x - zero_point) * torch.where(inv_scale > 0, inv_scale, 1.0).reciprocal(), 0.0
        )
        return (y + u).floor().clamp(0, self.levels).to(self.word_dtype)

    def _dither(self, inv_scale: Tensor, zero_point: Tensor, size: int) -> Sequence[Tensor | float]:
        if self.rounding == "nearest":
            return [0.5] * _WORDS[self.bits][0]
        start = start_of(inv_scale, zero_point)
        return [distance(start, place) + 0.5 for place in self._places(size, inv_scale.device).unbind(0)]

    def _places(self, size: int, device: torch.device) -> Tensor:
        """The number of each element in its group, modulo 256: FP32 ``[P, G / P]``."""
        place = torch.arange(size, device=device, dtype=torch.int32)
        place = place & 255 if size > 256 else place
        return place.float().reshape(_WORDS[self.bits][0], -1)


def _filled(length: int) -> int:
    return -(-length // TOGETHER) * TOGETHER


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    return (x.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else x).to(dtype)


def frame(lo: Tensor, hi: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """``(inv_scale, zero_point)`` of groups with these ends, FP32 on BF16's grid; inv_scale is NaN beyond ``LIMIT``."""
    zero_point = _away_from_zero(lo, lo < 0)
    inv_scale = _away_from_zero((hi - zero_point) * (1 / levels), torch.ones_like(lo, dtype=torch.bool))
    inv_scale = torch.where(hi > zero_point, inv_scale.clamp_min(SMALLEST_STEP), 0.0)
    return torch.where((lo > -LIMIT) & (hi < LIMIT), inv_scale, torch.nan), zero_point


def _away_from_zero(x: Tensor, where: Tensor) -> Tensor:
    """x (FP32) on BF16's grid: away from zero ``where``, else towards it. By integers: Inductor drops casts."""
    bits = x.view(torch.int32) + torch.where(where, _HALF, 0).to(torch.int32)
    return (bits & -0x10000).view(torch.float32)


def start_of(inv_scale: Tensor, zero_point: Tensor) -> Tensor:
    """FP32 in (0, 1) for each group, ``[N, 1 ...]`` as inv_scale, odd multiples of 2**-13: of its number and metadata."""
    number = torch.arange(inv_scale.shape[0], device=inv_scale.device, dtype=torch.int32).reshape(
        -1, *[1] * (inv_scale.dim() - 1)
    )
    key = _mixed(number & _HALF) ^ (number >> 16)
    for metadata in (zero_point, inv_scale):
        key = _mixed(key ^ ((metadata.contiguous().view(torch.int32) >> 16) & _HALF))
    return ((key >> 4).float() + 0.5) * 2.0**-12


def distance(start: Tensor, place: Tensor) -> Tensor:
    """u - 1/2: how far start + place * ``_STRIDE`` is from the nearest whole number, FP32, exact."""
    at = start + place * _STRIDE
    return at - at.round()


def _mixed(word: Tensor) -> Tensor:
    """A permutation of 16-bit numbers, int32."""
    for shift, multiplier in zip((8, 7), _MULTIPLIERS, strict=True):
        word = ((word ^ (word >> shift)) * multiplier) & _HALF
    return word ^ (word >> 9)
