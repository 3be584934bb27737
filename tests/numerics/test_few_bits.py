"""FewBits, proved: unbiased for every half value, its bound, its bytes, its packing; odd input."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fp8compile.numerics.few_bits import BITS, LIMIT, ROUNDINGS, SMALLEST_STEP, FewBits, distance, start_of
from tests.support.codecs import few_bits_lengths, of_each_element
from tests.support.reference import every_value, finite_values

torch.set_num_threads(1)

CODECS = [FewBits(bits, size, r) for bits, size, r in itertools.product(BITS, (32, 128), ROUNDINGS)]
UNBIASED = [FewBits(bits, 128, rounding) for bits in BITS for rounding in ("dithered", "stochastic")]
HALF = 0.5 + 2.0**-16  # of a step: see the head of the module
LARGEST_ERROR = {"dithered": HALF, "nearest": HALF, "stochastic": 1 + 2.0**-16}

by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def decoded(codec: FewBits, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return codec.decode(*codec.encode(x), x.shape, dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held_values(dtype: torch.dtype) -> Tensor:
    """Every finite value below ``LIMIT``, ascending."""
    values = finite_values(dtype)
    return values[values.float().abs() < LIMIT]


def steps_of(codec: FewBits, x: Tensor) -> Tensor:
    """The step of each element, in float64."""
    return of_each_element(codec.encode(x)[1].double(), few_bits_lengths(x.shape, codec.group_size), x)


# ---------------------------------------------------------------------------------------------- unbiased


def largest_mean_error(codec: FewBits, dtype: torch.dtype, draws: int) -> float:
    """Of every finite value of ``dtype``, among its neighbours: the largest mean error over as many groups, in steps."""
    values = held_values(dtype)
    rows = torch.cat([values, values[-1:].expand(-len(values) % codec.group_size)]).reshape(-1, codec.group_size)
    worst = 0.0
    for row in rows:
        x = row.expand(draws, -1)  # each repetition has another number, and so draws others
        inv_scale = float(codec.encode(row)[1])
        worst = max(worst, float((decoded(codec, x).double() - x.double()).mean(0).abs().max()) / inv_scale)
    return worst


def hoeffding(draws: int, events: int) -> float:
    """What the mean of so many numbers in an interval of length 1 is off by, in any of these cases, once in a million."""
    return math.sqrt(math.log(2 * events * 1e6) / (2 * draws))


@pytest.mark.parametrize("codec", UNBIASED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("draws", [100, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_every_half_value_is_right_on_average(codec: FewBits, dtype: torch.dtype, draws: int) -> None:
    assert largest_mean_error(codec, dtype, draws) <= hoeffding(draws, 65536) + 2.0**-13


def test_nearest_is_not() -> None:
    assert largest_mean_error(FewBits(4, 128, "nearest"), torch.float16, 50) > 0.45


def test_dithered_has_half_the_variance_of_stochastic() -> None:
    """step**2 / 12 for any y, against f (1 - f) step**2, on the average over f step**2 / 6."""
    x = normal(2000, 128)
    for bits in BITS:
        variance = {}
        for rounding in ("dithered", "stochastic"):
            codec = FewBits(bits, 128, rounding)
            variance[rounding] = float(((decoded(codec, x).double() - x) / steps_of(codec, x)).square().mean())
        assert math.isclose(variance["dithered"], 1 / 12, rel_tol=0.02), "256,000 numbers with a kurtosis of 1.8"
        assert variance["stochastic"] > 1.8 * variance["dithered"] or bits == 2


def test_the_dithered_error_does_not_depend_on_the_value() -> None:
    """Half-way between two codes or on one of them: the same variance, where the stochastic one has 1/4 and 0."""
    for rest, stochastic in ((0.0, 0.0), (0.5, 0.25)):
        x = torch.full((4000, 32), 7 + rest)
        x[:, 0], x[:, 1] = 0, 15
        for rounding, expected in (("dithered", 1 / 12), ("stochastic", stochastic)):
            error = decoded(FewBits(4, 32, rounding), x)[:, 2:] - x[:, 2:]
            assert abs(float(error.square().mean()) - expected) < 0.002


def drawn(codec: FewBits, x: Tensor) -> Tensor:
    """u - 1/2 of each element of groups ``[N, G]``."""
    _, inv_scale, zero_point = codec.encode(x)
    return distance(start_of(inv_scale.float(), zero_point.float()), torch.arange(x.shape[1]).float()).double()


def test_equal_groups_draw_numbers_that_do_not_depend_on_each_other() -> None:
    """At every place uniform over groups, up to what 65,536 numbers deviate by chance; next groups are not correlated."""
    u = drawn(FewBits(4, 32), torch.linspace(0, 1, 32).repeat(65536, 1))
    assert float(u.mean(0).abs().max()) < 5 * math.sqrt(1 / 12 / 65536)
    assert float((u.square().mean(0) * 12 - 1).abs().max()) < 5 * math.sqrt(0.8 / 65536)
    assert abs(float(torch.corrcoef(torch.stack([u[:-1, 0], u[1:, 0]]))[0, 1])) < 5 / math.sqrt(65536)


def test_within_a_group_they_are_spread_evenly() -> None:
    u = drawn(FewBits(4, 128), normal(100, 128)).sort(1).values
    gaps = torch.cat([u.diff(dim=1), 1 + u[:, :1] - u[:, -1:]], 1)
    assert float(gaps.max()) < 3 / 128 and float(gaps.min()) > 0


def test_metadata_that_move_by_an_ulp_draw_other_numbers() -> None:
    one, ulp = torch.ones(4096, 1), torch.full((4096, 1), 1 + 2.0**-7)
    starts = [start_of(inv_scale, zero_point)[:, 0] for inv_scale, zero_point in ((one, one), (ulp, one), (one, ulp))]
    for a, b in itertools.combinations(starts, 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(4096)


# ----------------------------------------------------------------------------------------------------- the bound


@by_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_value_is_within_its_bound(codec: FewBits, dtype: torch.dtype) -> None:
    values = held_values(dtype)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    for x in (values, shuffled):
        error = (decoded(codec, x).double() - x.double()).abs()
        assert bool((error <= LARGEST_ERROR[codec.rounding] * steps_of(codec, x)).all())


@by_codec
@pytest.mark.parametrize("offset", [0.0, 3.0, -1000.0])
def test_the_step_is_no_wider_than_promised(codec: FewBits, offset: float) -> None:
    x = normal(500, codec.group_size) + offset
    _, inv_scale, zero_point = codec.encode(x)
    lo, hi = x.double().amin(1, keepdim=True), x.double().amax(1, keepdim=True)
    assert bool((zero_point.double() <= lo).all()) and bool((zero_point.double() >= lo - 2.0**-7 * lo.abs()).all())
    assert bool((zero_point.double() + codec.levels * inv_scale.double() * (1 + 2.0**-22) >= hi).all())
    widest = (hi - lo + 2.0**-7 * lo.abs()) / codec.levels * (1 + 2.0**-7)
    assert bool((inv_scale.double() <= widest.clamp_min(SMALLEST_STEP) * (1 + 2.0**-22)).all())


@by_codec
def test_the_largest_numbers_stay_finite_and_the_smallest_keep_their_place(codec: FewBits) -> None:
    for dtype, top in ((torch.float16, 65504.0), (torch.bfloat16, 2.0**125), (torch.float32, 0.99 * LIMIT)):
        for x in (torch.tensor([-top, top]), torch.tensor([top, 0.9 * top]), torch.tensor([-top, -0.9 * top])):
            x = x.repeat(codec.group_size).to(dtype)
            found = decoded(codec, x, dtype)
            assert bool(found.isfinite().all())
            allowed = LARGEST_ERROR[codec.rounding] * steps_of(codec, x) + 2.0**-8 * x.double().abs()
            assert bool(((found.double() - x.double()).abs() <= allowed).all())
    tiny = torch.full((codec.group_size,), 2.0**-149)
    tiny[0] = 0
    assert float(decoded(codec, tiny).abs().max()) <= SMALLEST_STEP
    assert bool(decoded(codec, torch.tensor([0.0, LIMIT])).isnan().all()), "and what is larger is not hidden"


# ------------------------------------------------------------------------------------------------- bytes, packing


def unpacked_by_the_book(codec: FewBits, codes: Tensor, lengths: list[int]) -> list[int]:
    """Codes in the order of their elements, read bit by bit with Python's integers."""
    per_word, size = {2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3)}[codec.bits]
    found, start = [], 0
    for length in lengths:
        filled = math.ceil(length / 8) * 8
        words, group_bytes = filled // per_word, filled * codec.bits // 8
        group = codes[start : start + group_bytes].tolist()
        for i in range(length):
            word = sum(group[q * words + i % words] << (8 * q) for q in range(size))
            found.append(word >> (codec.bits * (i // words)) & codec.levels)
        start += group_bytes
    return found


@pytest.mark.parametrize("longest", [200, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("bits", BITS)
def test_packing_is_bit_exact_for_every_length(bits: int, longest: int) -> None:
    """Whole numbers from 0 to the largest code are their own codes, whatever is drawn."""
    for rounding in ("stochastic", "nearest"):
        codec = FewBits(bits, 32, rounding)
        generator = torch.Generator().manual_seed(bits)
        for length in range(1, longest + 1):
            x = torch.randint(0, codec.levels + 1, (length,), generator=generator)
            lengths = few_bits_lengths((length,), 32)
            for group in x.split(lengths):  # each holds both ends
                group[0], group[-1] = 0, codec.levels
            codes, inv_scale, zero_point = codec.encode(x.float())
            whole = lengths[-1] > 1  # a tail of one element is a group of one value
            expected = x.tolist() if whole else x.tolist()[:-1]
            assert unpacked_by_the_book(codec, codes, lengths)[: len(expected)] == expected
            assert torch.equal(codec.decode(codes, inv_scale, zero_point, x.shape, torch.float32), x.float())


@by_codec
@pytest.mark.parametrize(
    "shape", [(1,), (31,), (33,), (4096,), (5, 64), (3, 192), (7, 197), (2, 3, 5), (40, 3)], ids=str
)
def test_bytes_are_exact(codec: FewBits, shape: tuple[int, ...]) -> None:
    parts = codec.encode(normal(*shape))
    assert sum(part.nbytes for part in parts) == codec.nbytes(shape)
    lengths = few_bits_lengths(shape, codec.group_size)
    assert codec.nbytes(shape) == sum(math.ceil(length / 8) * codec.bits + 4 for length in lengths)
    assert codec.count(shape) == len(lengths)
    assert codec.nbytes((9, 4 * codec.group_size)) == 36 * (codec.group_size * codec.bits // 8 + 4)


# --------------------------------------------------------------------------------------------------- odd input


@by_codec
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (127,), (129,), (3, 100), (4, 3, 43), (2, 64)])
def test_any_shape_comes_back_in_its_shape_and_within_its_bound(codec: FewBits, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(*shape, dtype=dtype)
        found = decoded(codec, x)
        assert found.shape == x.shape and found.dtype == torch.float32
        error = (found.double() - x.double()).abs()
        assert bool((error <= LARGEST_ERROR[codec.rounding] * steps_of(codec, x)).all())


@by_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 2.0**-133])
def test_a_group_of_one_bfloat16_number_is_exact(codec: FewBits, value: float) -> None:
    x = torch.full((300,), value)
    assert torch.equal(decoded(codec, x), x)


@by_codec
def test_the_last_groups_step_sees_its_own_elements_alone(codec: FewBits) -> None:
    last = few_bits_lengths((codec.group_size + 5,), codec.group_size)[-1]
    x = torch.cat([normal(codec.group_size + 5 - last), torch.full((last,), 100.0)])
    assert torch.equal(decoded(codec, x)[-last:], x[-last:])


@by_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40, 299])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(codec: FewBits, value: float, place: int) -> None:
    x = normal(300)
    x[place] = value
    expected = torch.zeros(300, dtype=torch.bool)
    starts = [0, *itertools.accumulate(few_bits_lengths((300,), codec.group_size))]
    start, end = next((a, b) for a, b in itertools.pairwise(starts) if a <= place < b)
    expected[start:end] = True
    assert torch.equal(decoded(codec, x).isnan(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_non_finite_half_value_is_seen(dtype: torch.dtype) -> None:
    values = every_value(dtype)
    values = values[~values.isfinite()]
    x = torch.zeros(len(values), 8, dtype=dtype)
    x[:, 3] = values
    assert bool(decoded(FewBits(4, 8), x).isnan().all())


def test_no_random_number_is_taken_and_codes_repeat() -> None:
    state, x = torch.get_rng_state(), normal(1000)
    first, again = FewBits(3).encode(x), FewBits(3).encode(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("arguments", [(1,), (7,), (8,), (4, 30), (4, 0), (4, 131072), (4, 64, "up")])
def test_what_it_cannot_be_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="FewBits"):
        FewBits(*arguments)  # type: ignore[arg-type]
