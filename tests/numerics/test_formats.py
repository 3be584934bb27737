"""The three formats, all 256 codes each, against ml_dtypes and the published tables."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8compile.numerics import E4M3, E5M2, INT8
from tests.support.reference import FLOAT_FORMATS, FORMATS, NUMPY, all_codes, raw, reference_values

by_name = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
float_by_name = pytest.mark.parametrize("fmt", FLOAT_FORMATS, ids=lambda fmt: fmt.name)


def finite_grid(fmt):
    """The distinct finite values of a format in ascending order."""
    values = reference_values(fmt)
    return np.unique(values[np.isfinite(values)])


@by_name
def test_each_of_256_codes_has_the_value_that_ml_dtypes_gives_it(fmt):
    values = all_codes(fmt).to(torch.float64).numpy()
    np.testing.assert_array_equal(values, reference_values(fmt))  # NaNs must stand in the same places
    np.testing.assert_array_equal(np.signbit(values), np.signbit(reference_values(fmt)))  # -0 too


@by_name
def test_each_finite_code_survives_a_round_trip_through_fp32(fmt):
    codes = all_codes(fmt)
    codes = codes[codes.float().isfinite()]
    assert torch.equal(raw(codes.float().to(fmt.dtype)), raw(codes))


@pytest.mark.parametrize(
    ("fmt", "finite", "infinite", "nan"), [(E4M3, 254, 0, 2), (E5M2, 248, 2, 6), (INT8, 256, 0, 0)]
)
def test_count_of_finite_infinite_and_nan_codes(fmt, finite, infinite, nan):
    values = all_codes(fmt).float()
    counts = (values.isfinite().sum().item(), values.isinf().sum().item(), values.isnan().sum().item())
    assert counts == (finite, infinite, nan)


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest"),
    [(E4M3, 448.0, 2.0**-9), (E5M2, 57344.0, 2.0**-16), (INT8, 127.0, 1.0)],
)
def test_constants_are_those_of_the_published_table(fmt, largest, smallest):
    assert (fmt.max, fmt.smallest) == (largest, smallest)


@by_name
def test_max_and_smallest_are_the_extremes_of_the_positive_codes(fmt):
    positive = finite_grid(fmt)
    positive = positive[positive > 0]
    assert (fmt.max, fmt.smallest) == (positive.max(), positive.min())


@float_by_name
def test_constants_agree_with_both_finfos(fmt):
    theirs, torchs = ml_dtypes.finfo(NUMPY[fmt.name]), torch.finfo(fmt.dtype)
    assert fmt.max == float(theirs.max) == torchs.max
    assert fmt.smallest == float(theirs.smallest_subnormal)
    assert fmt.half_ulp == float(theirs.eps) / 2 == torchs.eps / 2


@float_by_name
def test_half_ulp_bounds_the_error_of_rounding_any_normal_value(fmt):
    grid = finite_grid(fmt)
    normal = grid[grid >= float(ml_dtypes.finfo(NUMPY[fmt.name]).smallest_normal)]
    half_gap = np.diff(normal) / 2
    midpoints = normal[:-1] + half_gap  # where the relative error of rounding is largest
    assert (half_gap / midpoints < fmt.half_ulp).all()
    assert (half_gap / normal[:-1]).max() == fmt.half_ulp  # and no smaller power of two would do


@float_by_name
def test_subnormals_are_multiples_of_smallest(fmt):
    grid = finite_grid(fmt)
    smallest_normal = float(ml_dtypes.finfo(NUMPY[fmt.name]).smallest_normal)
    subnormal = grid[(grid >= 0) & (grid <= smallest_normal)]
    np.testing.assert_array_equal(subnormal, fmt.smallest * np.arange(len(subnormal)))


def test_int8_error_is_half_of_smallest_everywhere():
    assert (np.diff(finite_grid(INT8)) == INT8.smallest).all()
    assert INT8.half_ulp == 0.0


@by_name
def test_usable_codes_are_symmetric_about_zero(fmt):
    grid = finite_grid(fmt)
    used = grid[np.abs(grid) <= fmt.max]  # INT8 leaves -128 out
    np.testing.assert_array_equal(used, -used[::-1])


@by_name
def test_a_code_is_one_byte(fmt):
    assert torch.empty(0, dtype=fmt.dtype).element_size() == 1


def test_only_the_fp8_formats_are_floats():
    assert [fmt.is_float for fmt in FORMATS] == [True, True, False]


def test_formats_are_distinct_hashable_constants():
    assert len({E4M3, E5M2, INT8}) == 3
