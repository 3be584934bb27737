"""Denoisers and an autoencoder of diffusers in tiny sizes: U-Nets, transformers and a VAE, on digits with noise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.batches import Batch, digits
from benchmarks.harness.workarounds import mend_torchvision
from benchmarks.zoo.registry import ZooModel

IMAGES, SIZE, WIDTH, WORDS, STEPS = 4, 16, 128, 8, 100


def of_diffusers(
    name: str, cls: str, batch: Callable[[int], Batch], loss: Callable[[Any, Batch], Tensor], **sizes: Any
) -> ZooModel:
    """A model of diffusers by its class."""

    def make() -> nn.Module:
        mend_torchvision()
        import diffusers  # type: ignore

        made = getattr(diffusers, cls)(**sizes)
        assert isinstance(made, nn.Module)
        for module in made.modules():  # DiT drops labels of classes, and has no argument for it
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        return made

    return ZooModel(f"diffusers_{name}", "diffusers", make, batch, loss)


def noised(number: int, channels: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """Digits with noise as ``sample``, the step of each as ``timestep``; and the noise, which is to be found."""
    found = digits(number, rows=IMAGES, size=SIZE)
    generator = torch.Generator().manual_seed(number)
    clean = found.args[0][:, :1].expand(-1, channels, -1, -1)
    noise = torch.randn(clean.shape, generator=generator)
    steps = torch.randint(STEPS, (IMAGES,), generator=generator)
    share = (steps / STEPS)[:, None, None, None]
    return {"sample": (1 - share).sqrt() * clean + share.sqrt() * noise, "timestep": steps}, noise


def plain(number: int) -> Batch:
    """Of a denoiser that is told nothing else."""
    kwargs, noise = noised(number)
    return Batch(kwargs=kwargs, target=noise)


def worded(number: int, name: str = "sample", **more: tuple[int, ...]) -> Batch:
    """Of a denoiser that attends to words: random vectors; ``more`` are other inputs by their shapes."""
    kwargs, noise = noised(number, channels=4)
    generator = torch.Generator().manual_seed(number + 1)
    words = {"encoder_hidden_states": torch.randn(IMAGES, WORDS, WIDTH, generator=generator)}
    words |= {key: torch.randn(shape, generator=generator) for key, shape in more.items()}
    return Batch(kwargs={name: kwargs["sample"], "timestep": kwargs["timestep"], **words}, target=noise)


def labelled(number: int) -> Batch:
    """Of a denoiser that is told the class."""
    kwargs, noise = noised(number, channels=4)
    found = digits(number, rows=IMAGES, size=SIZE)
    assert found.target is not None
    return Batch(
        kwargs={"hidden_states": kwargs["sample"], "timestep": kwargs["timestep"], "class_labels": found.target},
        target=noise,
    )


def images(number: int) -> Batch:
    """Digits as ``sample``, which are to be found again."""
    found = digits(number, rows=IMAGES, size=SIZE).args[0]
    return Batch(kwargs={"sample": found}, target=found)


def squared(output: Any, batch: Batch) -> Tensor:
    """The mean squared error of ``output.sample``."""
    assert batch.target is not None
    found: Tensor = output.sample
    return F.mse_loss(
        found if found.dtype == torch.float64 else found.float(),
        batch.target.to(torch.promote_types(found.dtype, torch.float32)),
    )


BLOCKS: dict[str, Any] = {
    "sample_size": SIZE,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "num_layers": 2,
    "sample_size": SIZE,
    "patch_size": 2,
}

MODELS: tuple[ZooModel, ...] = (
    of_diffusers(
        "unet",
        "UNet2DModel",
        plain,
        squared,
        **BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=16,
    ),
    of_diffusers(
        "unet_text",
        "UNet2DConditionModel",
        worded,
        squared,
        **BLOCKS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
    ),
    of_diffusers(
        "dit",
        "DiTTransformer2DModel",
        labelled,
        squared,
        **TRANSFORMER,
        in_channels=4,
        out_channels=4,
        num_embeds_ada_norm=1000,
        norm_num_groups=8,
    ),
    of_diffusers(
        "pixart",
        "PixArtTransformer2DModel",
        functools.partial(worded, name="hidden_states"),
        squared,
        **TRANSFORMER,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        num_embeds_ada_norm=1000,
        norm_num_groups=8,
    ),
    of_diffusers(
        "sd3",
        "SD3Transformer2DModel",
        functools.partial(worded, name="hidden_states", pooled_projections=(IMAGES, WIDTH)),
        squared,
        **TRANSFORMER,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=16,
    ),
    of_diffusers(
        "vae",
        "AutoencoderKL",
        images,
        squared,
        **BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    ),
    of_diffusers(
        "vq",
        "VQModel",
        images,
        squared,
        **BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        num_vq_embeddings=64,
    ),
)
