"""A Llama from its config, bytes in and out, in a size that fits the device; AdamW, warm-up, cosine decay.

    rate(step) = peak * (step + 1) / warm-up                           while warming up
               = peak * (0.1 + 0.9 * (1 + cos(pi * done)) / 2)         then; done: share of the rest, 0 ... 1

The peak is low enough for the gap to mean something. Training at the edge of stability amplifies any
difference: on the CPU size at four times the rate (and AdamW's second beta at 0.95, warm-up of 20 steps), eager
and Inductor, which differ in the last bits of FP32 only, end 4 % apart. As set here they end equal to four
decimals, 1.9701 nats after 300 steps from seed 0: ``--arms inductor,eager`` measures that noise on any machine.

Parameters and optimizer states are FP32, matmuls run in 16 bit under autocast: the standard loop. A model
held in BF16 throughout would be smaller, but its updates are rounded away as the rate falls: in the same 300
steps, rounding parameters, gradients and moments to BF16 in every step ends at 2.0160 nats, 2.3 % more.

With --precision fp16 all but the moments are FP16: parameters (rounded stochastically, so that small updates count on
average), activations and gradients, which makes the loss scale matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile.extras.demo.data import VOCABULARY
from fp8compile.optim import AdamW

GIB = 2**30
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Attributes:
        name: the name in ``SIZES``.
        hidden: width of the residual stream; a multiple of 128, so that rows fill whole groups of one scale.
        intermediate: width inside the MLP.
        layers: decoder layers.
        heads: attention heads, of hidden / heads elements.
        length: bytes in a window.
        batch: windows in a batch.
        steps: optimizer steps, unless the user gives another number.
        rate: peak learning rate.
        validation_windows: held-out windows per evaluation.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    length: int
    batch: int
    steps: int
    rate: float
    validation_windows: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 128, 256, 1, 2, 64, 2, 6, 1e-2, 4),
        Size("cpu", 128, 384, 4, 4, 256, 8, 300, 1e-3, 128),
        Size("gpu_small", 512, 1408, 8, 8, 512, 8, 1000, 1e-3, 128),
        Size("gpu", 1024, 2816, 16, 16, 1024, 8, 1000, 5e-4, 128),
    )
}
LARGE_CARD_BYTES = 20 * GIB
BYTES_PER_PARAMETER = 12  # of an arm between its turns, in FP32: the parameter and two moments
MOST_WARM_UP_STEPS = 100


def size_for(device: torch.device, tiny: bool = False, arms: int = 1) -> Size:
    """The size that fits: "cpu" for two cores and five minutes, "gpu" for a card of 20 GiB, or more with several arms.

    Args:
        arms: how many are trained in turns; all but the one whose turn it is keep only their parameters and states.
    """
    if tiny:
        return SIZES["tiny"]
    if device.type != "cuda":
        return SIZES["cpu"]
    memory = torch.cuda.get_device_properties(device).total_memory
    return SIZES["gpu"] if memory >= large_card_bytes(arms) else SIZES["gpu_small"]


def large_card_bytes(arms: int) -> int:
    """Bytes that a card must have to train size "gpu" with ``arms`` arms in turns."""
    size = SIZES["gpu"]
    layer = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate
    parameters = size.layers * layer + 2 * VOCABULARY * size.hidden  # norms left out: 33 vectors
    return LARGE_CARD_BYTES + (arms - 1) * BYTES_PER_PARAMETER * parameters


def build_model(size: Size, seed: int, device: torch.device) -> Any:
    """A dropout-free ``LlamaForCausalLM`` with FP32 parameters drawn from ``seed``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(device)


def build_optimizer(model: torch.nn.Module, rate: float, compiled: bool = True) -> torch.optim.Optimizer:
    """torch's AdamW; for FP16 parameters ours, with FP32 moments and no copy of the parameters."""
    if all(p.dtype == torch.float32 for p in model.parameters()):
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.1)
    own: dict[str, Any] = {"state_format": "fp32", "master": "none", "compiled": compiled}
    return AdamW(model, lr=rate, betas=BETAS, weight_decay=0.1, **own)


def warm_up_steps(steps: int) -> int:
    """Steps until the rate is at its peak."""
    return max(1, min(MOST_WARM_UP_STEPS, steps // 5))


def rate_schedule(steps: int) -> Callable[[int], float]:
    """The factor on the peak rate at each step, for ``LambdaLR``."""
    warm_up = warm_up_steps(steps)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

    return factor
