"""A transposed store of one-byte codes beside a NaN-propagating maximum: newer Tritons miscompile it (triton #11111).

Our tensorwise encoding in both layouts is that kernel. On a GPU the codes must be the CPU's, and the transposed copy the
codes themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, E5M2, Tensorwise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(64, 64), (4096, 1024), (1000, 528)])
@pytest.mark.parametrize("with_nan", [False, True])
def test_codes_in_both_layouts_are_the_same_codes(fmt: object, shape: tuple[int, int], with_nan: bool) -> None:
    codec = Tensorwise(fmt)  # type: ignore[arg-type]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    if with_nan:
        x[shape[0] // 2, 3] = torch.nan

    def both_layouts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, inv_scale = codec.encode(x)
        return codes, codes.t().contiguous(), inv_scale

    codes, transposed, inv_scale = (t.cpu() for t in torch.compile(both_layouts)(x.cuda()))
    expected, _, expected_scale = both_layouts(x)
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    torch.testing.assert_close(inv_scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    if not with_nan:  # under a NaN scale codes say nothing
        differing = (codes.view(torch.uint8) != expected.view(torch.uint8)).sum().item()
        # A GPU's division is 2 ulp off: a tie may fall the other way, with all elements that have its mantissa (of 128).
        assert differing <= x.numel() / 64
