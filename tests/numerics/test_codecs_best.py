"""GroupwiseBest, which takes the better of two formats group by group; and the SQNR of all at 1 x 128."""

from __future__ import annotations

import pytest
import torch

from fp8compile.numerics import E4M3, INT8, Groupwise, GroupwiseBest
from tests.support.codecs import (
    BEST_SCALE_DTYPES,
    FP32_MAX,
    GROUP_SIZES,
    SHAPES,
    decoded,
    label,
    normal,
    scale_of_each,
)
from tests.support.reference import E8M0, U, random_positive_fp32, raw, sqnr_db

torch.set_num_threads(1)


@pytest.mark.parametrize("scale_dtype", BEST_SCALE_DTYPES, ids=label)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_best_is_one_of_the_two_groupwise_codecs_group_by_group(group_size, scale_dtype):
    for shape in SHAPES:
        x = normal(*shape)
        x *= torch.where(normal(*shape, seed=1) > 1.5, 300.0, 1.0)  # so that both formats win somewhere
        codec = GroupwiseBest(group_size, scale_dtype)
        codes, inv_scale = codec.encode(x)
        (codes_f, inv_f), (codes_i, inv_i) = (
            Groupwise(fmt, group_size, scale_dtype).encode(x) for fmt in (E4M3, INT8)
        )
        assert torch.equal(inv_scale, torch.where(inv_scale < 0, -inv_i, inv_f))
        int8 = scale_of_each(codec, inv_scale, x) < 0
        assert torch.equal(codes, torch.where(int8, raw(codes_i), raw(codes_f)))


def squared_errors(codec, x_NG):
    """Per group, in float64, of what the codec decodes to FP32."""
    return (decoded(codec, x_NG).double() - x_NG.double()).square().sum(-1)


def hard_groups(group_size):
    """Gaussian, log-normal, with outliers, constant, zero; of any FP32 magnitude, largest and smallest."""
    x = normal(400, group_size)
    heavy = x * torch.exp(1.5 * normal(400, group_size, seed=1))
    outlier = torch.where(normal(400, group_size, seed=2) > 2, 1000 * x, x)
    anything = random_positive_fp32(400 * group_size).reshape(400, group_size) * x.sign()
    unit = x / x.abs().amax(-1, keepdim=True)
    constant = x[:, :1].expand_as(x)
    extreme = [unit * amax for amax in (FP32_MAX, 1e38, 1e-37, 1e-44, 0.0)]
    return torch.cat([x, heavy, outlier, constant, anything, *extreme])


@pytest.mark.parametrize("group_size", [1, 2, 16, 128])
@pytest.mark.parametrize("scale_dtype", BEST_SCALE_DTYPES, ids=label)
def test_best_is_never_worse_than_either_format_alone(scale_dtype, group_size):
    # What is compared is E', the FP32 sum of G terms ((x_hat - x) * f)**2, f = 1 / amax. x and x_hat are
    # those that are decoded and f is common to both formats, so a term carries (1 + U) for the difference
    # and for its product with f, both squared, and for the square: (1 + U)**5. The sum of non-negative
    # terms, in whatever order, adds (1 + U)**(G - 1). Hence E' = E (1 + t), |t| <= (1 + U)**(G + 4) - 1 =
    # g, and where the wrong one is taken, E_taken <= E_other * (1 + g) / (1 - g). A term that underflows
    # loses up to 2**-149 of amax**2.
    x = hard_groups(group_size)
    ours = squared_errors(GroupwiseBest(group_size, scale_dtype), x)
    alone = [squared_errors(Groupwise(fmt, group_size, scale_dtype), x) for fmt in (E4M3, INT8)]
    g = (1 + U) ** (group_size + 4) - 1
    unit = x.double().abs().amax(-1).clamp_min(2.0**-120)
    underflow = 2 * group_size * 2.0**-149 * unit.square()
    assert (ours <= torch.minimum(*alone) * (1 + g) / (1 - g) + underflow).all()


@pytest.mark.parametrize("scale_dtype", BEST_SCALE_DTYPES, ids=label)
def test_best_takes_int8_for_gaussian_groups(scale_dtype):
    _, inv_scale = GroupwiseBest(scale_dtype=scale_dtype).encode(normal(5000, 128))
    assert (inv_scale < 0).all()


@pytest.mark.parametrize("scale_dtype", BEST_SCALE_DTYPES, ids=label)
def test_best_takes_e4m3_where_one_outlier_dwarfs_the_rest(scale_dtype):
    # Beside an outlier of 1, the 127 others lie in [1/1000, 1/300]: under half a step of INT8 (1/254, less
    # 2**-8 of it for the rounded scale), which loses their whole energy E >= 127e-6. For E4M3 they are
    # normal numbers (448/1000 > 2**-6), so it errs by at most E / 2**8 in all, and by 2**-8 at the outlier,
    # from the rounded scale: E / 2**8 + 2**-16 < E / 2**8 + 1.6e-5 < E.
    x = 1e-3 + (1 / 300 - 1e-3) * torch.rand(1000, 128, generator=torch.Generator().manual_seed(0))
    x = x * normal(1000, 128).sign()
    x[torch.arange(1000), torch.arange(1000) % 128] = 1.0
    _, inv_scale = GroupwiseBest(scale_dtype=scale_dtype).encode(x)
    assert (inv_scale > 0).all()


def test_best_uses_both_formats_on_heavy_log_normal_data_and_beats_both():
    x = normal(1000, 128) * torch.exp(2.0 * normal(1000, 128, seed=1))
    codec = GroupwiseBest()
    _, inv_scale = codec.encode(x)
    assert (inv_scale < 0).any() and (inv_scale > 0).any()
    alone = [sqnr_db(x, decoded(Groupwise(fmt), x)) for fmt in (E4M3, INT8)]
    assert sqnr_db(x, decoded(codec, x)) > max(alone)


def test_best_refuses_a_scale_without_a_sign():
    with pytest.raises(ValueError, match="sign"):
        GroupwiseBest(scale_dtype=E8M0)


def student_t3(count):
    return normal(count) / (normal(3, count, seed=1).square().sum(0) / 3).sqrt()


# The project's reference measurements in dB, INT8 then E4M3. They name no parameters for SiLU (here of a
# standard normal) and for the heavy log-normal (here a standard normal times exp(1.5 z), z another: of the
# forms tried, the one that gives both of its figures).
REFERENCE_SQNR = {
    "gaussian": (lambda n: normal(n), 43.8, 31.8),
    "silu": (lambda n: torch.nn.functional.silu(normal(n)), 40.5, 32.2),
    "student-t(3)": (student_t3, 36.9, 33.2),
    "log-normal": (lambda n: normal(n) * torch.exp(1.5 * normal(n, seed=1)), 34.6, 37.1),
}


@pytest.mark.parametrize(("draw", "int8", "e4m3"), REFERENCE_SQNR.values(), ids=REFERENCE_SQNR)
def test_sqnr_at_1x128_is_the_reference_within_half_a_decibel(draw, int8, e4m3):
    x = draw(2**22)  # heavy tails converge slowly
    assert abs(sqnr_db(x, decoded(Groupwise(INT8), x)) - int8) < 0.5
    assert abs(sqnr_db(x, decoded(Groupwise(E4M3), x)) - e4m3) < 0.5
