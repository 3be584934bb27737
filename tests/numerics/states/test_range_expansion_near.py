"""Range expansion by functions that are as far off as a GPU's short forms may be (numerics/near_functions.py).

Each of the three functions is replaced by float64's value moved by its whole error: all up, all down, each of eight
choices, or every number by an error of its own. Bounds, U being 2**-24, E = 2**-22 = 4 U what a function errs:

  * Logarithms are of a, or of a times a unit, which takes amax to 1 where it is smaller; the unit's own error is in both that
    are subtracted, its product rounds. Either one is within E * 254 and the other within E (amax <= 1), or both are within
    E * 128: together E * 256, that is 2**-14. The difference rounds by 2**-17. DELTA = 2**-14 + 2**-17 + 4 U.
  * y = exp2(k log2 a + (log2 FMAX - k log2 amax)): each product and the bracket are at most 128 k + 32 and round once;
    k's error is in the range. SPREAD(k) = ln2 * (k * DELTA + 4 * (128 * k + 32) * U) + E + U.
  * Decoding: the exponent is 16 / k16 * log2(|code| / FMAX): the logarithm is within E * max(1, |log2|) and 2 U / ln2 of its
    argument's, the quotient within E of itself, their product within U. Then exp2 twice, and two products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import near_functions as near
from fp8compile.numerics.states.range_expansion import KEPT, Expanded
from tests.numerics.states.test_range_expansion import (
    CODECS,
    DITHERED,
    FP32_MAX,
    LOG_RANGE,
    NORMAL,
    RANGES,
    UNSIGNED,
    decoded,
    is_made,
    moments,
    shifted,
    to_format,
    wide_groups,
)
from tests.support.reference import U, reference_values

E = near.ERROR
MOVED = E - U  # then it is rounded to FP32
DELTA = 2.0**-14 + 2.0**-17 + 4 * U
OFF = [*itertools.product((-1, 1), repeat=3), None]  # of log2, exp2 and quotient; None: each number in its own way
by_either = pytest.mark.parametrize("codec", CODECS + UNSIGNED, ids=lambda c: f"{c.name} {c.expand_range} {c.signed}")
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name} {c.expand_range}")


def spread_error(k16: Tensor) -> Tensor:
    k = k16 / 16
    return 1.01 * (math.log(2) * (k * DELTA + 4 * (128 * k + 32) * U) + E + U)


def decode_error(log_code: Tensor, k16: Tensor) -> Tensor:
    log = log_code.abs()
    exponent = 16 / k16 * (E * log.clamp_min(1) + 3 * U + (E + U) * log) + shifted(k16)
    return 1.01 * (math.log(2) * exponent + 2 * (E + 2 * U) + 2 * U)


def off_by(share: int | None, error: Tensor, of: Tensor) -> Tensor:
    """An error of at most ``error``: all in one direction, or another for each number, of equal ones the same."""
    if share is not None:
        return error * share
    scattered = of.float().view(torch.int32) * 0x9E3779B1 >> 8 & 0xFFFF
    return error * (scattered.double() * 2.0**-15 - 1)


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < NORMAL, 0.0, x)


@pytest.fixture(params=OFF, ids=str)
def functions_are_off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shares = request.param or (None, None, None)

    def log2(x: Tensor) -> Tensor:
        right = flushed(x.double()).log2()
        error = MOVED * torch.where((x > 0.5) & (x < 2), 1.0, right.abs())
        return torch.where(right.isfinite(), right + off_by(shares[0], error, x), right).float()

    def exp2(x: Tensor) -> Tensor:
        right = x.double().exp2()
        return flushed(torch.where(right.isfinite(), right + off_by(shares[1], MOVED * right, x), right).float())

    def quotient(a: Tensor, b: Tensor) -> Tensor:
        right = a.double() / b.double()
        return flushed(
            torch.where(right.isfinite(), right + off_by(shares[2], MOVED * right.abs(), right), right).float()
        )

    for function in (log2, exp2, quotient):
        monkeypatch.setattr(near, function.__name__, function)
    yield


@pytest.mark.parametrize(
    "codec", CODECS + UNSIGNED + DITHERED, ids=lambda c: f"{c.name} {c.expand_range} {c.signed} {c.rounding}"
)
def test_no_range_loses_its_smallest_element_and_k_is_within_its_bound(
    codec: Expanded, functions_are_off: None
) -> None:
    codes, amax, k16 = codec.encode_groups(RANGES)
    exact = 16 * math.log2(codec.target)
    least = (exact / (LOG_RANGE + DELTA) * (1 - E - 3 * U)).floor().clamp(1, 255)
    most = (exact / (LOG_RANGE - DELTA).clamp_min(1e-9) * (1 + E + 3 * U)).floor().clamp(1, 255)
    assert ((k16 >= least) & (k16 <= most)).all()
    assert (codes.float()[:, 1] == codec.format.max).all()
    assert (codes.float()[:, 0] >= codec.format.smallest).all()
    x_hat = codec.decode_groups(codes, amax, k16).double()
    assert x_hat.isfinite().all() and (x_hat >= NORMAL).all()


@by_either
@pytest.mark.parametrize("amax", [FP32_MAX / 2, 3.3, 1e-18, KEPT])
def test_every_code_of_every_k_comes_back_near_and_as_the_same_code(
    codec: Expanded, amax: float, functions_are_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by less than a thousandth of half a code's step; and what was decoded is encoded as it was."""
    values = torch.from_numpy(reference_values(codec.format))
    used = (values.abs() <= codec.format.max) & (values >= 0 if not codec.signed else True)
    codes, values = torch.arange(256, dtype=torch.uint8)[used].view(codec.format.dtype), values[used]
    k16 = torch.arange(1, 256, dtype=torch.uint8)[:, None]
    amaxes = torch.full_like(k16, amax, dtype=torch.float32)
    x_hat = codec.decode_groups(codes.expand(255, -1), amaxes, k16)
    log_code, k = (values.abs() / codec.format.max).log2().clamp_min(-64), k16.double()
    exact = amaxes.double() * 2 ** (log_code * 16 / k)
    error = decode_error(log_code, k)
    sure = is_made(codec, amaxes.double(), k, log_code) & (exact >= 2 * KEPT) & (values != 0)
    assert ((x_hat.double() - exact * values.sign()).abs() <= error * exact)[sure].all()
    half_a_step = (1 + codec.format.half_ulp) ** (16 / k) - 1
    assert (error <= half_a_step / 1000)[sure].all()
    assert (x_hat[:, values == 0] == 0).all()

    full = torch.full_like(amaxes, amax)
    monkeypatch.setattr(Expanded, "k_of", lambda self, log_range: k16)
    again = codec.encode_groups(torch.cat([full, x_hat], 1))[0][:, 1:].float()
    assert torch.equal(again[sure], values.expand(255, -1)[sure].float())


@by_codec
def test_codes_and_values_are_within_the_bounds_at_every_scale(codec: Expanded, functions_are_off: None) -> None:
    for x in (*wide_groups(), RANGES):
        codes, amax, k16 = codec.encode_groups(x)
        x_hat, k = codec.decode_groups(codes, amax, k16).double().abs(), k16.double()
        a = x.double().abs()
        y = codec.format.max * (a / a.amax(1, keepdim=True)) ** (k / 16)
        sure = a >= KEPT
        magnitude, error = codes.double().abs(), spread_error(k)
        assert (magnitude >= to_format(y * (1 - error), codec))[sure].all()
        assert (magnitude <= to_format(y * (1 + error), codec).clamp_min(codec.format.smallest))[sure].all()
        q = (codec.format.smallest / 2 / y).clamp_min(codec.format.half_ulp)
        fp32 = (1 + error) ** (16 / k) * (1 + decode_error((y / codec.format.max).log2(), k))
        ratio = torch.where(sure, x_hat / a, 1.0)
        assert (ratio <= (1 + q) ** (16 / k) * fp32).all()
        assert (ratio >= (1 - q).clamp_min(0) ** (16 / k) / fp32).all()


def squared_error_of_a_step() -> float:
    m, v = moments(0.5)
    exact = m.double() / (v.double().sqrt() + 1e-8)
    m_hat, v_hat = (decoded(Expanded(x is m, 128), x).double() for x in (m, v))
    return float((m_hat / (v_hat.sqrt() + 1e-8) - exact).square().mean())


@pytest.fixture
def with_torch_s_functions() -> float:
    return squared_error_of_a_step()


def test_adam_s_step_errs_as_with_torch_s_functions(with_torch_s_functions: float, functions_are_off: None) -> None:
    """The squared error of m / (sqrt(v) + eps) is within 1 % of what it is without these errors."""
    assert abs(squared_error_of_a_step() / with_torch_s_functions - 1) < 0.01


def test_on_a_cpu_they_are_torch_s_own() -> None:
    x = torch.cat([torch.logspace(-38, 38, 1001), torch.tensor([0.0, math.inf, math.nan, 1e-40])])
    pairs: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (near.log2, torch.log2),
        (near.exp2, torch.exp2),
        (lambda a: near.quotient(a, a.flip(0)), lambda a: a / a.flip(0)),
    ]
    for ours, torchs in pairs:
        assert torch.equal(ours(x).view(torch.int32), torchs(x).view(torch.int32))
