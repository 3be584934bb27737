"""Generated code of our own elementwise operators: on a CPU the same bits as eager's; on an H100 tests/sm90 runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8compile.fx import near_lowerings
from fp8compile.numerics import near_functions as near
from fp8compile.numerics.formats import E4M3, E5M2, Format
from fp8compile.numerics.rounding import key_of, mixed, random_bits, random_halves
from fp8compile.numerics.states.dither import TRUNCATED, threshold_of


def generated(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    found: Tensor = torch.compile(function, backend="inductor", fullgraph=True)(*args)
    return found


def test_a_hash_is_eager_s() -> None:
    words = torch.cat([torch.arange(4096), torch.randint(2**32, (4096,))])
    between = torch.randint(2**32, words.shape)
    assert torch.equal(generated(mixed, words, between), mixed(words, between))
    for word, other in zip(words[:50].tolist(), between[:50].tolist(), strict=True):
        assert mixed(word, other) == int(mixed(torch.tensor(word), torch.tensor(other)))


def test_what_decides_a_dither_is_eager_s() -> None:
    x = torch.cat([torch.randn(4096), torch.randn(4096) * 1e-30, torch.tensor([0.0, torch.inf, torch.nan])])
    assert torch.equal(generated(threshold_of, x), threshold_of(x))


def test_random_bits_are_eager_s() -> None:
    def drawn(index: Tensor, step: Tensor) -> Tensor:
        return random_bits(index, key_of(7, 3, step))

    index = torch.cat([torch.arange(1000), torch.arange(1000) + 2**33])
    for step in (0.0, 1.0, 1e6):
        assert torch.equal(generated(drawn, index, torch.tensor(step)), drawn(index, torch.tensor(step)))


@pytest.mark.parametrize("at_four", [False, True])
def test_halves_are_eager_s(at_four: bool) -> None:
    def drawn(index: Tensor, step: Tensor) -> Tensor:
        return random_halves(index, key_of(7, 3, step), torch.arange(8), at_four=at_four)

    index = torch.cat([torch.arange(1000), torch.arange(1000) + 2**33])[:, None] * (4 if at_four else 1)
    assert torch.equal(generated(drawn, index, torch.tensor(5.0)), drawn(index, torch.tensor(5.0)))


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (near.log2, torch.log2),
        (near.exp2, torch.exp2),
        (near.sqrt, torch.sqrt),
        (lambda x: near.quotient(x[:, :1], x), lambda x: x[:, :1] / x),
    ],
    ids=["log2", "exp2", "sqrt", "quotient of a row and its first"],
)
def test_on_a_cpu_functions_are_torch_s(ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(33, 70) * 100
    assert torch.equal(generated(ours, x), generated(torchs, x)) and torch.equal(ours(x), torchs(x))


def test_each_operator_has_one_form() -> None:
    assert near_lowerings.FORMS.keys() == near.OPERATORS.keys() == near.EXACT.keys()


def test_magnitudes_are_compared_as_integers() -> None:
    a = torch.cat([torch.logspace(-45, 38, 999), torch.tensor([0.0, torch.inf])]).reshape(7, -1)
    assert torch.equal(near.at_least(a, 0.375), a.clamp_min(0.375)) and torch.equal(
        near.at_most(a, 448.0), a.clamp_max(448)
    )
    assert torch.equal(near.at_most(-a, 1.0), (-a).clamp_max(1))
    assert torch.equal(near.largest(a), a.amax(1, keepdim=True))
    a[2, 5] = torch.nan
    assert torch.equal(near.largest(a).isnan(), a.amax(1, keepdim=True).isnan())


def test_the_smallest_above_zero_is_found_wherever_zeros_stand() -> None:
    a = torch.logspace(-45, 38, 1000).reshape(8, -1)
    a[3], a[5, ::2], a[6, 1] = 0, 0, torch.inf
    expected = torch.where(a > 0, a, torch.inf).amin(1, keepdim=True)
    expected[3] = 0
    assert torch.equal(near.smallest_above_zero(a), expected)


def test_what_is_never_below_zero_has_no_sign() -> None:
    a = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.nan])
    assert not near.unsigned(a).signbit().any() and not generated(near.unsigned, a).signbit().any()
    assert torch.equal(near.at_least(torch.tensor([-2.0, -0.0, 0.0, 3.0]), 0.0), torch.tensor([0.0, 0.0, 0.0, 3.0]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_numbers_are_rounded_down_to_codes(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[(codes >= 0) & (codes <= fmt.max)].unique()
    beside = torch.cat([(codes.view(torch.int32) + ulps).view(torch.float32)[1:] for ulps in (-1, 0, 1)])
    y = torch.cat([beside, torch.rand(4096) * fmt.max, torch.rand(4096) * 100 * fmt.smallest, torch.zeros(3)])
    expected = codes[torch.searchsorted(codes, y, right=True) - 1]
    assert torch.equal(TRUNCATED(y, fmt.dtype).float(), expected)
    assert torch.equal(generated(lambda y: TRUNCATED(y, fmt.dtype).float(), y), expected)


def test_signs_are_those_of_another() -> None:
    a, x = torch.tensor([1.0, 0.0, torch.inf, 3.0]), torch.tensor([-0.0, -2.0, 5.0, -torch.inf])
    assert torch.equal(near.signed_as(a, x), torch.copysign(a, x))
    assert near.signed_as(a, x)[1].signbit()
