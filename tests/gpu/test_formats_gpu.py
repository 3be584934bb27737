"""The self-test of FP8 in generated code: every code comes back, and a transposed store beside an amax is right.

The second guards against triton #11111: a miscompiled transposed store of one-byte values beside a min/max that
propagates NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, E5M2, INT8, Format
from fp8compile.numerics.codecs import Groupwise, Tensorwise
from fp8compile.numerics.scaling import amax_tensorwise, dequantize, quantize
from tests.support.reference import all_codes, bits_equal

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda fmt: fmt.name)


def both(function: Callable[..., object], gpu: torch.device, *args: Tensor) -> tuple[object, object]:
    """What compiled code makes on the GPU, and what eager PyTorch makes on the CPU."""
    compiled = torch.compile(function, dynamic=False)
    return compiled(*(x.to(gpu) for x in args)), function(*args)


@FORMATS
def test_all_256_codes_decode_as_on_a_cpu_and_come_back(fmt: Format, gpu: torch.device) -> None:
    one = torch.ones(())

    def round_trip(codes: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
        x = dequantize(codes, inv_scale, torch.float32)
        return x, quantize(x, inv_scale, fmt)

    found, expected = both(round_trip, gpu, all_codes(fmt), one)
    assert isinstance(found, tuple) and isinstance(expected, tuple)
    x, codes = (t.cpu() for t in found)
    assert bits_equal(x, expected[0])
    finite = x.abs() <= fmt.max  # a code for inf saturates, one for NaN is as good as another
    assert int(finite.sum()) >= 246  # E5M2 has 2 infinities and 6 NaN, E4M3 2 NaN, INT8 the unused -128
    assert torch.equal(codes[finite].view(torch.uint8), all_codes(fmt)[finite].view(torch.uint8))


@FORMATS
@pytest.mark.parametrize("poisoned", [False, True], ids=["finite", "with a NaN"])
@pytest.mark.parametrize("shape", [(128, 256), (1000, 520), (33, 4096)], ids=str)
def test_a_transposed_store_beside_an_amax(
    fmt: Format, poisoned: bool, shape: tuple[int, int], gpu: torch.device
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[7, 11] = torch.nan if poisoned else x[7, 11]

    def encode(x: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = quantize(x, inv_scale, fmt)
        return codes, codes.t().contiguous(), amax_tensorwise(x)

    found, _ = both(encode, gpu, x, torch.tensor(2.0**-5))
    assert isinstance(found, tuple)
    codes, transposed, amax = (t.cpu() for t in found)
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    expected = quantize(x, torch.tensor(2.0**-5), fmt)  # a power of two: the product is exact, the code is too
    known = x.isfinite()
    assert torch.equal(codes.view(torch.uint8)[known], expected.view(torch.uint8)[known])
    assert bool(amax.isnan()) if poisoned else torch.equal(amax, x.abs().amax())


@pytest.mark.parametrize("codec", [Groupwise(INT8), Groupwise(E4M3), Tensorwise(E4M3)], ids=lambda c: c.name)
def test_decoded_values_are_within_the_bound_of_the_format(codec: Groupwise | Tensorwise, gpu: torch.device) -> None:
    """|x' - x| <= max(|x| h, inv_scale smallest / 2) (1 + 2**-20): the GPU's reciprocal and product are a few ulp off."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))

    def round_trip(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, inv_scale = codec.encode(x)
        return codec.decode(codes, inv_scale, torch.float32), inv_scale

    decoded, inv_scale = (t.cpu().double() for t in torch.compile(round_trip, dynamic=False)(x.to(gpu)))
    per_element = inv_scale.reshape(-1, 1).expand(-1, x.numel() // inv_scale.numel()).reshape(x.shape)
    bound = torch.maximum(x.abs().double() * codec.format.half_ulp, per_element * codec.format.smallest / 2)
    past_the_end = (x.abs().double() - codec.format.max * per_element).clamp_min(0)
    assert bool(((decoded - x.double()).abs() <= (bound + past_the_end) * (1 + 2.0**-20) + x.abs() * 2.0**-20).all())
