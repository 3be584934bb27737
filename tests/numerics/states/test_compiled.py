"""Compiled by Inductor, every state codec gives the bits that it gives eagerly, but for three reasons.

Range expansion takes log2 and exp2, which Inductor may compute by vectors where eager does not, or the other way round,
each within an ulp: k is still owed, as the inputs are checked to hold no near tie; a code may be the next one; and the
same code may decode to something else by the ulps of the second log2 and exp2, which test_range_expansion.py derives.

A cast to BF16 that is undone in the same kernel Inductor leaves out: decoded at once, a BF16 state is still FP32. States
are stored between two steps, so that is nobody's loss, and it is compared as stored.

What a NaN is when cast to an integer is the compiler's to say; its group is NaN by its metadata, whatever the code.
"""

import math

import pytest
import torch

from fp8compile.numerics.states.interface import in_groups
from fp8compile.numerics.states.registry import SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY, state_codec
from tests.support.reference import U, bits_equal, raw

torch.set_num_threads(1)

KINDS = [
    (name, signed)
    for signed in (True, False)
    for name in STATE_FORMATS
    if name not in (UNSIGNED_ONLY if signed else SIGNED_ONLY)
]
CODECS = [state_codec(name, signed=signed) for name, signed in KINDS]
DELTA = 3 * 2.0**-17  # of a difference of logarithms: test_range_expansion.py


def sample(*shape):
    """Normal values of many magnitudes with zeros, a row all zero, one of 1e-18, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x).reshape(shape[0], -1)
    x[0], x[1, 5], x[2, 70] = 0, math.nan, -math.inf
    x[3] *= 1e-18
    return x.reshape(shape)


def round_trips(m):
    """Of every codec what it stores of m, or of v, and what that stands for: one graph."""
    states = [m if signed else m.square() for _, signed in KINDS]
    stored = [codec.encode(x) for codec, x in zip(CODECS, states, strict=True)]
    return stored, [codec.decode(parts, m.shape) for codec, parts in zip(CODECS, stored, strict=True)]


def assert_no_near_tie_of_k(codec, x, k):
    a_NG = in_groups(x, codec.group_size).double().abs().reshape(k.numel(), -1)
    amin = torch.where(a_NG == 0, torch.inf, a_NG).amin(1)
    log_range = (a_NG.amax(1) / amin).log2()
    log_range = log_range[(log_range > 0) & log_range.isfinite()]
    exact = 16 * math.log2(codec.target) / log_range
    assert len(exact) > 0
    assert ((exact - exact.round()).abs() > exact * (DELTA / log_range + 3 * U)).all()


def assert_expanded_alike(codec, x, ours, eager, x_hat, x_hat_eager):
    (codes, amax, k), (codes_eager, amax_eager, k_eager) = ours, eager
    assert_no_near_tie_of_k(codec, x, k)
    assert bits_equal(amax, amax_eager) and torch.equal(k, k_eager)
    finite = x_hat_eager.isfinite()
    assert torch.equal(finite, x_hat.isfinite())
    steps = (raw(codes).int() - raw(codes_eager).int()).abs()[finite]
    assert (steps <= 1).all()
    # Half the exponent is off by 8 / k16 * (3 + 4 * 32) U, and k16 >= 4: no group here spans 2**64.
    assert (k[amax.isfinite()] >= 4).all()
    again = codec.decode(ours, x.shape)
    bound = 2 * 2 * (math.log(2) * 8 / 4 * 131 + 5) * U
    assert ((x_hat - again).abs()[finite] <= bound * again.abs()[finite]).all()
    assert torch.equal(x_hat == 0, x_hat_eager == 0)


@pytest.mark.parametrize(
    "shape",
    [pytest.param((6, 256), id="whole groups", marks=pytest.mark.sweep), pytest.param((4, 33, 3, 3), id="tails")],
)
def test_compiled_codecs_are_bit_equal_to_eager(shape):
    m = sample(*shape)
    compiled, eager = torch.compile(round_trips, fullgraph=True)(m), round_trips(m)
    for (name, signed), codec, *of_each in zip(KINDS, CODECS, *compiled, *eager, strict=True):
        ours, x_hat, of_eager, x_hat_eager = of_each
        if name.endswith("expanded"):
            assert_expanded_alike(codec, m if signed else m.square(), ours, of_eager, x_hat, x_hat_eager)
            continue
        assert all(bits_equal(a, b) for a, b in zip(ours[1:], of_eager[1:], strict=True)), name
        assert bits_equal(codec.decode(ours, shape), x_hat_eager), name
        assert name == "bf16" or bits_equal(x_hat, x_hat_eager), name
