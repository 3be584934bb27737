"""recompute_kept: what is made of nothing that is saved, and what takes fewer bytes saved instead of a value."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8compile.fx.graph import nbytes
from fp8compile.fx.partition import PartitionedGraph
from tests.support.graphs import split_of
from tests.support.measure import compiled

WIDTH = 64
LATER = "recompute_for_budget,encode_saved"


class Adapter(nn.Module):
    """As LoRA: an FP32 adapter beside a BF16 linear, of the dropped-out input in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.base.requires_grad_(False)
        self.embed = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        return self.base(h) + self.b(self.a(F.dropout(h.float(), 0.1))).bfloat16()


class Masked(nn.Module):
    """A mask of all pairs of positions, made from a number of each, that checkpointed regions read."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def region(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.sigmoid(self.q(x) @ x.T + torch.where(mask, 0.0, -1e9)) @ x

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        number = document.cumsum(0)  # no operation that is repeated
        mask = (number[:, None] == number[None, :]) & (number[:, None] > 0)
        x = checkpoint(self.region, x, mask, use_reentrant=False)
        return checkpoint(self.region, x, mask, use_reentrant=False)


class Widened(nn.Module):
    """A region whose policy saves casts to FP32; the cut saves them too where a region's end is not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, saves_casts)
        return checkpoint(self.region, x, use_reentrant=False, context_fn=contexts)

    def region(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).float())


class Narrowed(Widened):
    def region(self, x: Tensor) -> Tensor:
        return self.a(self.b(x.float()).bfloat16())


def saves_casts(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    casts = op in (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    return CheckpointPolicy.MUST_SAVE if casts else CheckpointPolicy.PREFER_RECOMPUTE


def halves(model: nn.Module, *inputs: Tensor, disabled: str = LATER, **options: object) -> PartitionedGraph:
    torch._dynamo.reset()
    return split_of(model, *inputs, disabled=disabled, linears="off", **options)  # type: ignore[arg-type]


def kept(split: PartitionedGraph) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    edges = [e for e in split.edges if e.is_tensor and not split.costs_nothing_to_keep(e.forward)]
    return [(e.forward.meta["val"].dtype, tuple(e.forward.meta["val"].shape)) for e in edges]


def test_a_mask_is_made_from_its_seed() -> None:
    x = torch.randn(128, WIDTH, dtype=torch.bfloat16)
    assert (torch.bool, (128, WIDTH)) in kept(halves(Adapter(), x, disabled=f"{LATER},recompute_kept"))
    found = kept(halves(Adapter(), x))
    assert not any(dtype is torch.bool for dtype, _ in found), found
    assert (torch.float32, (128, WIDTH)) not in found


def test_masks_of_adapters_in_a_whole_model_are_made_from_their_seeds() -> None:
    """The cut saves dropped-out values in FP32 there, which are made from the masks again: that must not keep the masks."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, use_cache=False)
    modules = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    adapters = peft.LoraConfig(r=8, target_modules=modules, lora_dropout=0.05)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config).bfloat16(), adapters)
    ids = torch.randint(0, 64, (2, 64))
    before, after = (kept(halves(model, ids, disabled=f"{LATER}{more}")) for more in (",recompute_kept", ""))
    assert [shape for dtype, shape in before if dtype is torch.bool and shape]
    assert not [shape for dtype, shape in after if dtype is torch.bool and shape]


def test_gradients_of_a_mask_that_is_made_again_are_those_of_the_mask() -> None:
    torch.manual_seed(0)
    model, x, found = Adapter(), torch.randn(128, WIDTH, dtype=torch.bfloat16), []
    for disabled in ("recompute_kept,encode_saved", "encode_saved"):
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=disabled):
            fn = compiled(model, linears="off", **{"debug.codegen": "inductor"})
            torch.manual_seed(1)
            fn(x).float().square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_mask_of_pairs_is_made_from_numbers_of_positions() -> None:
    x, document = torch.randn(128, WIDTH), torch.zeros(128, dtype=torch.int64).bernoulli(0.05)
    chosen = (torch.float32, (128, 128))  # of numbers, by the mask
    assert chosen in kept(halves(Masked(), x, document, disabled=f"{LATER},recompute_kept"))
    split = halves(Masked(), x, document)
    assert chosen not in kept(split) and (torch.bool, (128, 128)) not in kept(split)
    small = [e for e in split.edges if e.is_tensor and e.forward.meta["val"].dtype is torch.int64]
    assert small and all(16 * nbytes(e.forward.meta["val"]) <= 128 * 128 for e in small)


@pytest.mark.parametrize("positions", [16, 24, 32, 48])
def test_positions_are_saved_where_they_take_a_16th(positions: int) -> None:
    """8 n bytes of int64 beside 4 n n of what the mask chooses."""
    x, document = torch.randn(positions, WIDTH), torch.ones(positions, dtype=torch.int64)
    stays = (torch.float32, (positions, positions)) in kept(halves(Masked(), x, document))
    assert stays == (16 * 8 * positions > 4 * positions * positions)


def test_what_was_cast_is_saved_before_the_cast() -> None:
    x = torch.randn(128, WIDTH, dtype=torch.bfloat16)
    assert (torch.float32, (128, WIDTH)) in kept(halves(Widened(), x, disabled=f"{LATER},recompute_kept"))
    found = kept(halves(Widened(), x))
    assert (torch.bfloat16, (128, WIDTH)) in found and (torch.float32, (128, WIDTH)) not in found


def test_a_cast_that_rounds_is_saved_as_it_is() -> None:
    x = torch.randn(128, WIDTH, dtype=torch.bfloat16)
    assert (torch.bfloat16, (128, WIDTH)) in kept(halves(Narrowed(), x))
    assert (torch.float32, (128, WIDTH)) not in kept(halves(Narrowed(), x))
