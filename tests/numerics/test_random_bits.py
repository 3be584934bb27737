"""Streams of random bits: uniform and independent, of the same elements the same bits, and none of them overflows.

The seed is fixed and the bound is six standard deviations of what ideal random bits would give (one test in 5e8 would fail
by chance).
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8compile.numerics.rounding import (
    drawn,
    index_like,
    key_at,
    key_of,
    random_bits,
    random_halves,
    rows_and_lanes,
    stream_of,
)

torch.set_num_threads(1)

N = 2**18


def stream(count, *, seed=0, parameter=0, step=0, first=0):
    """The first draws of a stream, int64."""
    key = key_of(seed, parameter, torch.tensor(step))
    return random_bits(index_like((count,), torch.tensor(first)), key)


def assert_uniform(values, bins):
    """Chi-square of counts in equally likely bins. It has bins - 1 degrees of freedom f, mean f and variance 2 f."""
    counts = torch.bincount(values, minlength=bins).double()
    assert len(counts) == bins
    expected = len(values) / bins
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert abs(chi_square - (bins - 1)) < 6 * math.sqrt(2 * (bins - 1))


def assert_independent(a, b):
    """Two streams of 32-bit words: no correlation, no dependence between leading or trailing bits, every bit a fair coin.

    For n independent pairs the correlation has standard deviation 1 / sqrt(n), a mean of n coins 1 / (2 sqrt(n)).
    """
    n = len(a)
    correlation = torch.corrcoef(torch.stack([a, b]).double())[0, 1].item()
    assert abs(correlation) < 6 / math.sqrt(n)
    assert_uniform((a >> 28) * 16 + (b >> 28), 256)
    assert_uniform((a & 15) * 16 + (b & 15), 256)
    same = torch.stack([((a ^ b) >> bit & 1).double().mean() for bit in range(32)])
    assert ((same - 0.5).abs() < 3 / math.sqrt(n)).all()


STREAMS = {
    "first": {},
    "next step": {"step": 1},
    "another step": {"step": 2**16},
    "next parameter": {"parameter": 1},
    "both": {"step": 1, "parameter": 1},
    "next seed": {"seed": 1},
    "negative seed": {"seed": -1},
    "upper half of the seed": {"seed": 2**32},
}


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("name", STREAMS)
def test_every_byte_of_a_stream_is_uniform(name, shift):
    assert_uniform(stream(N, **STREAMS[name]) >> shift & 0xFF, 256)


@pytest.mark.parametrize("pair", [*itertools.combinations(STREAMS, 2)], ids=" and ".join)
def test_streams_of_different_keys_are_independent(pair):
    assert_independent(*(stream(N, **STREAMS[name]) for name in pair))


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 96, 100, 128, 768, 1024, 3072, 4096, 12288, 14336, 50257, 2**16, 2**20])
@pytest.mark.parametrize("key", [{}, {"step": 12, "parameter": 3}], ids=["first", "other"])
def test_elements_of_one_stream_are_independent(lag, key):
    # Lags as between rows of weights. Two rounds of mixing instead of three fail 7 of these 32.
    draws = stream(N + lag, **key)
    assert_independent(draws[:-lag], draws[lag:])


@pytest.mark.parametrize("lag", [1, 2, 1000])
@pytest.mark.parametrize("element", [0, 12345])
def test_what_an_element_draws_from_step_to_step_is_independent(element, lag):
    draws = random_bits(torch.tensor(element), key_of(0, 3, torch.arange(N + lag)))
    assert_independent(draws[:-lag], draws[lag:])


def test_what_parameters_draw_for_their_first_element_is_uniform():
    draws = random_bits(torch.tensor(0), key_of(0, torch.arange(N), torch.tensor(7)))
    assert_uniform(draws >> 24, 256)
    assert_independent(draws[:-1], draws[1:])


def test_keys_never_coincide_within_a_seed_nor_in_a_sample_of_seeds():
    steps, parameters = torch.arange(4096), torch.arange(64)[:, None]
    keys = torch.cat([key_of(seed, parameters, steps).reshape(-1) for seed in (0, 1, 2, -1, 2**32, 2**63 - 1)])
    assert len(keys.unique()) == len(keys)


def test_draws_of_a_shard_are_those_of_the_whole_tensor():
    key = key_of(5, 1, torch.tensor(9))
    whole = random_bits(index_like((12, 7), torch.tensor(0)), key)
    for rows in (slice(0, 4), slice(4, 5), slice(5, 12)):
        shard = whole[rows]
        assert torch.equal(random_bits(index_like(shard.shape, torch.tensor(rows.start * 7)), key), shard)


def test_elements_2_to_the_32_apart_draw_different_bits():
    assert_independent(stream(N), stream(N, first=2**32))


def test_rows_and_lanes_draw_what_their_elements_draw():
    """Of a piece of longer rows too, and past 2**32."""
    key = key_of(5, 1, torch.tensor(9))
    for first in (0, 7 * 12, 2**32, 3 * 2**32 - 4096):
        for shape, stride in (((12, 7), (7, 1)), ((12, 5), (7, 1)), ((3, 4, 5), (35, 7, 1)), ((9,), (1,))):
            rows, lanes = rows_and_lanes(shape, torch.tensor(first), stride)
            assert rows.shape == (*shape[:-1], 1)
            whole = random_bits(index_like(shape, torch.tensor(first), stride), key)
            assert torch.equal(random_bits(rows, key, lanes), whole)


def test_index_of_an_empty_shard_and_of_a_scalar():
    assert index_like((0, 3), torch.tensor(5)).shape == (0, 3)
    assert torch.equal(index_like((), torch.tensor(5)), torch.tensor(5))


@pytest.mark.parametrize("step", [0, 1, 1000, 2**24])
def test_key_of_a_float_step_and_of_tensors_is_the_key_of_the_integers(step):
    key = key_of(-3, 2, torch.tensor(step))
    assert (key.dtype, key.shape) == (torch.int64, ())
    assert torch.equal(key_of(-3, 2, torch.tensor(float(step))), key)
    assert torch.equal(key_of(-3, torch.tensor(2), torch.tensor(step)), key)
    assert torch.equal(key_at(-3, torch.tensor(stream_of(-3, 2)), torch.tensor(float(step))), key)


def rounds(word, between):
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15 ^ between) * 0x735A2D97 % 2**32
    word = (word ^ word >> 15) * 0x31848BAB % 2**32
    return word ^ word >> 15


def in_python(index, seed, parameter, step):
    """The generator once more, in integers of unlimited size: the bits of an element, and what of them BF16 takes."""
    low, high, golden = seed % 2**32, seed % 2**64 >> 32, 0x9E3779B9
    first = rounds(low ^ golden, high)
    second = rounds(high ^ golden, first)
    third = rounds(second ^ golden, low)
    of_parameter = rounds(parameter, first)
    between = rounds(of_parameter, second) ^ rounds(step, third)
    other = of_parameter ^ (index >> 32) * golden % 2**32
    word = rounds(index % 2**32 ^ other, between)
    of_four = rounds((index >> 2) % 2**32 ^ other, between)
    if index & 2:
        of_four = (of_four ^ between) * 0x21F0AAAD % 2**32
        of_four ^= of_four >> 15
    return word, of_four << 16 * (index & 1) & 0xFFFFFFFF


WORDS = st.integers(0, 2**32 - 1)


@given(index=st.integers(0, 2**40), seed=st.integers(-(2**63), 2**63 - 1), parameter=WORDS, step=WORDS)
def test_no_integer_overflows(index, seed, parameter, step):
    key = key_of(seed, parameter, torch.tensor(step))
    found = tuple(draw(torch.tensor(index), key).item() for draw in (random_bits, random_halves))
    assert found == in_python(index, seed, parameter, step)


# ------------------------------------------------------------------------------------- halves of words, for BF16


def halves(count, **key):
    """The first draws of a stream for BF16: int64 of 16 bits."""
    key = key_of(key.get("seed", 0), key.get("parameter", 0), torch.tensor(key.get("step", 0)))
    return random_halves(torch.arange(count), key) >> 16


def assert_halves_are_independent(a, b):
    assert_uniform((a >> 12) * 16 + (b >> 12), 256)
    assert_uniform((a & 15) * 16 + (b & 15), 256)
    assert abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1].item()) < 6 / math.sqrt(len(a))


@pytest.mark.parametrize("name", STREAMS)
def test_every_half_is_uniform_whichever_of_four_it_belongs_to(name):
    draws = halves(4 * N, **STREAMS[name])
    for place in range(4):
        assert_uniform(draws[place::4], 2**16)
    assert len(draws.unique()) == 2**16


@pytest.mark.parametrize(
    "lag", [1, 2, 3, 4, 5, 64, 96, 128, 768, 1024, 3072, 4096, 12288, 14336, 50257, 2**16, 2**20]
)
@pytest.mark.parametrize("key", [{}, {"step": 12, "parameter": 3}], ids=["first", "other"])
def test_halves_of_elements_are_independent(lag, key):
    draws = halves(4 * N + lag, **key)
    for place in range(4):  # which of the words, which half of it
        assert_halves_are_independent(draws[:-lag][place::4], draws[lag:][place::4])


@pytest.mark.parametrize("element", [0, 1, 2, 3, 12346])
def test_what_an_element_s_half_is_from_step_to_step_is_independent(element):
    draws = random_halves(torch.tensor(element), key_of(0, 3, torch.arange(N + 1))) >> 16
    assert_halves_are_independent(draws[:-1], draws[1:])


@pytest.mark.parametrize("pair", [*itertools.combinations(STREAMS, 2)], ids=" and ".join)
def test_halves_of_different_keys_are_independent(pair):
    assert_halves_are_independent(*(halves(N, **STREAMS[name]) for name in pair))


def test_rows_that_begin_at_four_draw_the_same_halves():
    key = key_of(5, 1, torch.tensor(9))
    for first in (0, 8, 2**32, 2**34 - 64):
        rows, lanes = rows_and_lanes((6, 8), torch.tensor(first), (8, 1))
        whole = random_halves(index_like((6, 8), torch.tensor(first)), key)
        assert torch.equal(random_halves(rows, key, lanes), whole)
        assert torch.equal(random_halves(rows, key, lanes, at_four=True), whole)


def test_each_dtype_draws_what_it_needs():
    key, index = key_of(5, 1, torch.tensor(9)), torch.arange(64)
    assert torch.equal(drawn(torch.bfloat16, index, key), random_halves(index, key))
    assert torch.equal(drawn(torch.float16, index, key), random_bits(index, key))
