"""Compiled by Inductor, every codec gives the bits that it gives eagerly.

Each step but one is exact or a single rounding, and Inductor contracts nothing, so equality is owed, not
luck. The one is GroupwiseBest's sum of squares, whose order Inductor chooses: the inputs are checked to hold
no near tie.
"""

import math
from functools import partial

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.numerics import E4M3, E5M2, INT8, Groupwise, GroupwiseBest, Rowwise, Tensorwise
from tests.support.reference import E8M0, U, bits_equal

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
def test_compiled_codec_is_bit_equal_to_eager(codec):
    full, tail = sample(6, 256), sample(3, 77, seed=1, dtype=torch.bfloat16)
    full[3] *= 1e30
    full[4] *= 1e-30
    assert_no_near_tie(full)
    assert_no_near_tie(tail)
    full[0] = 0
    full[1, 5] = math.nan
    full[2, 200] = -math.inf

    def round_trips(full, tail):
        codes, inv_scale = codec.encode(tail)  # stored, and so written out, beside one that need not be
        stored = codes, inv_scale, codec.decode(codes, inv_scale, tail.dtype)
        return codec.decode(*codec.encode(full), full.dtype), *stored

    compiled = torch.compile(round_trips, fullgraph=True)(full, tail)
    for ours, eager in zip(compiled, round_trips(full, tail), strict=True):
        assert bits_equal(ours, eager)


@pytest.mark.parametrize("codec", [Groupwise(), GroupwiseBest()], ids=lambda codec: codec.name)
def test_one_dynamic_graph_is_bit_equal_to_eager_at_every_length(codec):
    def round_trip(x):
        return codec.decode(*codec.encode(x), x.dtype)

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True)
    compiled(sample(503))  # several full groups and a tail
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (503, 917, 262):  # no number of equal groups divides them: a graph of any length has full ones
            x = sample(length)
            assert_no_near_tie(x)
            assert bits_equal(compiled(x), round_trip(x))


@pytest.mark.parametrize("codec", [Groupwise(), GroupwiseBest()], ids=lambda codec: codec.name)
def test_one_dynamic_graph_of_rows_ends_its_groups_with_them(codec):
    def round_trip(x):
        return codec.decode(*codec.encode(x), x.dtype)

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True)
    compiled(sample(5, 503))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows, length in ((5, 503), (7, 917), (3, 262)):
            x = sample(rows, length)
            for row in x:
                assert_no_near_tie(row)
            assert bits_equal(compiled(x), torch.stack([round_trip(row) for row in x]))


@functorch_config.patch(enable_autograd_cache=False)  # its key is -x, whatever is compiled in place of it
def test_traced_with_a_symbolic_number_of_rows_groups_end_with_their_row():
    codec = Groupwise()

    def round_trip(x):
        return codec.decode(*codec.encode(x), x.dtype)

    def inner_compile(_, values, **kwargs):  # what is compiled in place of -x, traced as a pass would
        trace = make_fx(lambda *args: [round_trip(args[-1])], decomposition_table=select_decomp_table())
        return compile_fx_inner(trace(*values), values, **kwargs)

    backend = partial(compile_fx, inner_compile=inner_compile)
    compiled = torch.compile(lambda x: -x, fullgraph=True, backend=backend)
    rows = sample(6, 300)
    torch._dynamo.mark_dynamic(rows, 0)
    compiled(rows)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (6, 7, 128):  # 128 rows have no tail in all
            x = sample(count, 300)
            assert bits_equal(compiled(x), torch.stack([round_trip(row) for row in x]))
