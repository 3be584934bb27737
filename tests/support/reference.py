"""What fp8compile.numerics is compared with: ml_dtypes for the rounding, float64 for scales and errors.

Nothing here calls the code under test. Only the constants of a Format are used; test_formats.py proves those.
"""

import math

import ml_dtypes
import numpy as np
import torch

from fp8compile.numerics import E4M3, E5M2, INT8

FORMATS = (E4M3, E5M2, INT8)
FLOAT_FORMATS = (E4M3, E5M2)
E8M0 = torch.float8_e8m0fnu
SCALE_DTYPES = (torch.float32, torch.bfloat16, E8M0)
TWO_BYTE_DTYPES = (torch.bfloat16, torch.float16)

NUMPY = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
    torch.float32: np.float32,
}

U = 2.0**-24  # largest relative error of one FP32 rounding


def every_value(dtype):
    """All 65,536 values of a two-byte float dtype, in the order of their bits."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def finite_values(dtype):
    """All finite values of a two-byte float dtype in ascending order, -0 before +0."""
    values = every_value(dtype)
    values = values[values.isfinite()]
    negative = values.view(torch.int16) < 0
    return torch.cat([values[negative].flip(0), values[~negative]])


def non_finite_values(dtype):
    """Both infinities and every NaN of a two-byte float dtype."""
    values = every_value(dtype)
    return values[~values.isfinite()]


def random_positive_fp32(count, seed=0):
    """FP32 values uniform over bit patterns: all magnitudes equally likely, subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 0x7F800000, (count,), dtype=torch.int32, generator=generator).view(torch.float32)


def all_codes(fmt):
    """The 256 codes of a format, in the order of their bits."""
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype)


def reference_values(fmt):
    """The float64 value of each of the 256 codes, by ml_dtypes."""
    return np.arange(256, dtype=np.uint8).view(NUMPY[fmt.name]).astype(np.float64)


def reference_scale(inv_scale):
    """The float64 number that a stored inverse scale stands for; uint8 is read as E8M0 by ml_dtypes."""
    if inv_scale.dtype != torch.uint8:
        return inv_scale.double()
    return torch.from_numpy(inv_scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


def reference_codes(x, inv_scale, fmt):
    """Raw bytes of the codes of a finite x: FP32 product, clip, and ml_dtypes' (or numpy's) rounding."""
    with np.errstate(over="ignore"):
        product = x.float().numpy() * (np.float32(1) / inv_scale.float().numpy())
    clipped = np.clip(product, -fmt.max, fmt.max)
    rounded = clipped if fmt.is_float else np.rint(clipped)
    return torch.from_numpy(rounded.astype(NUMPY[fmt.name]).view(np.uint8))


def raw(codes):
    """The bytes of a tensor of codes."""
    return codes.contiguous().view(torch.uint8)


def bits_equal(a, b):
    """Same shape, dtype and bits (so -0 is not +0), except that any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    same = a.contiguous().view(as_integer) == b.contiguous().view(as_integer)
    if a.dtype.is_floating_point:
        same |= a.float().isnan() & b.float().isnan()
    return bool(same.all())


def round_trip_bound(x, x_hat, inv_scale, fmt):
    """Bound on |x_hat - x| where x_hat was decoded to FP32. Tensors are float64, inv_scale one per element.

    Let y = x / inv_scale and y' the FP32 number that is rounded to a code. The reciprocal and the product are
    one rounding each, so |y' - y| <= d |y| with d = (1 + U)**2 - 1.
      * The code c nearest to y' has |c - y'| <= max(h |y'|, smallest / 2), h being half_ulp and smallest the
        spacing of subnormals; hence |c - y| <= max(h |y|, smallest / 2) + (1 + h) d |y|.
      * Past the end, |y| > max: c = max unless y' fell short of it by d |y|, so |c - y| <= |y| - max + d |y|.
      * An FP32 product below 2**-126 is not relatively accurate, but then c = 0 and |y| < smallest / 2.
    Times inv_scale, plus the FP32 rounding of the decoded product: U |x_hat|, or 2**-150 if it is subnormal.
    Saturation at FP32's largest value only brings x_hat nearer to x.
    """
    d = (1 + U) ** 2 - 1
    grid = torch.maximum(x.abs() * fmt.half_ulp, inv_scale * (fmt.smallest / 2))
    past_the_end = x.abs() - fmt.max * inv_scale
    decode = torch.clamp(x_hat.abs() * U, min=2.0**-150) / (1 - U)
    return torch.maximum(grid, past_the_end) + (1 + fmt.half_ulp) * d * x.abs() + decode


def sqnr_db(x, x_hat):
    """Signal to quantisation noise ratio in dB, in float64; inf where they are equal, -inf where ``x_hat`` is not finite."""
    x, x_hat = x.detach().double(), x_hat.detach().double()
    if not x_hat.isfinite().all():
        return -math.inf
    signal, noise = x.square().sum(), (x - x_hat).square().sum()
    return math.inf if noise == 0 else 10 * (signal / noise).log10().item()
