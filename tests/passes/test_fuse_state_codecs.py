"""fuse_state_codecs: an optimizer's step decodes each state once and encodes it once, in plain operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph

from fp8compile.compiler import pipeline
from fp8compile.fx.graph import SPLICED, copy_graph
from fp8compile.numerics.states.custom_ops import decoded_in_pieces, encoded_in_pieces
from fp8compile.numerics.states.registry import state_codec
from fp8compile.optim import EncodedTensor
from fp8compile.passes.fuse_state_codecs import DECODE, ENCODE, fuse_state_codecs
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled

SHAPE = (2, 128)


class Second(nn.Module):
    """Adam's second moment, and the root that its step divides by."""

    def forward(self, v: Tensor, g: Tensor) -> Tensor:
        v.mul_(0.999).add_(g * g * 0.001)
        return v.sqrt()


def inputs(format: str = "e4m3", shape: tuple[int, ...] = SHAPE) -> tuple[EncodedTensor, Tensor]:
    torch.manual_seed(0)
    return EncodedTensor.of(torch.rand(shape), format, signed=False), torch.randn(shape)


def traced(model: nn.Module, *args: Tensor) -> Graph:
    """The inference graph as the pass gets it."""
    caught: list[Graph] = []

    def catch(graph: Graph, ctx: Context) -> None:
        assert graph.owning_module is not None
        caught.append(copy_graph(graph.owning_module).graph)

    catching = mock.Mock(side_effect=catch, __name__="catch")
    with mock.patch.multiple(pipeline, OPTIMIZER=(), JOINT=(pipeline.preserves(catching),)):
        joint_of(model, *args)
    return caught[0]


def counts(graph: Graph) -> tuple[int, int]:
    return len(graph.find_nodes(op="call_function", target=DECODE)), len(
        graph.find_nodes(op="call_function", target=ENCODE)
    )


def test_golden_one_decode_and_one_encode() -> None:
    with torch.no_grad():
        graph = joint_of(Second(), *inputs())
    assert_expected_inline(
        text_of(graph),
        """\
arg0_1: float8_e4m3fn[2, 128]
arg1_1: float32[2, 1]
arg2_1: float32[2, 128]
mul_10: float32[2, 128] = decode_e4m3(arg0_1, arg1_1)
mul: float32[2, 128] = mul(mul_10, 0.999)
mul_1: float32[2, 128] = mul(arg2_1, arg2_1)
mul_2: float32[2, 128] = mul(mul_1, 0.001)
add: float32[2, 128] = add(mul, mul_2)
where: float32[2, 1] = encode_e4m3(add)
convert_element_type_1: float8_e4m3fn[2, 128] = encode_e4m3(add)
sqrt: float32[2, 128] = sqrt(add)
return sqrt
""",
    )


def test_what_it_finds_and_what_it_leaves() -> None:
    with torch.no_grad():
        graph = traced(Second(), *inputs())
    assert counts(graph) == (3, 2), "both writes, both of their reads, and the root's"
    fuse_state_codecs(graph, Context(Recipe()))
    spliced = {node.meta[SPLICED].split("(")[0] for node in graph.nodes if SPLICED in node.meta}
    assert counts(graph) == (0, 0) and spliced == {"decode_e4m3", "encode_e4m3", "store"}
    before = [node.format_node() for node in graph.nodes]
    fuse_state_codecs(graph, Context(Recipe()))
    assert [node.format_node() for node in graph.nodes] == before


def test_it_leaves_a_graph_without_states_alone() -> None:
    with torch.no_grad():
        graph = traced(nn.Linear(4, 4), torch.randn(2, 4))
    before = [node.format_node() for node in graph.nodes]
    fuse_state_codecs(graph, Context(Recipe()))
    assert [node.format_node() for node in graph.nodes] == before


class Other(nn.Module):
    """What is encoded in one format and decoded in another, or in another shape, or in part, is no pair."""

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        codes, inv_scale = torch.ops.fp8compile.encode_state(x, "e4m3", False)
        decode = torch.ops.fp8compile.decode_state
        return (
            decode([codes, inv_scale], [2, 128], "e4m3", True),
            decode([codes, inv_scale], [1, 256], "e4m3", False),
            decode([codes, other], [2, 128], "e4m3", False),
            decode([codes, inv_scale], [2, 128], "e4m3", False),
        )


def test_only_what_belongs_together_cancels() -> None:
    x = torch.rand(SHAPE)
    with torch.no_grad():
        found = joint_of(Other(), x, torch.rand(2, 1))
        ours = compiled(Other())(x, torch.rand(2, 1))
    returned = found.output_node().args[0]
    assert [node.op == "placeholder" for node in returned] == [False, False, False, True]  # type: ignore[union-attr,arg-type]
    codec = state_codec("e4m3", signed=False)
    assert torch.equal(ours[0], codec.decode(codec.encode(x), SHAPE))


def run(fn: Callable[..., Tensor], disabled: str = "") -> tuple[Tensor, Tensor]:
    torch._dynamo.reset()  # which knows nothing of passes that are disabled
    v, g = inputs()
    with torch._inductor.config.patch(disabled_passes=disabled), torch.no_grad():
        root = fn(v, g)
    return root, v.decode()


def test_the_root_is_of_what_has_not_been_rounded() -> None:
    v, g = inputs()
    exact = v.decode().double() * 0.999 + g.double() ** 2 * 0.001
    root, stored = run(compiled(Second()))
    torch.testing.assert_close(root.double().square(), exact, rtol=8 * 2.0**-24, atol=0)  # some five roundings
    codec = state_codec("e4m3", signed=False)
    fresh = codec.decode(codec.encode(root.double().square().float()), SHAPE)
    torch.testing.assert_close(stored, fresh, rtol=2.0**-3, atol=0)  # an ulp of E4M3, should a tie fall the other way


def test_without_it_a_step_is_rounded_in_between_as_without_compilation() -> None:
    root, stored = run(compiled(Second()), disabled="fuse_state_codecs")
    eager, eagerly_stored = run(Second())
    torch.testing.assert_close(root, eager, rtol=2.0**-24 * 4, atol=0)
    torch.testing.assert_close(stored, eagerly_stored, rtol=2.0**-24 * 4, atol=0)
    assert not torch.equal(root, run(compiled(Second()))[0])


@pytest.mark.parametrize("shape", [(3, 300), (129,), (4, 33, 3, 3), (3, 50), (2, 128), (0, 130), ()], ids=str)
@pytest.mark.parametrize("format", ["e4m3_expanded", "dynamic4", "bf16", "int8"])
def test_pieces_are_the_codec_itself(format: str, shape: tuple[int, ...]) -> None:
    x, codec = torch.randn(shape), state_codec(format, signed=True)
    parts = codec.encode(x)
    for part, piece in zip(parts, encoded_in_pieces(codec, x), strict=True):
        assert part.shape == piece.shape and torch.equal(part.float(), piece.float())
    assert torch.equal(decoded_in_pieces(codec, parts, shape), codec.decode(parts, shape))


def test_operations_on_an_encoded_tensor() -> None:
    """In place, out=, over lists: encoded anew. Otherwise FP32. Copies share nothing, and keep the codes as they are."""
    t, g = inputs()
    x = t.decode()
    codec = t.codec

    def rounded(value: Tensor) -> Tensor:
        return codec.decode(codec.encode(value), SHAPE)

    twin = copy.deepcopy(t)
    assert t.mul_(3) is t and torch.equal(t.decode(), rounded(x * 3)) and torch.equal(twin.decode(), x)
    torch._foreach_add_([t, twin], 1.0)
    assert torch.equal(t.decode(), rounded(rounded(x * 3) + 1)) and torch.equal(twin.decode(), rounded(x + 1))
    assert torch.maximum(twin, g, out=t) is t and torch.equal(t.decode(), rounded(torch.maximum(rounded(x + 1), g)))
    assert t.copy_(twin) is t and torch.equal(
        t.parts["codes"].view(torch.uint8), twin.parts["codes"].view(torch.uint8)
    )
    assert torch.equal(t.copy_(g[:1].abs().half()).decode(), rounded(g[:1].abs().half().float().expand(SHAPE)))
    assert not t.zero_().any() and t.detach().zero_().format == "e4m3"
    assert type(t.clone()) is type(t.to(torch.float32)) is EncodedTensor
    assert type(t + 1) is type(torch.zeros_like(t)) is type(t.to(torch.bfloat16)) is type(t.view(-1)) is Tensor
