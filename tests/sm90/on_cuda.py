"""Put the joint graph of forward and backward onto fake cuda tensors, so that the passes see the device they ask about.

The graph is captured on the CPU: a CPU build of torch has no autograd for cuda tensors. ``to_cuda`` runs as Inductor's
joint_custom_post_pass, before our own: constant folding, which stands before it, computes on real tensors.

Attention on the CPU is an operator of its own, which Inductor cannot lower for cuda. It becomes what
F.scaled_dot_product_attention traces to there; the backward takes the random state that the forward returns:

    _scaled_dot_product_flash_attention_for_cpu            ->  _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu_backward   ->  _scaled_dot_product_flash_attention_backward

With a mask it becomes memory-efficient attention, the first that takes one there:

    _scaled_dot_product_flash_attention_for_cpu(attn_mask=...)  ->  _scaled_dot_product_efficient_attention

LayerNorm on the CPU hands its mean and 1 / deviation on in the input's dtype, on cuda in FP32 (``torch._refs``,
native_layer_norm): a backward traced on the CPU would compute the normalised input a second time, from rounded ones.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from .lowering import retarget_in_place

aten = torch.ops.aten

JOINT_PASS = (
    "joint_custom_post_pass"  # Inductor's setting; "joint_custom_pre_pass" would be followed by constant folding
)
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_FOR_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_STATE = {FLASH: (6, 7), EFFICIENT: (2, 3)}  # the random state's seed and offset among the results


def to_cuda(graph: Graph) -> None:
    """The joint graph, in place, as if captured on an H100."""
    for node in graph.find_nodes(op="call_function", target=_FOR_CPU):
        _attention(node)
    for node in graph.find_nodes(op="call_function", target=_FOR_CPU_BACKWARD):
        _attention_backward(node)
    _fp32_statistics(graph)
    gm = graph.owning_module
    assert gm is not None
    retarget_in_place(gm, [node.meta["val"] for node in graph.find_nodes(op="placeholder")])


def _fp32_statistics(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        source, value = node.args[0], node.meta["val"]
        assert isinstance(source, Node)
        if source.target is aten.rsqrt.default or _is_mean(source):
            assert value.shape[-1] == 1 and source.meta["val"].dtype == torch.float32, node.format_node()
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_mean(node: Node) -> bool:
    return node.target is getitem and isinstance(of := node.args[0], Node) and of.target is aten.var_mean.correction


def _attention(node: Node) -> None:
    node.kwargs, mask = _without_mask(node)
    if mask is None:
        node.target = FLASH
    else:
        node.target, node.args = EFFICIENT, (*node.args[:3], mask, True, *node.args[3:])


def _without_mask(node: Node) -> tuple[dict[str, Any], Any]:
    kwargs = dict(node.kwargs)
    mask = kwargs.pop("attn_mask", None)
    return kwargs, mask


def _attention_backward(node: Node) -> None:
    grad, query, key, value, out, logsumexp, dropout, causal = node.args
    assert isinstance(out, Node) and isinstance(query, Node) and isinstance(key, Node)
    forward = out
    while forward.target not in _STATE:  # getitem, and an alias or two
        forward = forward.args[0]  # type: ignore[assignment]
    with node.graph.inserting_after(forward):
        state = [node.graph.call_function(getitem, (forward, i)) for i in _STATE[forward.target]]
    node.kwargs, mask = _without_mask(node)
    if forward.target is FLASH:
        lengths = query.meta["val"].shape[2], key.meta["val"].shape[2]
        node.target = FLASH_BACKWARD
        node.args = (grad, query, key, value, out, logsumexp, None, None, *lengths, dropout, causal, *state)
    else:
        node.target = EFFICIENT_BACKWARD
        wanted = [True, True, True, False]
        node.args = (grad, query, key, value, mask, out, logsumexp, *state, dropout, wanted, causal)
