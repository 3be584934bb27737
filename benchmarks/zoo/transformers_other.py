"""Models of transformers that see, hear, or both: digits, tones whose pitch is their class, digits with their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.batches import CLASSES, VOCABULARY, Batch, cross_entropy, digits
from benchmarks.zoo.hugging_face import (
    FFN,
    GROUPED,
    HEADS,
    IMAGE,
    LAYERS,
    SIGHT,
    SIZES,
    WIDTH,
    hugging_face,
    sighted,
    tones,
)
from benchmarks.zoo.registry import ZooModel

NAMED = 16  # tokens of a digit's name
PICTURE = 256  # the token that stands for a patch
SAMPLES = 3200
HEARING: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "conv_dim": (64, 64, 64),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_labels": CLASSES,
    "classifier_proj_size": 64,
    "apply_spec_augment": False,
}
READING: dict[str, Any] = {**SIZES, "max_position_embeddings": NAMED}
LOOKING = {name: value for name, value in SIGHT.items() if name != "num_labels"}
STAGED = {"hidden_sizes": [32, 64, 128, 128], "depths": [1, 1, 1, 1], "num_labels": CLASSES}


def names(classes: Tensor, length: int = NAMED) -> Tensor:
    """Token ids that spell each class, by a fixed random table."""
    table = torch.randint(1, 256, (CLASSES, length), generator=torch.Generator().manual_seed(7))
    return table[classes]


def named_digits(number: int) -> Batch:
    """Eight digits and their names."""
    found = digits(number, rows=8, size=IMAGE)
    assert found.target is not None
    ids = names(found.target)
    return Batch(kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": found.args[0]})


def contrastive(output: Any, batch: Batch) -> Tensor:
    """Each digit to its own name, as CLIP is trained."""
    logits = output.logits_per_image
    assert isinstance(logits, Tensor)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), torch.arange(len(logits)))


def described(number: int, patches: int) -> Batch:
    """A digit's patches as tokens, then its name; the name is to be predicted."""
    found = digits(number, rows=8, size=IMAGE)
    assert found.target is not None
    name = names(found.target)
    picture = torch.full((len(name), patches), PICTURE)
    ids = torch.cat([picture, name], 1)
    labels = torch.cat([torch.full_like(picture, -100), name], 1)
    return Batch(
        kwargs={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": found.args[0],
            "labels": labels,
        }
    )


def captioned(number: int) -> Batch:
    """A digit and its name, which is to be predicted."""
    found = digits(number, rows=8, size=IMAGE)
    assert found.target is not None
    ids = names(found.target)
    return Batch(kwargs={"input_ids": ids, "pixel_values": found.args[0], "labels": ids.clone()})


def spectrograms(number: int, rows: int = 4, frames: int = 64, mels: int = 16) -> Batch:
    """Bands of a spectrogram that depend on a name's bytes, and the name."""
    generator = torch.Generator().manual_seed(number)
    classes = torch.randint(CLASSES, (rows,), generator=generator)
    pattern = torch.randn(CLASSES, mels, frames, generator=torch.Generator().manual_seed(8))[classes]
    noisy = pattern + 0.1 * torch.randn(pattern.shape, generator=generator)
    return Batch(kwargs={"input_features": noisy, "labels": names(classes, 32)})


def hearing(name: str, prefix: str, **sizes: Any) -> ZooModel:
    """A classifier of tones."""
    batch: Callable[[int], Batch] = functools.partial(tones, rows=4, samples=SAMPLES)
    model = f"{prefix}ForSequenceClassification"
    return hugging_face(name, f"{prefix}Config", model, batch, cross_entropy, **HEARING, **sizes)


MODELS: tuple[ZooModel, ...] = (
    sighted("vit", "ViT", **SIGHT),
    sighted("deit", "DeiT", **SIGHT),
    sighted("beit", "Beit", **SIGHT, use_relative_position_bias=True),
    sighted("dinov2", "Dinov2", **{k: v for k, v in SIGHT.items() if k != "intermediate_size"}, mlp_ratio=2),
    sighted(
        "swin",
        "Swin",
        image_size=IMAGE,
        patch_size=2,
        embed_dim=64,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    ),
    sighted(
        "swinv2",
        "Swinv2",
        image_size=IMAGE,
        patch_size=2,
        embed_dim=64,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    ),
    sighted("convnext", "ConvNext", **STAGED),
    sighted("convnextv2", "ConvNextV2", **STAGED),
    sighted(
        "mobilevit",
        "MobileViT",
        image_size=64,
        hidden_sizes=[48, 64, 80],
        neck_hidden_sizes=[16, 16, 24, 32, 32, 32, 64],
        num_labels=CLASSES,
    ),
    sighted(
        "segformer",
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[64, 128],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=64,
        num_labels=CLASSES,
    ),
    sighted(
        "poolformer",
        "PoolFormer",
        num_encoder_blocks=4,
        depths=[1, 1, 1, 1],
        hidden_sizes=[32, 64, 64, 128],
        num_labels=CLASSES,
    ),
    sighted(
        "pvt_v2",
        "PvtV2",
        image_size=IMAGE,
        hidden_sizes=[32, 64, 64, 128],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        num_labels=CLASSES,
    ),
    sighted("resnet_hf", "ResNet", embedding_size=32, **STAGED),
    sighted("mobilenet_v2", "MobileNetV2", image_size=IMAGE, depth_multiplier=0.5, num_labels=CLASSES),
    hugging_face(
        "clip",
        "CLIPConfig",
        "CLIPModel",
        named_digits,
        contrastive,
        text_config=READING,
        vision_config=LOOKING,
        projection_dim=64,
    ),
    hugging_face(
        "siglip",
        "SiglipConfig",
        "SiglipModel",
        named_digits,
        contrastive,
        text_config={**READING, "projection_size": WIDTH},
        vision_config=LOOKING,
    ),
    hugging_face(
        "blip",
        "BlipConfig",
        "BlipForConditionalGeneration",
        captioned,
        text_config={**READING, "encoder_hidden_size": WIDTH, "sep_token_id": 0},
        vision_config=LOOKING,
    ),
    hugging_face(
        "git",
        "GitConfig",
        "GitForCausalLM",
        captioned,
        **{**SIZES, "max_position_embeddings": 64},
        vision_config=LOOKING,
    ),
    hugging_face(
        "llava",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        functools.partial(described, patches=16),
        text_config={**GROUPED, "model_type": "llama", "vocab_size": VOCABULARY},
        vision_config={**LOOKING, "model_type": "clip_vision_model"},
        image_token_index=PICTURE,
        image_token_id=PICTURE,
        vision_feature_layer=-1,
    ),
    hugging_face(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        spectrograms,
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    ),
    hearing("wav2vec2", "Wav2Vec2"),
    hearing("hubert", "Hubert"),
    hearing("wavlm", "WavLM"),
    hearing("sew", "SEW", squeeze_factor=2),
    hearing("unispeech_sat", "UniSpeechSat"),
)
