"""Compiled by Inductor, every codec gives the bits that it gives eagerly.

Each step but one is exact or a single rounding, and Inductor contracts nothing, so equality is owed, not
luck. The one is GroupwiseBest's sum of squares, whose order Inductor chooses: the inputs are checked to hold
no near tie.
"""

import math

import pytest
import torch

from fp8compile.numerics import E4M3, E5M2, INT8, Groupwise, GroupwiseBest, Rowwise, Tensorwise
from tests.reference import E8M0, U, bits_equal

torch.set_num_threads(1)

CODECS = [
    Tensorwise(E4M3),
    Rowwise(E5M2, torch.bfloat16),
    Groupwise(E4M3),
    Groupwise(INT8, 64, E8M0),
    GroupwiseBest(),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sample(*shape, dtype=torch.float32, seed=0):
    """Normal values with a few outliers, so that GroupwiseBest takes both formats."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.01, 200 * x, x).to(dtype)


def assert_no_near_tie(x, group_size=128):
    """No group's two squared errors are closer than the worst order of summation could confuse."""
    decoded = []
    for fmt in (E4M3, INT8):
        codec = Groupwise(fmt, group_size)
        decoded.append(codec.decode(*codec.encode(x), torch.float32).double())
    groups = [(x_hat - x.double()).square().reshape(-1).split(group_size) for x_hat in decoded]
    for of_float, of_int in zip(*groups, strict=True):
        assert abs(of_float.sum() / of_int.sum() - 1) > 4 * (group_size + 4) * U


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_compiled_round_trip_is_bit_equal_to_eager(codec):
    full, tail = sample(6, 256), sample(3, 77, seed=1, dtype=torch.bfloat16)
    full[3] *= 1e30
    full[4] *= 1e-30
    assert_no_near_tie(full)
    assert_no_near_tie(tail)
    full[0] = 0
    full[1, 5] = math.nan
    full[2, 200] = -math.inf

    def round_trip(*xs):
        return [codec.decode(*codec.encode(x), x.dtype) for x in xs]

    compiled = torch.compile(round_trip, fullgraph=True)(full, tail)
    for ours, eager in zip(compiled, round_trip(full, tail), strict=True):
        assert bits_equal(ours, eager)


@pytest.mark.parametrize("codec", [Rowwise(INT8), Groupwise(), GroupwiseBest()], ids=lambda codec: codec.name)
def test_one_dynamic_graph_gives_eager_codes_scales_and_values_at_every_length(codec):
    def encode_and_decode(x):
        codes, inv_scale = codec.encode(x)
        return codes, inv_scale, codec.decode(codes, inv_scale, x.dtype)

    compiled = torch.compile(encode_and_decode, fullgraph=True, dynamic=True)
    compiled(sample(5, 100))  # several full groups and a tail
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((5, 100), (7, 131), (2, 129)):
            x = sample(*shape)
            assert_no_near_tie(x)
            for ours, eager in zip(compiled(x), encode_and_decode(x), strict=True):
                assert bits_equal(ours, eager)
