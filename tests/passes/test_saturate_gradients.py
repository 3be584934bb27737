"""saturate_gradients: FP16 gradients are clipped to a limit that is an input; inf, the default, clips nothing."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from fp8compile.passes.saturate_gradients import saturate_gradients
from torch import nn

from fp8compile.context import Context, Inputs
from fp8compile.graph import SPLICED
from fp8compile.numerics.histogram import FP16_MAX, saturate
from fp8compile.recipe import Recipe
from tests.passes.graphs import joint_of, text_of
from tests.watched import Net, batches

PLAIN = {"linear": "off", "saved": "off"}


def test_golden_every_gradient_is_clipped_behind_its_counts() -> None:
    graph = joint_of(nn.Linear(32, 16, bias=False).half(), torch.randn(16, 32).half(), **PLAIN)
    lines = [line for line in text_of(graph).splitlines() if "clipped" in line or "mm(" in line or "return" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
convert_element_type_19: float16[16, 16] = clipped(tangents_1, primals_4)
mm: float16[16, 16] = mm(primals_2, permute)
mm_1: float16[16, 32] = mm(permute_1, primals_2)
convert_element_type_21: float16[16, 32] = clipped(mm_1, primals_4)
return mm, convert_element_type_21, None, constant_pad_nd, None""",
    )


def clips(graph: torch.fx.Graph) -> int:
    return len({n.meta[SPLICED] for n in graph.nodes if str(n.meta.get(SPLICED)).startswith("clipped(")})


def test_all_gradients_and_nothing_of_the_forward() -> None:
    assert clips(joint_of(Net().half(), *batches(32), **PLAIN)) == 7
    torch._dynamo.reset()
    assert clips(joint_of(Net().bfloat16(), batches(32)[0].bfloat16(), observe=True, **PLAIN)) == 0, (
        "BF16 has the range"
    )
    torch._dynamo.reset()
    assert clips(joint_of(Net().half(), *batches(32), observe=False, **PLAIN)) == 0


def test_it_is_idempotent() -> None:
    graph = joint_of(Net().half(), *batches(32), **PLAIN)
    before = len(graph.nodes)
    last = max(n.meta["desc"].idx for n in graph.find_nodes(op="placeholder") if hasattr(n.meta["desc"], "idx"))
    saturate_gradients(graph, Context(Recipe(), frozenset(), Inputs(last - 1, 100, ())))
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
