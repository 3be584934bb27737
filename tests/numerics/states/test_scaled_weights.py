"""FP16 masters under one scale per tensor: their bound, exactly what fits, their mean, and what becomes of too large ones."""

import math

import pytest
import torch

from fp8compile.numerics.rounding import key_of, random_bits
from fp8compile.numerics.states.scaled_weights import LEAST, inv_scale_for, scaled, unscaled, weight_of
from tests.support.reference import bits_equal, finite_values

torch.set_num_threads(1)

LARGEST = [0.0, 1e-6, 0.124, 0.125, 0.5, 0.9999, 1.0, 3.0, 700.0, 1e20, 3e38]


def stochastic_bits(count, seed=0):
    return random_bits(torch.arange(count), key_of(seed, torch.tensor(0), torch.tensor(1.0).expand(count)))


@pytest.mark.parametrize("largest", LARGEST)
def test_the_scale_is_a_power_of_two_that_puts_the_largest_below_32(largest):
    inv_scale = float(inv_scale_for(torch.tensor(largest)))
    assert math.frexp(inv_scale)[0] == 0.5
    assert 16 <= max(largest, LEAST) / inv_scale < 32


@pytest.mark.parametrize("largest", LARGEST)
def test_every_bf16_value_is_within_the_bound(largest):
    """All BF16 values up to ``largest``, rounded to nearest, and either way at random."""
    every = finite_values(torch.bfloat16).float()
    x = every[every.abs() <= largest]
    inv_scale = inv_scale_for(torch.tensor(largest))
    bound = torch.maximum(x.double().abs() * 2.0**-10, inv_scale.double() * 2.0**-24)
    for bits, share in ((None, 0.5), (stochastic_bits(len(x)), 1.0)):
        x_hat = unscaled(scaled(x, inv_scale, bits), inv_scale)
        assert ((x_hat.double() - x.double()).abs() <= share * bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_19_octaves_come_back_exactly(dtype):
    """A master of 11 bits holds a BF16's 8 or a FP16's 11, from the largest down to the smallest normal number."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x[x.abs() >= float(x.abs().amax()) * 2.0**-18]
    inv_scale = inv_scale_for(x.abs().amax())
    for bits in (None, stochastic_bits(len(x))):
        assert bits_equal(weight_of(scaled(x.float(), inv_scale, bits), inv_scale, dtype), x)


def test_the_mean_over_draws_is_the_number():
    """Hoeffding, 4 deviations: a draw is one of two numbers 2**-10 of x apart."""
    draws, inv_scale = 10_000, inv_scale_for(torch.tensor(1.0))
    for x in (0.3, 0.7123, 1e-3, -0.99, 1e-9):
        found = unscaled(scaled(torch.full((draws,), x), inv_scale, stochastic_bits(draws)), inv_scale).double()
        spacing = max(abs(x) * 2.0**-10, float(inv_scale) * 2.0**-24)
        assert len(found.unique()) <= 2
        assert abs(float(found.mean()) - float(torch.tensor(x))) <= 4 * spacing / (2 * draws**0.5)


def test_the_largest_may_grow_2047_times_and_is_inf_past_fp16():
    inv_scale = inv_scale_for(torch.tensor(0.9999))
    x = torch.tensor([0.9999 * 2047, -0.9999 * 2047, 65536 * float(inv_scale), -1e30, math.inf, math.nan])
    x_hat = unscaled(scaled(x, inv_scale), inv_scale)
    assert x_hat[:2].isfinite().all()
    assert x_hat[2:].tolist()[:3] == [math.inf, -math.inf, math.inf] and x_hat[5].isnan()
    drawn = unscaled(scaled(x, inv_scale, stochastic_bits(6)), inv_scale)
    assert not drawn[2:].isfinite().any()
