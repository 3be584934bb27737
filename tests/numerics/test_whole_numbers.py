"""Whole numbers: what is narrowed comes back, at every edge of every integer."""

from __future__ import annotations

import pytest
import torch

from fp8compile.numerics.whole_numbers import NARROW, WholeNumbers, narrowest


@pytest.mark.parametrize("narrow", NARROW)
def test_what_a_dtype_holds_comes_back(narrow: torch.dtype) -> None:
    info = torch.iinfo(narrow)
    every = torch.arange(info.min, info.max + 1) if info.bits <= 16 else torch.tensor([info.min, -1, 0, 1, info.max])
    codec = narrowest(info.min, info.max, torch.int64)
    assert codec == WholeNumbers(narrow, torch.int64)
    (codes,) = codec.encode(every)
    assert codes.dtype is narrow and codes.nbytes == codec.nbytes(every.shape)
    assert codec.decode(codes).dtype is torch.int64 and torch.equal(codec.decode(codes), every)


@pytest.mark.parametrize("narrow", NARROW)
def test_one_more_takes_the_next(narrow: torch.dtype) -> None:
    info = torch.iinfo(narrow)
    for least, largest in ((info.min - 1, info.max), (info.min, info.max + 1)):
        codec = narrowest(least, largest, torch.int64)
        assert codec is None or codec.narrow is not narrow
        if codec is not None:
            held = torch.iinfo(codec.narrow)
            assert held.min <= least and largest <= held.max


def test_nothing_is_narrowed_to_as_many_bytes() -> None:
    assert narrowest(0, 300, torch.int16) is None
    assert narrowest(0, 2.0**40, torch.int64) is None
    assert narrowest(float("-inf"), float("inf"), torch.int64) is None
