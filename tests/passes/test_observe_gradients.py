"""observe_gradients: which values are counted, where the counts leave the graph, and where nothing is added."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.fx.graph import SPLICED
from fp8compile.observe.records import REST
from fp8compile.passes.observe_gradients import TOO_MANY_VALUES, observe_gradients
from fp8compile.recipe.context import Context, StatsInputs
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, split_of, text_of
from tests.support.measure import compiled, llama_case
from tests.support.watched import Net, batches

PLAIN = {"linears": "off", "saved": "off"}


def test_golden_what_is_counted_in_a_linear_and_where_it_leaves() -> None:
    graph = joint_of(nn.Linear(32, 16).half(), torch.randn(16, 32).half(), **PLAIN)
    assert_expected_inline(
        text_of(graph),
        """\
primals_1: float16[16, 32]
primals_2: float16[16]
primals_3: float16[16, 32]
primals_4: float64[71, 7]
primals_5: float32[]
tangents_1: float16[16, 16]
convert_element_type_6: float16[16, 16] = clipped(tangents_1, primals_5)
view_8: float32[6, 16] = _counted(convert_element_type_6, primals_5)
permute: float16[32, 16] = permute(primals_1)
addmm: float16[16, 16] = addmm(primals_2, primals_3, permute)
permute_1: float16[16, 16] = permute(convert_element_type_6)
mm: float16[16, 32] = mm(permute_1, primals_3)
view_9: float32[6, 16] = _counted(mm)
sum_1: float16[1, 16] = sum.dim_IntList(convert_element_type_6)
view_6: float32[6, 1] = _counted(sum_1)
view: float16[16] = view(sum_1)
cat_1: float64[1, 7] = together(view_6)
cat_6: float64[2, 7] = together(view_8, view_9)
constant_pad_nd: float64[71, 7] = all_lines(cat_1, cat_6)
return addmm, mm, view, None, constant_pad_nd, None
""",
    )


OF_THE_NET = [
    ("forward", "data", "", "input"),
    ("forward", "activation", "up", "addmm.default"),
    ("forward", "activation", "", "convert_element_type.default"),  # SiLU's result, an operand
    ("forward", "activation", "down", "addmm.default"),
    ("backward", "activation", "", "convert_element_type.default"),  # what up's products take
    ("backward", "activation", "", "gradient of an output"),
    ("backward", "weight", "down.weight", "mm.default"),
    ("backward", "weight", "down.bias", "sum.dim_IntList"),
    ("backward", "weight", "up.weight", "mm.default"),
    ("backward", "weight", "up.bias", "sum.dim_IntList"),
]


def test_every_value_that_is_stored_for_sure_has_one_row() -> None:
    report = fp8compile.explain(Net().half(), tuple(batches(32)), recipe=PLAIN)
    assert sorted((o.direction, o.kind, o.origin.module, o.origin.op) for o in report.observed) == sorted(OF_THE_NET)
    assert [o.row for o in report.observed] == list(range(10))
    assert all(
        "watched.py" in o.origin.source
        for o in report.observed
        if o.origin.op not in ("input", "gradient of an output")
    )


def test_results_of_products_are_counted_on_request() -> None:
    report = fp8compile.explain(Net().half(), tuple(batches(32)), recipe={**PLAIN, "fp32.observe": True})
    more = [("backward", "activation", "down", "mm.default")]
    assert sorted((o.direction, o.kind, o.origin.module, o.origin.op) for o in report.observed) == sorted(
        OF_THE_NET + more
    )


def test_convolutions_and_attention() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.qkv = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).flatten(2).transpose(1, 2)
            q, k, v = self.qkv(y).view(x.shape[0], 1, -1, 48).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    report = fp8compile.explain(Vision().half(), (torch.randn(2, 3, 16, 16).half(),), recipe=PLAIN)
    weights = {o.origin.module for o in report.observed if o.kind == "weight"}
    assert weights == {"conv.weight", "conv.bias", "qkv.weight", "qkv.bias"}
    assert any(o.origin.op == "convolution.default" for o in report.observed)
    assert any(o.direction == "backward" and o.kind == "activation" for o in report.observed)


def test_a_mask_is_no_activation() -> None:
    """Its -inf is meant, and is no overflow."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            bias = torch.zeros_like(keep, dtype=torch.float16).masked_fill(~keep, -torch.inf)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    x, keep = torch.randn(1, 2, 16, 16).half().requires_grad_(), torch.ones(16, 16, dtype=torch.bool).tril()
    report = fp8compile.explain(Masked(), (x, keep), recipe=PLAIN)
    assert report.observed and not [o for o in report.observed if o.shape == "[16, 16]" or "where" in o.origin.op]


def test_what_is_kept_for_the_backward_is_the_same_but_for_the_counts_of_the_forward() -> None:
    for options in ({}, {"linears": "off"}, {"linears.emulate": True}):
        layer, args = llama_case(1, 64, 128, 256, 2, dtype=torch.float16)
        without = split_of(layer, *args, **options, **{"fp32.observe": False})
        torch._dynamo.reset()
        with_counts = split_of(layer, *args, **options)
        forward = [e for e in with_counts.edges if e.forward.meta.get(SPLICED, "").startswith("counts(")]
        assert len(forward) == 1
        assert with_counts.saved_bytes() - without.saved_bytes() == forward[0].forward.meta["val"].numel() * 8, (
            options
        )
        assert len(with_counts.edges) == len(without.edges) + 2, "and the limit, which is an input"


def test_no_node_is_added_where_it_is_off_or_there_is_no_fp16() -> None:
    def nodes(dtype: torch.dtype, observe: object) -> int:
        torch._dynamo.reset()
        return len(joint_of(Net().to(dtype), *[b.to(dtype) for b in batches(32)], **{"fp32.observe": observe}).nodes)

    off = nodes(torch.float16, False)
    assert off == nodes(torch.bfloat16, False) == nodes(torch.bfloat16, "auto")
    assert nodes(torch.float16, "auto") > off


def test_inference_is_left_alone() -> None:
    with torch.no_grad():
        graph = joint_of(Net().half(), *batches(32))
    assert not [n for n in graph.nodes if SPLICED in n.meta]


def test_it_is_idempotent() -> None:
    graph = joint_of(Net().half(), *batches(32), **PLAIN)
    before = len(graph.nodes)
    placeholders = [n.meta["desc"].idx for n in graph.find_nodes(op="placeholder") if hasattr(n.meta["desc"], "idx")]
    inputs = StatsInputs(max(placeholders) - 1, 100, ())
    assert observe_gradients(graph, Context(Recipe(), frozenset(), inputs)).observed == ()
    assert len(graph.nodes) == before


def test_a_surplus_of_values_is_said(monkeypatch: object) -> None:
    class Few(StatsInputs):
        def __init__(self, statistics: int, rows: int, names: tuple[tuple[int, str], ...]) -> None:
            super().__init__(statistics, 5, names)

    from unittest import mock

    with mock.patch("fp8compile.observe.slot.StatsInputs", Few):
        report = fp8compile.explain(Net().half(), tuple(batches(32)), recipe=PLAIN)
    assert [o.row for o in report.observed] == list(range(5))
    assert sorted((o.kind, o.values) for o in report.observed if o.origin.op == REST) == [
        ("activation", 1),
        ("weight", 4),
    ]
    assert sum(s.reason == TOO_MANY_VALUES for s in report.skips) == 2, "of the forward; no gradient goes uncounted"


def test_a_model_with_linears_in_fp8_is_counted_before_they_are_encoded() -> None:
    model, [x] = Net().half(), batches(32)
    report = fp8compile.explain(model, (x,), recipe={"linears.emulate": True})
    plain = fp8compile.explain(model, (x,), recipe=PLAIN)
    assert [(o.direction, o.kind, o.origin) for o in report.observed] == [
        (o.direction, o.kind, o.origin) for o in plain.observed
    ]
    assert len(report.linears) == 5


def test_gradients_are_the_same_numbers() -> None:
    model, [x] = Net().half(), batches(32)
    ours = torch.autograd.grad(compiled(model, **PLAIN)(x).sum(), list(model.parameters()))
    torch._dynamo.reset()
    with torch._inductor.config.patch(disabled_passes="observe_gradients"):
        theirs = torch.autograd.grad(compiled(model, **PLAIN)(x).sum(), list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-10, atol=2**-14)
