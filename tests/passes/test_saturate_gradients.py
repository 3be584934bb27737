"""saturate_gradients: FP16 gradients are clipped to a limit that is an input; inf, the default, clips nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fp8compile.fx.graph import SPLICED
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import saturate
from fp8compile.passes.saturate_gradients import saturate_gradients
from fp8compile.recipe.context import Context, StatsInputs
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, text_of
from tests.support.watched import Net, batches

PLAIN = {"linears": "off", "saved": "off"}


def test_golden_a_gradient_is_clipped_where_it_is_made_and_counted_behind_it() -> None:
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False)).half()
    graph = joint_of(model, torch.randn(16, 32).half(), **PLAIN)
    lines = [
        line for line in text_of(graph).splitlines() if "primals_5" in line or "where" in line or "convert" in line
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
primals_5: float32[]
convert_element_type_11: float16[16, 16] = clipped(tangents_1, primals_5)
view_6: float32[6, 16] = _counted(convert_element_type_11, primals_5)
permute_2: float16[16, 16] = permute(convert_element_type_11)
mm_3: float16[16, 16] = mm(convert_element_type_11, permute_4)
convert_element_type_13: float16[16, 16] = clipped(mm_3, primals_5)
where: float16[16, 16] = where(le, full_default, convert_element_type_13)
convert_element_type_15: float16[16, 16] = clipped(where, primals_5)
view_8: float32[6, 16] = _counted(convert_element_type_15, primals_5)
permute_6: float16[16, 16] = permute(convert_element_type_15)""",
    )


def clips(graph: torch.fx.Graph) -> int:
    return len({n.meta[SPLICED] for n in graph.nodes if str(n.meta.get(SPLICED)).startswith("clipped(")})


def test_what_generated_code_makes_and_nothing_else() -> None:
    """The incoming gradient, that of SiLU's result and that of its operand; none of parameters."""
    assert clips(joint_of(Net().half(), *batches(32), **PLAIN)) == 3


def test_what_goes_from_product_to_product_stays() -> None:
    chain = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 16, bias=False)).half()
    assert clips(joint_of(chain, torch.randn(16, 32).half(), **PLAIN)) == 1, "the incoming gradient alone"


def test_a_sum_of_three_products_stays() -> None:
    class Heads(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32, bias=False)
            self.heads = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(n))

        def forward(self, x: Tensor) -> Tensor:
            x = F.silu(self.first(x))
            return torch.stack([F.silu(head(x)) for head in self.heads]).sum(0)

    def count(n: int) -> int:
        torch._dynamo.reset()
        return clips(joint_of(Heads(n).half(), torch.randn(16, 32).half(), **PLAIN))

    # the incoming gradient, one at each SiLU's operand, and one for each product that x's gradient is made of
    assert [count(2), count(3)] == [1 + 3 + 2, 1 + 4]
    torch._dynamo.reset()
    assert clips(joint_of(Net().bfloat16(), batches(32)[0].bfloat16(), **PLAIN, **{"fp32.observe": True})) == 0, (
        "BF16 has the range"
    )
    torch._dynamo.reset()
    assert clips(joint_of(Net().half(), *batches(32), **PLAIN, **{"fp32.observe": False})) == 0


def test_it_is_idempotent() -> None:
    graph = joint_of(Net().half(), *batches(32), **PLAIN)
    before = len(graph.nodes)
    last = max(n.meta["desc"].idx for n in graph.find_nodes(op="placeholder") if hasattr(n.meta["desc"], "idx"))
    saturate_gradients(graph, Context(Recipe(), frozenset(), StatsInputs(last - 1, 100, ())))
    assert len(graph.nodes) == before


def test_every_half_value_at_both_limits() -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.float16)
    free = saturate(x, torch.tensor(torch.inf))
    assert (
        torch.equal(free.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])
        and free[x.isnan()].isnan().all()
    )
    clipped = saturate(x, torch.tensor(FP16_MAX))
    assert torch.equal(clipped[x.isfinite()], x[x.isfinite()]) and clipped[x.isnan()].isnan().all()
    assert clipped[x == torch.inf] == FP16_MAX and clipped[x == -torch.inf] == -FP16_MAX
