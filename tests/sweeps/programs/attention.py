"""Attention with masks of -inf, rows without keys, soft caps, biases, in one call and by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import leaf, linear, program

QKV = (leaf(2, 4, 64, 32), leaf(2, 4, 64, 32), leaf(2, 4, 64, 32))
INF = float("inf")


def causal(size: int = 64) -> Tensor:
    return torch.full((size, size), -INF).triu(1)


@program(*QKV)
def causal_by_hand_with_minus_infinity(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / 32**0.5 + causal()).softmax(-1) @ v


@program(*QKV)
def causal_by_masked_fill(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score = (q @ k.transpose(-1, -2)).masked_fill(causal().isinf(), -INF)
    return score.softmax(-1) @ v.sin()


@program(*QKV)
def rows_without_keys_are_set_to_zero(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(64) < 10
    score = (q @ k.transpose(-1, -2)).masked_fill(mask[:, None], -INF)
    return score.softmax(-1).nan_to_num(0.0) @ v


@program(*QKV)
def causal_sdpa(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).sin()


@program(*QKV)
def sdpa_with_a_boolean_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (torch.arange(64)[:, None] - torch.arange(64)).abs() < 9
    return F.scaled_dot_product_attention(q, k, v, mask).sin()


@program(*QKV, leaf(4, 64, 64))
def sdpa_with_a_learned_bias(m: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias + causal(), scale=0.3)


@program(*QKV)
def sdpa_with_large_logits(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(6 * q, k, v)


@program(*QKV)
def a_soft_cap_on_scores(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20 * torch.tanh(q @ k.transpose(-1, -2) / 20) + causal()).softmax(-1) @ v


@program(*QKV)
def linear_attention_with_elu(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2) + 1e-6)


@program(*QKV)
def normalized_queries_and_keys(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return (10 * q @ k.transpose(-1, -2)).softmax(-1) @ v


@program(*QKV)
def softmax_plus_one(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score = q @ k.transpose(-1, -2) / 5
    top = score.amax(-1, keepdim=True).clamp_min(0)
    e = (score - top).exp()
    return e / ((-top).exp() + e.sum(-1, keepdim=True)) @ v


@program(*QKV)
def alibi_and_dropout(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = (torch.arange(64)[:, None] - torch.arange(64)).clamp_min(0)
    slope = 2.0 ** -torch.arange(1, 5)[:, None, None]
    score = q @ k.transpose(-1, -2) / 6 - slope * distance + causal()
    return F.dropout(score.softmax(-1), 0.1, True) @ v


@program(leaf(4, 32, 128), model=lambda: nn.MultiheadAttention(128, 4, batch_first=True))
def multi_head_attention_with_weights(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    out, weights = m(x, x, x, need_weights=True)
    return out.tanh(), weights


@program(
    leaf(4, 32, 128), model=lambda: nn.TransformerEncoderLayer(128, 4, 256, 0.0, norm_first=True, batch_first=True)
)
def an_encoder_layer_with_padding(m: Any, x: Tensor) -> Tensor:
    padding = (
        (torch.arange(32) > torch.tensor([31, 20, 12, 25])[:, None])
        .float()
        .masked_fill_(torch.arange(32) > torch.tensor([31, 20, 12, 25])[:, None], -INF)
    )
    return m(x, src_key_padding_mask=padding)


@program(leaf(64, 256), model=linear(256, 256))
def pooling_by_attention_over_rows(m: Any, x: Tensor) -> Tensor:
    weight = m(x).tanh().sum(-1).softmax(0)
    return (weight[:, None] * x).sum(0).sin()


@program(*QKV)
def sparsemax(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score = q @ k.transpose(-1, -2)
    ordered = score.sort(-1, descending=True).values
    steps = torch.arange(1, 65)
    size = (1 + steps * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    threshold = (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size
    return (score - threshold).clamp_min(0) @ v
