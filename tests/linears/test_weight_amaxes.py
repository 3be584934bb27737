"""Scales of a graph's weights at once: of which, and that each is what the weight's own is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.fx.graph import INV_SCALES
from fp8compile.linears.known_scales import GRADIENT, INPUT, WEIGHT
from fp8compile.linears.operands import How
from fp8compile.linears.weight_amaxes import take_scales_at_once
from fp8compile.numerics import E4M3, Tensorwise
from tests.support.graphs import traced

FOREACH = torch.ops.aten._foreach_norm.Scalar
SHAPES = ((8, 16), (16, 32), (16, 32), (32, 16))
W = How(E4M3, role=WEIGHT)


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_zeros(4, w.shape[0]) @ w for w in weights)


def rounded(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return products(x.bfloat16(), *(w.bfloat16() for w in weights))


def applied(matmuls: list[Node], spec: How) -> Any:
    """Decisions for matmuls, whose right operands are encoded like this."""
    specs = How(E4M3, role=INPUT), spec
    return [SimpleNamespace(matmul=SimpleNamespace(operands=m.args), specs=specs) for m in matmuls]


def taken(
    fn: Any = products, spec: How = W, shapes: Any = SHAPES, device: str = "cuda", **options: Any
) -> GraphModule:
    """The graph behind it, where each matmul's right operand is a weight that is encoded like this."""
    gm = traced(fn, shapes, device=device, **options)
    matmuls = [node for node in gm.graph.nodes if "mm" in node.name and node.op == "call_function"]
    take_scales_at_once(gm.graph, applied(matmuls, spec))
    gm.graph.lint()
    return gm


def known(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if INV_SCALES in node.meta]


def calls(gm: GraphModule) -> list[list[str]]:
    return [[str(w) for w in node.args[0]] for node in gm.graph.find_nodes(op="call_function", target=FOREACH)]


def test_weights_are_taken_at_once() -> None:
    gm = taken()
    weights = [node for node in gm.graph.nodes if node.op == "placeholder"][1:]
    assert calls(gm) == [[node.name for node in weights]] and known(gm) == weights
    assert all(w.meta[INV_SCALES][E4M3].meta["val"].shape == () for w in weights)


@pytest.mark.parametrize(("fn", "dtype"), [(products, torch.bfloat16), (rounded, torch.float32)])
def test_each_scale_is_that_of_what_is_encoded(fn: Any, dtype: torch.dtype) -> None:
    """Autocast's weight is rounded, and its amax too: to infinity where it is large."""
    gm = taken(fn, dtype=dtype)
    assert len(known(gm)) == 3
    pairs = [(node, node.meta[INV_SCALES][E4M3]) for node in known(gm)]
    gm.graph.output_node().args = (tuple(each for pair in pairs for each in pair),)
    for node in gm.graph.nodes:
        node.kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in node.kwargs.items()}
    given = [torch.randn(shape).to(dtype) for shape in SHAPES]
    given[2][3, 4] = torch.nan
    given[3][0, 0] = -torch.inf
    found = Interpreter(gm).run(*given)
    for value, inv_scale in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(inv_scale.nan_to_num(-1.0), Tensorwise(E4M3).encode(value)[1].nan_to_num(-1.0))


@pytest.mark.parametrize(
    "spec",
    [
        How(E4M3, role=INPUT),
        How(E4M3, role=GRADIENT),
        How(E4M3, rowwise=True, role=WEIGHT),
        How(E4M3, delayed=True, role=WEIGHT),
        How(E4M3, cached=True, role=WEIGHT),
    ],
    ids=["an input", "a gradient", "rowwise", "a known scale", "codes come in"],
)
def test_what_needs_no_scale_of_its_own_is_left(spec: How) -> None:
    assert not known(taken(spec=spec))


def test_a_single_weight_a_computed_one_and_a_cpu_s_are_left() -> None:
    assert not known(taken(shapes=SHAPES[:2]))
    assert not known(taken(device="cpu"))
    assert not known(taken(lambda x, *weights: products(x, *(w * 2 for w in weights))))
    assert not known(taken(lambda x, *weights: tuple(w.t() @ w for w in weights), spec=How(E4M3, role=INPUT)))


def test_what_is_rounded_to_fp16_is_left() -> None:
    assert not known(taken(lambda x, *weights: products(x.half(), *(w.half() for w in weights)), dtype=torch.float32))


def _empty_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_weights_of_several_dtypes_are_lists_of_their_own() -> None:
    def mixed(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return *rounded(x, a, b), *products(x.bfloat16(), c, d)  # as under autocast, beside what is BF16 itself

    dtypes = (torch.float32,) * 3 + (torch.bfloat16,) * 2
    with FakeTensorMode():
        gm = make_fx(mixed)(*map(_empty_on_a_gpu, SHAPES + SHAPES[1:2], dtypes))
    matmuls = [node for node in gm.graph.nodes if "mm" in node.name]
    take_scales_at_once(gm.graph, applied(matmuls, W))
    assert sorted(map(len, calls(gm))) == [2, 2]
