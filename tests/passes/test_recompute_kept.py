"""recompute_kept: golden, contract, declines."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled, kept_bytes

aten = torch.ops.aten


class Gated(nn.Module):
    """As SwiGLU, with a gate whose derivative torch 2.11 and 2.13 write alike."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(size, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def test_golden_backward_of_a_gated_product() -> None:
    split = split_of(Gated(), torch.randn(128, 64), disabled="cut_for_bytes,encode_saved")
    assert_expected_inline(
        backward_of(split),
        """\
primals_2: float32[128, 64]
primals_4: float32[64, 64]
mm: float32[128, 64]
mm_1: float32[128, 64]
tangents_1: float32[128, 64]
permute_3: float32[64, 128] = permute(tangents_1)
tanh_1: float32[128, 64] = tanh(mm)
mul_5: float32[128, 64] = mul(tanh_1, mm_1)
mm_3: float32[64, 64] = mm(permute_3, mul_5)
permute_2: float32[64, 64] = permute(primals_4)
permute_5: float32[64, 64] = permute(permute_2)
mm_4: float32[128, 64] = mm(tangents_1, permute_5)
tanh: float32[128, 64] = tanh(mm)
mul_1: float32[128, 64] = mul(mm_4, tanh)
mul_2: float32[128, 64] = mul(mm_4, mm_1)
permute_7: float32[64, 128] = permute(mul_1)
mm_5: float32[64, 64] = mm(permute_7, primals_2)
mul_3: float32[128, 64] = mul(tanh, tanh)
sub: float32[128, 64] = sub(mul_3)
mul_4: float32[128, 64] = mul(mul_2, sub)
permute_10: float32[64, 128] = permute(mul_4)
mm_6: float32[64, 64] = mm(permute_10, primals_2)
return mm_6, None, mm_5, mm_3
""",
    )


def test_the_gates_product_is_made_again_once_and_no_matmul_is() -> None:
    split = split_of(Gated(), torch.randn(128, 64), disabled="cut_for_bytes,encode_saved")
    ops = [n.target for n in split.bw.graph.nodes]
    assert ops.count(aten.mm.default) == 4, "three wgrads and, as x takes no gradient, the dgrad of down alone"
    kept = {e.forward.target for e in split.edges if not split.caller_owns(e.forward)}
    assert kept <= {aten.mm.default, aten.permute.default}, kept


def test_a_value_is_never_made_through_another_that_is_made_again() -> None:
    """A residual stream of pointwise steps: rebuilding it from its start would keep all of it alive at once."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = torch.relu(x + step(x))
            return x

    model, x = Stream(), torch.randn(128, 64)
    fn = compiled(model, **{"saved.min_numel": 0})
    kept_bytes(model, fn, (x,))
    report = fp8compile.report(fn)
    dropped = {r.name for r in report.recomputed}
    assert not any(dropped & set(r.sources) for r in report.recomputed)


def test_it_is_idempotent() -> None:
    from fp8compile.passes.recompute_kept import recompute_kept
    from fp8compile.recipe.context import Context
    from fp8compile.recipe.recipe import Recipe
    from fp8compile.reporting.entries import Notes

    split = split_of(Gated(), torch.randn(128, 64), disabled="encode_saved")
    assert recompute_kept(split, Context(Recipe())) == Notes()


def test_products_and_reductions_are_not_repeated() -> None:
    class Reductions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return torch.sigmoid(h.cumsum(0)) * h

    split = split_of(Reductions(), torch.randn(128, 64), disabled="encode_saved")
    ops = [n.target for n in split.bw.graph.nodes]
    assert ops.count(aten.cumsum.default) == 1, "the derivative's own, none made again"
    assert aten.addmm.default not in ops
    assert {aten.cumsum.default, aten.addmm.default} <= {e.forward.target for e in split.edges}
