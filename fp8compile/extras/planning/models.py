"""Shapes of Llama-like models from a count of parameters.

    layer = 2 hidden^2 + 2 hidden kv + 3 hidden intermediate + 2 hidden       q, o; k, v; gate, up, down; two norms
    model = layers layer + 2 vocabulary hidden + hidden                       embedding, head (untied), last norm

Source: Touvron et al., LLaMA (arXiv:2302.13971), Llama 2 (arXiv:2307.09288); Llama team, The Llama 3 Herd of Models
(arXiv:2407.21783), table 3; Qwen2.5 technical report (arXiv:2412.15115), table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LEAST, MOST = 1e9, 1e12
ALIKE = 0.05  # a count this near to a known model's stands for it
HEADS, ROUNDED_TO = 8, 256  # heads and the intermediate size are multiples of these


@dataclass(frozen=True)
class Shape:
    """A decoder of RMSNorm, grouped-query attention and SwiGLU, without biases; the head is not tied."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_norms(self) -> int:
        """Parameters of a layer's norms."""
        return 2 * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's linears."""
        return self.hidden * (2 * self.hidden + 2 * self.kv + 3 * self.intermediate)

    @property
    def table(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * (self.layer_matrices + self.layer_norms) + 2 * self.table + self.hidden


KNOWN = (
    Shape("Llama-2-7B", 32, 4096, 11008, 32000, 32, 32),
    Shape("Llama-3-8B", 32, 4096, 14336, 128256, 32, 8),
    Shape("Llama-2-13B", 40, 5120, 13824, 32000, 40, 40),
    Shape("Qwen2.5-32B without biases", 64, 5120, 27648, 152064, 40, 8),
    Shape("Llama-3-70B", 80, 8192, 28672, 128256, 64, 8),
    Shape("Llama-3-405B", 126, 16384, 53248, 128256, 128, 8),
)


def shape_for(parameters: float) -> Shape:
    """The known shape that has about so many parameters, or the nearest one scaled to it.

    Nearest is by ratio. A count within 5 % of it is that model. Otherwise hidden is scaled by the cube root of the ratio, in
    eights of heads, and as many layers of the same proportions are taken as come nearest to the count. The intermediate
    size makes up what is left. The vocabulary stays.

    Args:
        parameters: how many, such as 70e9.

    Raises:
        ValueError: the count is outside of 1e9 to 1e12.
    """
    if isinstance(parameters, bool) or not LEAST <= parameters <= MOST:
        raise ValueError(
            f"params={parameters!r} is not between {LEAST:.0e} and {MOST:.0e}, where shapes are known or near: give the "
            "number of parameters, such as 70e9 or 70B"
        )
    nearest = min(KNOWN, key=lambda known: abs(math.log(known.parameters / parameters)))
    if abs(nearest.parameters / parameters - 1) <= ALIKE:
        return nearest
    return _scaled(nearest, parameters)


def _scaled(known: Shape, parameters: float) -> Shape:
    ratio = (parameters / known.parameters) ** (1 / 3)
    size = known.hidden // known.heads
    heads = max(1, round(known.heads * ratio / HEADS)) * HEADS
    made = replace(
        known,
        name=f"{known.name} scaled",
        hidden=heads * size,
        intermediate=round(known.intermediate / known.hidden * heads * size),
        heads=heads,
        kv_heads=heads if known.kv_heads == known.heads else known.kv_heads,
    )
    in_layers = parameters - replace(made, layers=0).parameters
    layers = max(1, round(in_layers / (made.layer_matrices + made.layer_norms)))
    made = replace(made, layers=layers)
    left = parameters - replace(made, intermediate=0).parameters
    return replace(made, intermediate=max(1, round(left / (3 * layers * made.hidden * ROUNDED_TO))) * ROUNDED_TO)
