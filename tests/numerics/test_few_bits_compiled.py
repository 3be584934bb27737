"""FewBits, compiled by Inductor: the bits that it gives eagerly, and one graph for any number of rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.numerics.few_bits import BITS, FewBits

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("codec", [FewBits(b, 32) for b in BITS], ids=lambda codec: codec.name)
def test_compiled_it_gives_the_same_bits(codec: FewBits) -> None:
    """Every step is exact or one rounding, in this order."""
    x = normal(6, 77, dtype=torch.bfloat16)
    x[0], x[1, 5], x[2, 60] = 0, math.nan, -math.inf
    x[3] *= 1e30
    x[4] *= 1e-30

    def round_trip(x: Tensor) -> tuple[Tensor, ...]:
        parts = codec.encode(x)
        return *parts, codec.decode(*parts, x.shape, x.dtype)

    torch._dynamo.reset()
    for ours, eager in zip(torch.compile(round_trip, fullgraph=True)(x), round_trip(x), strict=True):
        assert torch.equal(ours.nan_to_num(123), eager.nan_to_num(123))


@functorch_config.patch(enable_autograd_cache=False)  # its key is -x, whatever is compiled in place of it
def test_traced_with_a_symbolic_number_of_rows_groups_end_with_their_row() -> None:
    codec = FewBits(4, 32)

    def round_trip(x: Tensor) -> Tensor:
        return codec.decode(*codec.encode(x), x.shape, x.dtype)

    def inner_compile(
        _: object, values: list[Tensor], **kwargs: Any
    ) -> Any:  # in place of -x, traced as a pass would
        trace = make_fx(lambda *args: [round_trip(args[-1])], decomposition_table=select_decomp_table())
        return compile_fx_inner(trace(*values), values, **kwargs)

    backend = partial(compile_fx, inner_compile=inner_compile)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: -x, fullgraph=True, backend=backend)
    rows = normal(6, 5, 100)
    torch._dynamo.mark_dynamic(rows, 0)
    compiled(rows)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (6, 7, 64):
            x = normal(count, 5, 100, seed=count)
            assert torch.equal(compiled(x), round_trip(x))
