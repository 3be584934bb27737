"""The stable embedding layer (Dettmers et al. 2021, section 2.3): what 8-bit optimizer states need at a model's input.

    y = LayerNorm(W[token])        W ~ U(-a, a), a = sqrt(6 / (rows + columns))        states of W: 32 bit

Xavier-uniform initialisation and the norm give outputs of variance 1 with no large values, so no token's gradient is much
larger than the others'; the norm comes before position embeddings are added. Names in the state_dict are bitsandbytes':
``weight``, ``norm.weight``, ``norm.bias``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8compile.optim.overrides import mark


class WideLayerNorm(nn.LayerNorm):
    """LayerNorm computed and returned in FP32 (FP64 for FP64), for any dtypes of the input and its own parameters."""

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        return F.layer_norm(input.to(wide), self.normalized_shape, self.weight.to(wide), self.bias.to(wide), self.eps)


class StableEmbedding(nn.Embedding):
    """``nn.Embedding``, and its arguments, with a LayerNorm after the lookup and 32-bit optimizer states for its weight.

    The output has the weight's dtype. The row of ``padding_idx`` is zero and stays so; it comes out as the norm's bias.
    To get other states after all, call ``override(embedding, state_format=..., names=("weight",))``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.norm = WideLayerNorm(self.embedding_dim, device=self.weight.device, dtype=wide)
        mark(self, ("weight",), "fp32")

    def reset_parameters(self) -> None:
        """Xavier-uniform, then the padding row is set to zero. The norm resets its own parameters."""
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.norm(super().forward(input))
        return y.to(self.weight.dtype)
